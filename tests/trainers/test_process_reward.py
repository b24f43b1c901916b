"""Process reward models from scripts that hold their rows, against what transformers computes and trains."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch

import areno
from areno.api.trainer import Trainer
from areno.data.solution_steps import StepEncoder, render_steps, split_steps
from areno.errors import CheckpointError, ConfigError, DataError, EngineError
from areno.launch.compose import load
from areno.loss_fns import process_reward_loss_fn
from areno.recipes.grpo import GRPOConfig
from areno.recipes.ppo import PPOConfig
from areno.recipes.prm import ProcessRewardConfig
from areno.tracking.reader import RunReader
from areno.trainers.process_reward import _scored_rows, first_error_accuracy
from areno.types import ModelRole
from tests.helpers.policy_runs import classifier
from tests.helpers.row_runs import MODEL, STEP_LABELLED, process_reward_config, scalars
from tests.helpers.trl_runs import EPS, LR, STEPS, Training, same_training, tokenizer_of
from tests.helpers.trl_runs import MODEL as FOLDER


def encoded(row):
    """(tokens, index of the mark of each step), by hand: the separator is one token."""
    encode = cache(lambda text: tokenizer_of(FOLDER).encode(text, add_special_tokens=False))
    tokens, marks = list(encode(row["prompt"])), []
    for step in row["completions"]:
        tokens += encode(step) + encode("?")
        marks.append(len(tokens) - 1)
    return tokens, marks


def hf_log_odds(folder, rows):
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0] for tokens, _ in rows]
    return [(of[marks, 1] - of[marks, 0]).tolist() for of, (_, marks) in zip(logits, rows, strict=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint, and the metrics of its run."""
    folder = tmp_path_factory.mktemp("prm")
    config = process_reward_config(folder, total_train_steps=4)
    with areno.ProcessRewardTrainer(config, train_dataset=STEP_LABELLED, valid_dataset=STEP_LABELLED) as trainer:
        trainer.fit()
        measured = trainer.evaluate()
        return trainer.run.folder / "checkpoints" / "latest", measured, scalars(trainer.run.folder)


