"""The loops of SFT and DPO, from scripts that hold their rows, against transformers' log-probabilities."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

import areno
from areno.config.datasets import DatasetConfig, ValidDatasetConfig
from areno.config.models import MicroBatchSpec, ModelConfig, ScoringRefConfig
from areno.config.run import EvaluatorConfig, RecoverConfig
from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.loss_fns import sft_loss_fn
from areno.recipes.dpo import DPOConfig
from areno.recipes.sft import SFTConfig
from areno.tracking.reader import RunReader
from areno.types import AnswersItem, Batch
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import other_actor
from tests.helpers.row_runs import (
    DEMONSTRATIONS,
    MODEL,
    PAIRS,
    dpo_config,
    hf_logprobs,
    optimizer,
    quickstart_pairs,
    scalars,
    settings,
    sft_config,
)
from tests.helpers.tokenizers import load_tokenizer

# DPO -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dpo_of_a_script(tmp_path):
    config = dpo_config(
        tmp_path,
        batch_size=16,
        actor={"beta": 1.0, "label_smoothing": 0.1, "optimizer": optimizer(3e-4)},
        total_train_steps=25,
        evaluator=EvaluatorConfig(eval_before_train=True),
    )
    valid = quickstart_pairs("test")[::5]
    with areno.DPOTrainer(config, train_dataset=quickstart_pairs("train"), valid_dataset=valid) as trainer:
        result = trainer.fit()
        assert len(trainer.ref_scores) == 25 * 16
        again = trainer.evaluate()
    [run_dir] = (tmp_path / "rows").iterdir()
    assert RunReader(run_dir).versions["areno"] == areno.__version__
    assert (run_dir / "checkpoints" / "latest" / "config.json").is_file()
    found = scalars(run_dir)
    assert found["eval/accuracy"][0] == 0.5  # the actor is its own reference
    assert found["eval/margin"][0] == 0
    assert found["eval/ranking_accuracy"][0] < 0.3
    assert found["eval/accuracy"][1] == result == again["accuracy"] >= 0.9
    assert found["eval/ranking_accuracy"][1] >= 0.8
    assert len(found["train/accuracy"]) == 25
    assert found["train/margin"][-1] > 1
    assert found["train/rewards_chosen"][-1] - found["train/rewards_rejected"][-1] == pytest.approx(
        found["train/margin"][-1], abs=1e-5
    )
    # The very first loss is log 2, that of a policy which is its own reference.
    assert found["train/loss"][0] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_evaluation_is_what_transformers_computes(tmp_path, loss_type):
    config = dpo_config(tmp_path, actor={"beta": 0.5, "loss_type": loss_type}, total_train_steps=3)
    with areno.DPOTrainer(config, train_dataset=PAIRS, valid_dataset=PAIRS[:5]) as trainer:
        trainer.fit()
        measured = trainer.evaluate()
    [run_dir] = (tmp_path / "rows").iterdir()
    latest = run_dir / "checkpoints" / "latest"
    losses, margins, ranks = [], [], []
    for row in PAIRS[:5]:
        new = {name: hf_logprobs(latest, row["prompt"], row[name]) for name in ("chosen", "rejected")}
        old = {name: hf_logprobs(MODEL, row["prompt"], row[name]) for name in ("chosen", "rejected")}
        length = {name: len(new[name]) if loss_type == "ipo" else 1 for name in new}
        h = {name: (sum(new[name]) - sum(old[name])) / length[name] for name in new}
        d = h["chosen"] - h["rejected"]
        losses.append((d - 1) ** 2 if loss_type == "ipo" else math.log(1 + math.exp(-0.5 * d)))
        margins.append(0.5 * d)
        ranks.append(sum(new["chosen"]) > sum(new["rejected"]))
    assert measured["loss"] == pytest.approx(sum(losses) / 5, abs=1e-4)
    assert measured["margin"] == pytest.approx(sum(margins) / 5, abs=1e-4)
    assert measured["accuracy"] == sum(margin > 0 for margin in margins) / 5
    assert measured["ranking_accuracy"] == sum(ranks) / 5


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return other_actor(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("loss_type", ["simpo", "orpo"])
def test_losses_without_a_reference_score_nothing(tmp_path, monkeypatch, loss_type):
    from areno.api.trainer import Trainer

    scored, score = [], Trainer.score_logprobs
    monkeypatch.setattr(
        Trainer, "score_logprobs", lambda self, role, *args, **more: (scored.append(role), score(self, role, *args))[1]
    )
    config = dpo_config(tmp_path, actor={"loss_type": loss_type}, total_train_steps=2)
    with areno.DPOTrainer(config, train_dataset=PAIRS, valid_dataset=PAIRS[:5]) as trainer:
        trainer.fit()
        assert not trainer.ref_scores
        assert scored == ["actor"] * 2  # the two batches of the evaluation at the end
        measured = trainer.evaluate()
    new = [
        [hf_logprobs(tmp_latest(tmp_path), row["prompt"], row[name]) for name in ("chosen", "rejected")]
        for row in PAIRS[:5]
    ]
    ranks = [sum(chosen) > sum(rejected) for chosen, rejected in new]
    margins = [0.1 * (sum(chosen) / len(chosen) - sum(rejected) / len(rejected)) for chosen, rejected in new]
    assert measured["ranking_accuracy"] == sum(ranks) / 5
    assert measured["margin"] == pytest.approx(sum(margins) / 5, abs=1e-5)


def tmp_latest(tmp_path):
    [run_dir] = (tmp_path / "rows").iterdir()
    return run_dir / "checkpoints" / "latest"


@pytest.mark.parametrize("own", [True, False])
def test_the_reference_scores_every_pair_once(tmp_path, monkeypatch, other_model, own):
    from areno.api.trainer import Trainer

    scored, roles = [], []
    score, ensure, release = Trainer.score_logprobs, Trainer.ensure_roles, Trainer.release_role

    def spy(self, role, rows, *args, **options):
        scored.append((role, len(rows)))
        return score(self, role, rows, *args, **options)

    monkeypatch.setattr(Trainer, "score_logprobs", spy)
    monkeypatch.setattr(Trainer, "ensure_roles", lambda self, given: (roles.append(list(given)), ensure(self, given)))
    monkeypatch.setattr(Trainer, "release_role", lambda self, role: (roles.append(f"-{role}"), release(self, role)))
    reference = MODEL if own else str(other_model)
    config = dpo_config(
        tmp_path, batch_size=5, total_train_epochs=3, ref=ScoringRefConfig(path=None if own else reference)
    )
    with areno.DPOTrainer(config, train_dataset=PAIRS) as trainer:
        trainer.fit()
        scores = trainer.ref_scores
    role = "actor" if own else "ref"
    assert roles == ([] if own else [["ref"], "-ref"])
    # Two batches of five pairs; the third epoch has a pair that the first leaves out, so all twelve are scored.
    assert scored == [(role, 10), (role, 10), (role, 4)]
    assert sorted(scores) == list(range(len(PAIRS)))
    for index in (0, 5, 11):
        for name, values in zip(("chosen", "rejected"), scores[index], strict=True):
            expected = hf_logprobs(reference, PAIRS[index]["prompt"], PAIRS[index][name])
            assert values.dtype == "float32"
            assert values[-len(expected) :].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("limits", "n_scored"),
    [
        ({"total_train_steps": 2}, 8),
        ({"total_train_n_seqs": 5}, 8),
        ({"total_train_epochs": 1}, 12),
        ({"total_train_steps": 3, "total_train_epochs": 2}, 12),
    ],
)
def test_only_pairs_that_are_trained_on_are_scored(tmp_path, limits, n_scored):
    with areno.DPOTrainer(dpo_config(tmp_path, **limits), train_dataset=PAIRS) as trainer:
        trainer.score_reference()
        assert len(trainer.ref_scores) == n_scored
        state = trainer.setup.loader.state_dict()
        assert (state["epoch"], state["next"]) == (0, 0)
        trainer.fit()  # a pair without a score would be a KeyError


def test_without_evaluation_the_result_is_that_of_the_last_steps(tmp_path):
    with areno.DPOTrainer(dpo_config(tmp_path, total_train_steps=7), train_dataset=PAIRS) as trainer:
        result = trainer.fit()
        accuracies = scalars(trainer.run.folder)["train/accuracy"]
    assert len(accuracies) == 7
    assert result == pytest.approx(sum(accuracies[-5:]) / 5)


def test_settings_of_dpo_that_do_not_fit(tmp_path):
    for actor, message in (
        ({"beta": 0.0}, "beta: is 0.0; it must be more than 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: is 0.5; it must be less than 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing: is 0.1, but loss_type is ipo; set loss_type"),
        ({"loss_type": "robust"}, "label_smoothing: is 0, with which loss_type=robust is the same as sigmoid"),
        ({"simpo_gamma": 1.0}, "simpo_gamma: is 1, but loss_type is sigmoid; set loss_type to simpo, or leave"),
        ({"loss_type": "hinge"}, "loss_type: is 'hinge'; expected one of 'sigmoid', 'robust', 'ipo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dpo_config(tmp_path, actor=actor)
    with pytest.raises(ConfigError, match=r"ref.path: is set, but actor.loss_type=orpo uses no reference model"):
        dpo_config(tmp_path, actor={"loss_type": "orpo"}, ref=ScoringRefConfig(path=MODEL))
    nowhere = dpo_config(tmp_path, ref=ScoringRefConfig(path="no/such/folder"))
    with pytest.raises(areno.errors.CheckpointError, match=r"ref\.path"):
        areno.DPOTrainer(nowhere, train_dataset=PAIRS)
    with pytest.raises(DataError, match="train_dataset row 0: field chosen is missing"):
        areno.DPOTrainer(dpo_config(tmp_path), train_dataset=DEMONSTRATIONS)
    with pytest.raises(ConfigError, match=r"train_dataset\.path: missing"):
        areno.DPOTrainer(dpo_config(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_quickstart_learns_what_is_preferred(tmp_path, seed):
    config = load(DPOConfig, "quickstart_dpo", [f"seed={seed}", f"cluster.fileroot={tmp_path}"])
    with areno.DPOTrainer(config) as trainer:
        assert trainer.fit() >= 0.98
        told = scalars(trainer.run.folder)
    before, after = ({name: told[f"eval/{name}"][i] for name in ("accuracy", "ranking_accuracy")} for i in (0, -1))
    assert before["accuracy"] == 0.5
    assert before["ranking_accuracy"] < 0.15
    assert after["ranking_accuracy"] >= 0.98
    # The model gives the right sum, too: the chosen answer has not lost its probability along with the rejected one.
    latest = next((tmp_path / "quickstart_dpo").iterdir()) / "checkpoints" / "latest"
    likely = [math.exp(sum(hf_logprobs(latest, f"{a}+{b}=", str(a + b)))) for a, b in ((2, 8), (38, 3), (48, 2))]
    assert min(likely) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["loss_type=robust"],
        ["loss_type=ipo", "label_smoothing=0"],
        ["loss_type=simpo", "label_smoothing=0", "beta=2.0", "simpo_gamma=1.0"],
        ["loss_type=orpo", "label_smoothing=0"],
    ],
)
def test_each_loss_learns_what_is_preferred(tmp_path, settings):
    words = [*(f"actor.{word}" for word in settings), f"cluster.fileroot={tmp_path}"]
    with areno.DPOTrainer(load(DPOConfig, "quickstart_dpo", words)) as trainer:
        trainer.fit()
        ranks = scalars(trainer.run.folder)["eval/ranking_accuracy"]
    assert ranks[0] < 0.15
    assert ranks[-1] >= 0.95


# SFT -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_rows_have_the_loss_of_rows_one_by_one(tmp_path):
    """The mean over all response tokens of the step, as transformers has it for each row alone."""
    logprobs = [hf_logprobs(MODEL, row["prompt"], row["response"]) for row in DEMONSTRATIONS]
    expected = -sum(map(sum, logprobs)) / sum(map(len, logprobs))
    steps = []
    for mb_spec in ({"mini_bs": 1}, {"mini_bs": 16}, {"max_tokens_per_mb": 33}):
        config = sft_config(tmp_path, MicroBatchSpec(**mb_spec), total_train_steps=2)
        with areno.SFTTrainer(config, train_dataset=DEMONSTRATIONS) as trainer:
            last = trainer.fit()
            losses = scalars(trainer.run.folder)["train/loss"]
        assert losses[0] == pytest.approx(expected, abs=1e-5)
        assert last == losses[-1] < losses[0]
        steps.append(losses)
    assert steps[1] == pytest.approx(steps[0], abs=1e-5)
    assert steps[2] == pytest.approx(steps[0], abs=1e-5)


def test_evaluation_loss_of_a_script(tmp_path):
    config = sft_config(
        tmp_path,
        MicroBatchSpec(),
        total_train_steps=3,
        valid_dataset=ValidDatasetConfig(batch_size=3, max_length=64),
        evaluator=EvaluatorConfig(freq_steps=2, eval_before_train=True),
    )
    with areno.SFTTrainer(
        config, str(tmp_path / "here"), train_dataset=DEMONSTRATIONS, valid_dataset=DEMONSTRATIONS[:4]
    ) as trainer:
        result = trainer.fit()
    losses = scalars(tmp_path / "here")["eval/loss"]
    logprobs = [hf_logprobs(MODEL, row["prompt"], row["response"]) for row in DEMONSTRATIONS[:4]]
    assert losses[0] == pytest.approx(-sum(map(sum, logprobs)) / sum(map(len, logprobs)), abs=1e-5)
    assert len(losses) == 3
    assert result == losses[-1] < losses[1] < losses[0]


@pytest.mark.slow
def test_a_conversation_of_several_sequences_is_one_row(tmp_path, caplog):
    """Batches and epochs count rows of the data, and a run continues at the right row."""
    folder = model_folder(eos=383)  # its files list another end than its template writes
    rows = [
        {"messages": [{"role": ("user", "assistant")[at % 2], "content": f"{n} {at}"} for at in range(4)]}
        for n in range(6)
    ]

    def losses(name: str, changed: str, steps: int | None = None) -> list[float]:
        data = DatasetConfig(batch_size=2, max_length=256, changed_turns=changed)
        actor = ModelConfig(path=folder, init_from_scratch=True, gradient_checkpointing=False, optimizer=optimizer())
        how = settings(tmp_path, actor, train_dataset=data, total_train_epochs=2, total_train_steps=steps)
        with areno.SFTTrainer(SFTConfig(**how), str(tmp_path / name), train_dataset=rows) as trainer:
            trainer.fit()
            assert trainer.run.step == (steps or 6)
        return scalars(tmp_path / name)["train/loss"]

    with caplog.at_level("INFO"):
        whole = losses("split", "split")
    text = r"2 of 2 rows became 4 sequences, one for each turn of the assistant, which adds \d+ tokens"
    assert re.search(text, caplog.text)
    assert losses("part", "split", 2) == whole[:2]
    assert losses("part", "split") == whole
    assert losses("rendered", "as_rendered") != whole
    saved = json.loads((tmp_path / "split/checkpoints/latest/generation_config.json").read_text())
    assert saved["eos_token_id"] == [383, load_tokenizer("tiny").convert_tokens_to_ids("<|im_end|>")]


def test_two_runs_of_a_script_have_folders_of_their_own(tmp_path):
    for _ in range(2):
        config = sft_config(tmp_path, MicroBatchSpec(), total_train_steps=1)
        with areno.SFTTrainer(config, train_dataset=DEMONSTRATIONS) as trainer:
            trainer.fit()
    folders = list((tmp_path / "rows").iterdir())
    assert len(folders) == 2
    assert all("experiment_name: rows" in (folder / "config.yaml").read_text() for folder in folders)
    off = RecoverConfig(mode="off")
    config = sft_config(tmp_path, MicroBatchSpec(), total_train_steps=1, trial_name=folders[0].name, recover=off)
    with pytest.raises(ConfigError, match=r"trial_name: .* holds an earlier run"):
        areno.SFTTrainer(config, train_dataset=DEMONSTRATIONS)


def test_the_first_token_of_a_row_counts_in_no_mean(tmp_path):
    """Nothing predicts it, so a row that marks it as trained has the loss of its other tokens."""
    row = areno.TrainSequence(tokens=[5, 6, 1], prompt_mask=[False] * 3)
    with areno.SFTTrainer(sft_config(tmp_path, MicroBatchSpec()), train_dataset=DEMONSTRATIONS) as trainer:
        [logprobs] = trainer.setup.trainer.score_logprobs("actor", [row.tokens], 1.0)
        rows: Any = SimpleNamespace(batches=lambda: [Batch(items=[AnswersItem(rows=[row])])])
        measured = trainer.measure("valid", rows)["loss"]
        trained = trainer.setup.trainer.train([row], sft_loss_fn, temperature=1.0)["loss"]
    assert measured == pytest.approx(-sum(logprobs[1:]) / 2, abs=1e-6)
    assert trained == pytest.approx(measured, abs=1e-5)
