"""KTO from scripts that hold their rows, against transformers' log-probabilities, and against TRL."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import areno
from areno.config.models import ScoringRefConfig
from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.loss_fns import kto_loss_fn
from areno.recipes.kto import KTOConfig
from areno.types import TrainSequence
from tests.helpers.row_runs import LABELLED, MODEL, PAIRS, hf_logprobs, kto_config, ranking, scalars
from tests.helpers.trl_runs import MODEL as TRL_MODEL
from tests.helpers.trl_runs import same_training, tokenizer_of, train_with_trl


def h(folder, prompt, answer):
    return sum(hf_logprobs(folder, prompt, answer)) - sum(hf_logprobs(MODEL, prompt, answer))


@pytest.mark.slow
def test_evaluation_is_what_transformers_computes(tmp_path):
    rows = LABELLED[:6]
    config = kto_config(tmp_path, actor={"beta": 0.5, "desirable_weight": 2.0}, total_train_steps=3)
    with areno.KTOTrainer(config, train_dataset=LABELLED, valid_dataset=rows) as trainer:
        trainer.fit()
        measured = trainer.evaluate()
    [run_dir] = (tmp_path / "rows").iterdir()
    latest = run_dir / "checkpoints" / "latest"
    pairs = zip(rows, [rows[-1], *rows[:-1]], strict=True)
    point = max(0.0, float(np.mean([h(latest, row["prompt"], other["response"]) for row, other in pairs])))
    gains = [0.5 * (h(latest, row["prompt"], row["response"]) - point) for row in rows]
    signed = [gain if row["label"] else -gain for gain, row in zip(gains, rows, strict=True)]
    weights = [2.0 if row["label"] else 1.0 for row in rows]
    losses = [weight * (1 - 1 / (1 + np.exp(-value))) for weight, value in zip(weights, signed, strict=True)]
    of_label = {label: [g for g, row in zip(gains, rows, strict=True) if row["label"] == label] for label in (1, 0)}
    assert measured["kl"] == pytest.approx(point, abs=1e-4)
    assert measured["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert measured["accuracy"] == np.mean([value > 0 for value in signed])
    assert measured["margin"] == pytest.approx(np.mean(of_label[1]) - np.mean(of_label[0]), abs=1e-4)
    found = scalars(run_dir)
    assert found["train/kl"][0] == 0  # the policy is its own reference
    assert len(found["train/margin"]) == 2  # a step has no desirable answer


def test_every_epoch_has_the_scores_of_its_mismatched_answers(tmp_path):
    config = kto_config(tmp_path, batch_size=5, total_train_epochs=3)
    with areno.KTOTrainer(config, train_dataset=LABELLED) as trainer:
        trainer.fit()  # an answer without a score would be a KeyError
        assert len(trainer._scores.rows) == len(LABELLED)
        state = trainer.setup.loader.state_dict()
    assert state["epoch"] == 3
    for (prompt, answer), score in list(trainer._scores.mismatched.items())[:3]:
        expected = hf_logprobs(MODEL, LABELLED[prompt]["prompt"], LABELLED[answer]["response"])
        assert score == pytest.approx(sum(expected), abs=1e-4)


@pytest.mark.parametrize("label", [True, False])
def test_a_class_without_rows_has_no_metrics(tmp_path, caplog, label):
    rows = [{**row, "label": label} for row in LABELLED]
    with (
        caplog.at_level("INFO"),
        areno.KTOTrainer(
            kto_config(tmp_path, total_train_steps=2), train_dataset=rows, valid_dataset=rows[:3]
        ) as trainer,
    ):
        trainer.fit()
        assert trainer.evaluate().keys() >= {"loss", "accuracy", "kl"}
        found = scalars(trainer.run.folder)
    there, absent = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert {f"train/rewards_{there}_{name}" for name in ("mean", "std", "max")} <= found.keys()
    assert not [name for name in found if absent in name or "margin" in name]
    assert "margin" not in caplog.text


def test_settings_and_rows_of_kto_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"train_dataset\.batch_size: is 1, but the reference point of KTO needs"):
        kto_config(tmp_path, batch_size=1)
    for row, message in (
        ({**LABELLED[0], "label": "yes"}, "field label is str 'yes', not true or false"),
        ({"prompt": "1+1=", "response": "2"}, "field label is missing, not true or false"),
        ({"prompt": "1+1=", "label": True}, "field response is missing; text or messages are expected"),
        ({"response": "2", "label": True}, "field prompt is missing; text or messages are expected"),
        ({"prompt": "1+1=", "response": [{"role": "user", "content": "x"}], "label": True}, "begins with a message of"),
    ):
        with pytest.raises(DataError, match=message):
            areno.KTOTrainer(kto_config(tmp_path), train_dataset=[row])
    nowhere = kto_config(tmp_path, ref=ScoringRefConfig(path="no/such/folder"))
    with pytest.raises(areno.errors.CheckpointError, match=r"ref\.path"):
        areno.KTOTrainer(nowhere, train_dataset=LABELLED)


@pytest.mark.slow
def test_quickstart_learns_from_labels(tmp_path):
    config = load(KTOConfig, "quickstart_kto", [f"cluster.fileroot={tmp_path}"])
    with areno.KTOTrainer(config) as trainer:
        assert trainer.fit() >= 0.95
        latest = trainer.run.folder / "checkpoints" / "latest"
    assert ranking(MODEL) < 0.1
    assert ranking(latest) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_training_is_that_of_trl(tmp_path, weight):
    """TRL's step and areno's have all rows, so both pair each prompt with the answer of the row before it."""
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")
    rows = [{"prompt": r["prompt"], "completion": r["response"], "label": r["label"]} for r in LABELLED]

    def trainer(model, dataset, **settings):
        config = trl.KTOConfig(beta=0.3, desirable_weight=weight, max_length=None, **settings)
        return trl.KTOTrainer(model, args=config, train_dataset=dataset, processing_class=tokenizer_of(TRL_MODEL))

    theirs = train_with_trl(trainer, rows, tmp_path)
    tokenizer = tokenizer_of(TRL_MODEL)

    def encoded(prompt, answer, label):
        start = tokenizer.encode(prompt, add_special_tokens=False)
        end = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        mask = [True] * len(start) + [False] * len(end)
        return TrainSequence(prompt_mask=mask, tokens=[*start, *end], reward=float(label))

    own = [encoded(r["prompt"], r["response"], r["label"]) for r in LABELLED]
    others = zip(LABELLED, [LABELLED[-1], *LABELLED[:-1]], strict=True)
    apart = [encoded(row["prompt"], other["response"], False) for row, other in others]

    def sums(trainer):
        scored = trainer.score_logprobs("actor", [row.tokens for row in apart], 1.0)
        return np.array([np.array(s)[~np.array(row.prompt_mask)].sum() for s, row in zip(scored, apart, strict=True)])

    before = []

    def point(trainer):
        now = sums(trainer)
        before.append(now)
        return {"reference_point": max(0.0, float((now - before[0]).mean()))}

    loss_fn = partial(kto_loss_fn, beta=0.3, desirable_weight=weight)
    same_training(theirs, own, loss_fn, reference=True, point=point)
    assert len(PAIRS) == len(own)