def test_evaluation_and_checkpoint_are_what_transformers_computes(trained):
    latest, measured, told = trained
    values = hf_log_odds(latest, [encoded(row) for row in STEP_LABELLED])
    v = np.concatenate(values)
    y = np.array([float(label) for row in STEP_LABELLED for label in row["labels"]])
    p = 1 / (1 + np.exp(-v))
    assert measured["loss"] == pytest.approx(np.mean(-y * np.log(p) - (1 - y) * np.log(1 - p)), abs=1e-4)
    assert measured["accuracy"] == pytest.approx(np.mean((v > 0) == (y >= 0.5)), abs=1e-6)
    assert measured["rewards_mean"] == pytest.approx(p.mean(), abs=1e-4)
    found = [
        next((n for n, x in enumerate(of) if x < 0), None) == next(n for n, y in enumerate(row["labels"]) if y < 0.5)
        for of, row in zip(values, STEP_LABELLED, strict=True)
        if min(row["labels"]) < 0.5
    ]
    assert measured["first_error_accuracy"] == pytest.approx(np.mean(found))
    assert told["train/loss"][-1] < told["train/loss"][0]
    assert {"train/confidence", "train/first_error_accuracy", "eval/calibration_error"} <= told.keys()
    config = json.loads((latest / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert (len(config["id2label"]), config["step_separator"]) == (2, "?")


def test_a_script_scores_steps(trained):
    rows = [encoded(row) for row in STEP_LABELLED]
    expected = [[1 / (1 + np.exp(-v)) for v in of] for of in hf_log_odds(trained[0], rows)]
    with Trainer(1, MODEL) as policy:
        policy.init()
        policy.ensure_roles({"reward": ModelRole(name="reward", path=str(trained[0]), trainable=False)})
        scores = policy.score_steps("reward", *map(list, zip(*rows, strict=True)))
        for own, theirs in zip(scores, expected, strict=True):
            assert own == pytest.approx(theirs, abs=1e-5)
        with pytest.raises(EngineError, match="is a process reward model, which scores steps and not whole rows"):
            policy.score_rewards("reward", [[3, 4]])
        with pytest.raises(EngineError, match="no process reward model"):
            policy.score_steps("actor", [[3, 4]], [[1]])
        with pytest.raises(DataError, match=r"step_ends\[0\] has 2, but row 0 has 2 tokens"):
            policy.score_steps("reward", [[3, 4]], [[2]])
        with pytest.raises(DataError, match="step_ends has 2 lists for 1 rows"):
            policy.score_steps("reward", [[3, 4]], [[1], [1]])


def test_answers_are_cut_and_scored_as_rows_are(trained):
    tokenizer, row = tokenizer_of(FOLDER), STEP_LABELLED[0]
    item = render_steps(tokenizer, row, 0, "?").encode(tokenizer)
    tokens, marks = encoded(row)
    assert item.rows[0].tokens.tolist() == tokens
    assert np.flatnonzero(~item.rows[0].prompt_mask).tolist() == marks
    ends = {**row, "completions": [step + "?" for step in row["completions"]]}
    assert render_steps(tokenizer, ends, 0, "?").encode(tokenizer).rows[0].tokens.tolist() == tokens
    prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
    reader = StepEncoder(tokenizer, "?", "min", 100)
    for answer in ("?".join(row["completions"]), "?".join([*row["completions"], ""]), "??".join(row["completions"])):
        assert reader.encode([prompt], [answer]) == [(tuple(tokens), tuple(marks))]
    [(alone, end)] = reader.encode([prompt], ["62"])  # one step, ended by the separator
    assert (alone[-1], end) == (tokens[marks[0]], (len(prompt) + 2,))
    assert reader.encode([prompt], [""]) == [((*prompt, tokens[-1]), (len(prompt),))]
    whole = "?".join(row["completions"])
    for limit in range(marks[0] + 1, len(tokens) + 2):  # the last step is shortened, so that its separator fits
        [(cut_tokens, cut_marks)] = StepEncoder(tokenizer, "?", "min", limit).encode([prompt], [whole])
        assert len(cut_tokens) <= limit
        assert {cut_tokens[mark] for mark in cut_marks} == {tokens[marks[0]]}
        assert cut_marks[:-1] == tuple(marks[: len(cut_marks) - 1])
        assert cut_tokens[: len(cut_tokens) - 1] == tuple(tokens[: len(cut_tokens) - 1])
        assert cut_marks[-1] == len(cut_tokens) - 1
    cut = StepEncoder(tokenizer, "?", "min", len(prompt) + 1).encode([prompt], ["62"])
    assert cut == [((*prompt, tokens[-1]), (len(prompt),))]
    [(prompt_alone, end)] = StepEncoder(tokenizer, "?", "min", len(prompt)).encode([prompt], ["62"])
    assert (prompt_alone, end) == (tuple(prompt[:-1]), (len(prompt) - 2,))
    assert split_steps("a\n \nb", "\n") == ["a", "b"]
    scores = [0.5, 0.2, 0.4]
    reduced = {
        how: StepEncoder(tokenizer, "?", how, 9).reward_of_step_scores(scores)
        for how in ("min", "mean", "last", "prod")
    }
    assert reduced == pytest.approx({"min": 0.2, "mean": 1.1 / 3, "last": 0.4, "prod": 0.04})


@pytest.mark.parametrize(("recipe", "how"), [("grpo", "min"), ("ppo", "mean")])
def test_a_checkpoint_is_the_reward_of_a_policy(trained, recipe, how, tmp_path):
    kind = {"grpo": GRPOConfig, "ppo": PPOConfig}[recipe]
    task = {"grpo": "quickstart", "ppo": "quickstart_ppo"}[recipe]
    words = [f"reward.path={trained[0]}", "reward.fn=null", f"reward.step_score={how}", "reward.step_separator='1'"]
    words += [f"cluster.fileroot={tmp_path}", "total_train_steps=1", "train_dataset.batch_size=8"]
    words += ["gconfig.n_samples=4", "valid_dataset=null", "saver.freq_steps=null"]
    config = load(kind, task, words)
    trainer = areno.PPOTrainer(config) if recipe == "ppo" else areno.PolicyOnlyTrainer(config)
    with trainer:
        trainer.fit()
        samples = RunReader(trainer.run.folder).samples(1)
    rows, tokenizer = [], tokenizer_of(FOLDER)
    one = tokenizer.encode("1", add_special_tokens=False)
    for sample in samples:
        tokens, marks = tokenizer.encode(sample["prompt"], add_special_tokens=False), []
        answer = sample["completion"].replace("<eos>", "")
        for step in [step for step in answer.split("1") if step] or [""]:
            tokens = [*tokens, *tokenizer.encode(step, add_special_tokens=False), *one]
            marks.append(len(tokens) - 1)
        rows.append((tokens, marks))
    assert any("1" in sample["completion"] for sample in samples)
    reduce = {"min": min, "mean": np.mean}[how]
    expected = [reduce([1 / (1 + np.exp(-v)) for v in of]) for of in hf_log_odds(trained[0], rows)]
    assert [sample["reward"] for sample in samples] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_training_is_that_of_transformers(tmp_path):
    """A plain loop over the token classifier and its own loss, by Adam, all rows in one padded batch."""
    from transformers import AutoModelForTokenClassification, Qwen3Config

    rows = [{**row, "labels": [round(label) for label in row["labels"]]} for row in STEP_LABELLED]
    values = json.loads((FOLDER / "config.json").read_text())
    torch.manual_seed(3)
    config = Qwen3Config(**{**values, "num_labels": 2, "initializer_range": 0.05, "classifier_dropout": 0.0})
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    texts = [encoded(row) for row in rows]
    longest = max(len(tokens) for tokens, _ in texts)
    batch = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in texts])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in texts])
    labels = torch.full_like(batch, -100)
    for number, (row, (_, marks)) in enumerate(zip(rows, texts, strict=True)):
        labels[number, marks] = torch.tensor(row["labels"])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=LR, eps=EPS, betas=(0.9, 0.999)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    theirs = Training(losses=losses, before=before, after=dict(model.state_dict()))
    items = [render_steps(tokenizer_of(FOLDER), row, 0, "?").encode(tokenizer_of(FOLDER)) for row in rows]
    same_training(theirs, _scored_rows(items), process_reward_loss_fn, folder=tmp_path / "model", head="step")


