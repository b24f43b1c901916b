"""Reward models from scripts that hold their rows, against what transformers computes and TRL trains."""

from __future__ import annotations

import json
from functools import cache, partial

import numpy as np
import pytest
import torch

import areno
from areno.api.trainer import Trainer
from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.loss_fns import reward_model_loss_fn
from areno.recipes.ppo import PPOConfig
from areno.recipes.rw import RewardModelConfig
from areno.trainers.reward_model import _scored_row, calibration_error
from areno.types import ModelRole
from tests.helpers.encoded_rows import pair_item
from tests.helpers.policy_runs import classifier
from tests.helpers.row_runs import MODEL, PAIRS, RATED, reward_model_config, scalars
from tests.helpers.trl_runs import MODEL as TRL_MODEL
from tests.helpers.trl_runs import same_training, tokenizer_of, train_with_trl


def hf_scores(folder, texts: list[list[int]]) -> list[float]:
    """Of a padded batch, as transformers computes them."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pad, longest = model.config.pad_token_id, max(map(len, texts))
    batch = torch.tensor([[*tokens, *[pad] * (longest - len(tokens))] for tokens in texts])
    with torch.no_grad():
        return model(batch, attention_mask=(batch != pad).long()).logits[:, 0].tolist()


def tokens_of(prompt, answer):
    tokenizer = tokenizer_of(TRL_MODEL)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return [*encode(prompt), *encode(answer), tokenizer.eos_token_id]


def test_evaluation_and_checkpoint_are_what_transformers_computes(tmp_path):
    config = reward_model_config(tmp_path, batch_size=2, actor={"center_coef": 0.1}, total_train_steps=4)
    with areno.RewardModelTrainer(config, train_dataset=RATED, valid_dataset=RATED) as trainer:
        trainer.fit()
        measured = trainer.evaluate()
        latest = trainer.run.folder / "checkpoints" / "latest"
    losses, n_rows, margins, right = 0.0, sum(len(row["answers"]) for row in RATED), [], 0.0
    every = []
    for row in RATED:
        scores = hf_scores(latest, [tokens_of(row["prompt"], answer) for answer in row["answers"]])
        every += scores
        ratings = row.get("ratings") or [3, 2, 1, 0]
        level = row.get("ratings") or [0] * 4
        n = range(len(scores))
        pairs = [(i, j) for i in n for j in n if ratings[i] > ratings[j]]
        weight = len(scores) / n_rows / len(pairs)
        for i, j in pairs:
            d = scores[i] - scores[j]
            losses += weight * (np.log1p(np.exp(-(d - level[i] + level[j]))) + 0.1 * (scores[i] + scores[j]) ** 2)
            right += weight * (d > 0)
            margins.append(d)
    assert measured["loss"] == pytest.approx(losses, abs=1e-4)
    assert measured["accuracy"] == pytest.approx(right, abs=1e-6)
    assert measured["rewards_mean"] == pytest.approx(np.mean(every), abs=1e-4)
    assert measured["calibration_error"] == pytest.approx(calibration_error(margins), abs=1e-4)
    found = scalars(latest.parents[1])
    assert found["train/loss"][-1] < found["train/loss"][0]
    assert {"train/confidence", "train/rewards_std", "train/margin"} <= found.keys()
    config = json.loads((latest / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert len(config["id2label"]) == 1


def test_a_checkpoint_is_read_as_a_reward(tmp_path):
    config = reward_model_config(tmp_path, total_train_steps=2)
    with areno.RewardModelTrainer(config, train_dataset=PAIRS) as trainer:
        trainer.fit()
        latest = trainer.run.folder / "checkpoints" / "latest"
    rows = [tokens_of(row["prompt"], row["chosen"]) for row in PAIRS]
    with Trainer(1, MODEL) as policy:
        policy.init()
        policy.ensure_roles({"reward": ModelRole(name="reward", path=str(latest), trainable=False)})
        scores = policy.score_rewards("reward", rows)
    assert scores == pytest.approx(hf_scores(latest, rows), abs=1e-5)
    assert np.std(scores) > 0


def test_a_model_without_a_padding_token_gets_the_tokenizers(tmp_path):
    """transformers cannot find the last token of a row without it."""
    source, folder = TRL_MODEL, tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    del values["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(values))
    config = reward_model_config(tmp_path, actor={"path": str(folder)}, total_train_steps=1)
    with areno.RewardModelTrainer(config, train_dataset=PAIRS) as trainer:
        trainer.fit()
        latest = trainer.run.folder / "checkpoints" / "latest"
    assert json.loads((latest / "config.json").read_text())["pad_token_id"] == tokenizer_of(TRL_MODEL).pad_token_id


def test_padding_is_not_scored():
    """A row ends with the last token of the answer that is not padding. The value of one more token is the score."""
    item = pair_item(tokenizer_of(TRL_MODEL), PAIRS[0], 0)
    tokens = [int(token) for token in item.chosen.tokens]
    row = _scored_row(item.chosen, pad=0)
    assert row.tokens.tolist() == [*tokens, tokens[-1]]
    assert row.prompt_mask.tolist() == [True] * len(tokens) + [False]
    as_end = _scored_row(item.chosen, pad=tokens[-1])  # where the padding token is also the end of a sequence
    assert as_end.tokens.tolist() == [*tokens[:-1], tokens[-2]]


def test_calibration_error():
    assert calibration_error([]) == 0
    assert calibration_error([0.0, 0.0]) == 0
    # Two comparisons of confidence 0.9, one right: |0.5 - 0.9|. One of confidence 0.6, right: |1 - 0.6|.
    nine, six = np.log(9), np.log(1.5)
    assert calibration_error([nine, -nine, six]) == pytest.approx((2 * 0.4 + 0.4) / 3)


def test_settings_and_rows_that_do_not_fit(tmp_path):
    for actor, message in (
        ({"use_lora": True}, "use_lora: is true, but adapters leave the score head as it is"),
        ({"margin_coef": -1.0}, "margin_coef: is -1.0; it must be at least 0"),
        ({"center_coef": -1.0}, "center_coef: is -1.0; it must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            reward_model_config(tmp_path, actor=actor)
    for row, message in (
        ({"prompt": "1+1=", "answers": "2"}, "field answers is str '2', not a list of at least two answers"),
        ({"prompt": "1+1=", "answers": ["2"]}, "not a list of at least two answers"),
        ({"prompt": "1+1=", "answers": ["2", 3]}, r"field answers\[1\] is int 3, not text or messages"),
        ({"prompt": "1+1=", "answers": ["2", "3"], "ratings": [1]}, "field ratings has 1 numbers for 2 answers"),
        ({"prompt": "1+1=", "answers": ["2", "3"], "ratings": [1, "x"]}, "not a list of numbers"),
        ({**PAIRS[0], "margin": "wide"}, "field margin is str 'wide', not a number"),
        ({"prompt": "1+1=", "chosen": "2"}, "field rejected is missing"),
    ):
        with pytest.raises(DataError, match=message):
            areno.RewardModelTrainer(reward_model_config(tmp_path), train_dataset=[row])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"center_coef": 0.05, "margin": 0.7}])
def test_training_is_that_of_trl(tmp_path, more):
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")
    from transformers import AutoModelForSequenceClassification

    folder = classifier(tmp_path / "model", seed=3, initializer_range=0.05)
    margin, center = more.get("margin"), more.get("center_coef", 0.0)
    rows = [{**row, **({"margin": margin} if margin else {})} for row in PAIRS]

    def trainer(model, dataset, **settings):
        config = trl.RewardConfig(center_rewards_coefficient=center or None, max_length=None, **settings)
        return trl.RewardTrainer(model, args=config, train_dataset=dataset, processing_class=tokenizer_of(TRL_MODEL))

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs = train_with_trl(trainer, rows, tmp_path, model)
    own = []
    for index, row in enumerate(PAIRS):
        item = pair_item(tokenizer_of(TRL_MODEL), row, index)
        for sequence, rating in ((item.chosen, 1.0), (item.rejected, 0.0)):
            scored = _scored_row(sequence, pad=0)
            scored.reward = rating
            scored.returns = np.full(len(scored.tokens), rating * (margin or 0.0), np.float32)
            own.append(scored)
    loss_fn = partial(reward_model_loss_fn, center_coef=center)
    same_training(theirs, own, loss_fn, rows_per_unit=2, folder=folder, head="value")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """seed -> (the last accuracy, the folder) of that run of the quickstart, which is made once."""

    @cache
    def of(seed):
        words = [f"seed={seed}", f"cluster.fileroot={tmp_path_factory.mktemp('quickstart')}"]
        with areno.RewardModelTrainer(load(RewardModelConfig, "quickstart_rw", words)) as trainer:
            return trainer.fit(), trainer.run.folder

    return of


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reward_model_of_the_quickstart_trains_a_policy(quickstart, tmp_path):
    """By PPO. How far depends on the rounding of the processor: 0.87 to 0.95 of the problems, at first 0.09."""
    _, folder = quickstart(1)
    # Of 60 steps, 30 of which train the critic alone: the mean score grows no more after 42.
    words = [f"reward.path={folder}/checkpoints/latest", f"cluster.fileroot={tmp_path}", "total_train_steps=45"]
    with areno.PPOTrainer(load(PPOConfig, "quickstart_rlhf", words)) as trainer:
        trainer.fit()
        told = scalars(trainer.run.folder)
    assert told["eval/reward/reward"][0] < 0.1
    assert told["eval/reward/reward"][-1] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1200)  # beside the test before, for its run
def test_quickstart_learns_to_rank(quickstart):
    """The median accuracy of three seeds is 1. Of one seed, it depends on the rounding of the processor."""
    found = []
    while found.count(1.0) < 2:
        assert len(found) < 3, found
        accuracy, folder = quickstart(len(found) + 1)
        found.append(accuracy)
        told = scalars(folder)
        assert told["eval/accuracy"][0] == 0.5  # the head starts at 0, so every comparison is a tie
    assert told["eval/margin"][-1] > 1
    assert told["eval/calibration_error"][-1] < 0.2