def test_a_batch_in_which_every_step_is_right_is_trained(tmp_path):
    right = [{**row, "labels": [True] * len(row["labels"])} for row in STEP_LABELLED]
    config = process_reward_config(tmp_path, total_train_steps=1)
    with areno.ProcessRewardTrainer(config, train_dataset=right) as trainer:
        trainer.fit()
    told = scalars(trainer.run.folder)
    assert "train/accuracy" in told
    assert "train/first_error_accuracy" not in told


def test_first_errors():
    steps = [([1, 0, 0], [1, -1, 1]), ([1, 0], [1, 1]), ([1, 1], [-1, 1]), ([0.2, 1], [-1, -1])]
    arrays = [(np.array(labels, float), np.array(logits, float)) for labels, logits in steps]
    assert first_error_accuracy(arrays) == pytest.approx(2 / 3)
    assert first_error_accuracy(arrays[2:3]) == 0


def test_settings_and_rows_that_do_not_fit(tmp_path):
    for actor, message in (
        ({"use_lora": True}, "use_lora: is true, but adapters leave the head as it is"),
        ({"step_separator": ""}, "step_separator: is ''; a text that is not empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            process_reward_config(tmp_path, actor=actor)
    good = {"prompt": "1+1=", "completions": ["1", "2"], "labels": [1, 0]}
    for change, message in (
        ({"labels": [1]}, "fields completions and labels have 2 and 1 entries; each step needs one label"),
        ({"labels": [1, 2]}, r"field labels\[1\] is int 2, not true, false or from 0 to 1"),
        ({"labels": [1, float("nan")]}, r"field labels\[1\] is float nan"),
        ({"completions": []}, "field completions is an empty list"),
        ({"completions": "1"}, "field completions is str '1', not a list"),
        ({"completions": ["1", " "], "labels": [1, -1]}, r"completions\[1\] is str ' '.*; field labels\[1\] is int -1"),
        ({"prompt": "", "completions": None}, "field prompt is empty; field completions is null"),
    ):
        with pytest.raises(DataError, match=message):
            areno.ProcessRewardTrainer(process_reward_config(tmp_path), train_dataset=[{**good, **change}])
    with pytest.raises(DataError, match="row 1: fields completions and labels have 2 and 1") as caught:
        areno.ProcessRewardTrainer(
            process_reward_config(tmp_path), train_dataset=[good, {**good, "labels": [1]}, {**good, "labels": [7, 1]}]
        )
    assert "row 2: field labels[0] is int 7" in str(caught.value)
    config = process_reward_config(tmp_path, actor={"step_separator": "\n"})
    with pytest.raises(DataError) as caught:
        areno.ProcessRewardTrainer(config, train_dataset=[good, {**good, "completions": ["1\n2", "3"]}])
    assert "actor.step_separator: is '\\n', which the tokenizer has no token for (<unk>)" in str(caught.value)
    assert "Number of these steps: 1; the first is in train_dataset row 1, completions[0]" in str(caught.value)
    score = classifier(tmp_path / "score")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (score / name).write_bytes((FOLDER / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"ForSequenceClassification.*no trained head for steps.*actor\.path"):
        areno.ProcessRewardTrainer(process_reward_config(tmp_path, actor={"path": str(score)}), train_dataset=[good])


def test_rewards_of_steps_that_do_not_fit(trained, tmp_path):
    plain = classifier(tmp_path / "plain")
    silent = tmp_path / "silent"
    silent.mkdir()
    for file in trained[0].iterdir():
        if file.is_file():
            (silent / file.name).write_bytes(file.read_bytes())
    values = json.loads((silent / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "step_separator"}))
    for words, message in (
        ([f"reward.path={silent}"], "reward.step_separator: is null, and config.json in reward.path has no step_sep"),
        (
            [f"reward.path={silent}", "reward.step_separator=x"],
            "reward.step_separator: is 'x', which the tokenizer has no",
        ),
        (
            [f"reward.path={plain}", "reward.step_separator='?'", "reward.step_score=mean"],
            "(?s)reward.step_separator: is set, but the model of reward.path is no process.*reward.step_score: is set",
        ),
    ):
        words = [*words, f"cluster.fileroot={tmp_path}"]
        with pytest.raises(ConfigError, match=message):
            areno.PolicyOnlyTrainer(load(GRPOConfig, "quickstart", words))


@pytest.mark.slow
def test_quickstart_finds_the_first_wrong_step(tmp_path):
    config = load(ProcessRewardConfig, "quickstart_prm", [f"cluster.fileroot={tmp_path}"])
    with areno.ProcessRewardTrainer(config) as trainer:
        trainer.fit()
        told = scalars(trainer.run.folder)
    assert told["eval/accuracy"][0] == 0.5  # the head starts at 0
    assert told["eval/accuracy"][-1] > 0.99
    assert told["eval/first_error_accuracy"][-1] > 0.99
    assert told["eval/calibration_error"][-1] < 0.05
