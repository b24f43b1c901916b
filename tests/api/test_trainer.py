"""What the loops do with a Trainer, and what a failure in between leaves behind. Scripts: test_sdk.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from areno.api.session import RolloutSession
from areno.api.trainer import Trainer
from areno.config.models import MicroBatchSpec
from areno.config.rollout import RolloutConfig
from areno.errors import EngineError
from areno.loss_fns.sft import sft_loss_fn
from areno.plan.plan import TrainerPlan
from areno.types import SamplingParams, TrainSequence
from tests.helpers.tiny_engine import ROLLOUT, model_folder, spec

PROMPTS = [[2, 3, 4], [5, 6]]
PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture(params=["inline", "spawn"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    plan = TrainerPlan(
        spec=spec(model_folder(tmp_path)),
        tokenizer=None,
        workers=request.param,
        rollout=RolloutConfig(max_concurrent_rollouts=ROLLOUT.max_running, drop_rollout_state=True),
        max_len=ROLLOUT.max_len,
    )
    with Trainer.from_plan(plan) as made:
        made.init()
        yield made


def session(trainer: Trainer) -> RolloutSession:
    return trainer.rollout_session(sampling_params=PARAMS, proxy=False)


def sampled(trainer: Trainer) -> list[list[int]]:
    with session(trainer):
        results = trainer.rollout_token_batch(PROMPTS, 2, PARAMS, seed=5)
    return [sequence.resp_tokens for result in results for sequence in result.sequences]


@pytest.mark.slow
def test_an_error_in_a_rollout_phase_ends_it(trainer: Trainer) -> None:
    expected = sampled(trainer)
    with pytest.raises(EngineError, match=r"raise gconfig.max_tokens"), session(trainer):
        trainer.rollout_token_batch([[2], [3] * 512], 2, PARAMS)

    def fail(*_: object) -> None:
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"), session(trainer):
        trainer.rollout_token_batch(PROMPTS, 4, PARAMS, on_progress=fail)  # with samples under way
    with pytest.raises(EngineError, match="outside a rollout session"):
        trainer.rollout_token_batch(PROMPTS, 2, PARAMS)
    assert sampled(trainer) == expected
    row = TrainSequence(prompt_mask=[True, False], tokens=[2, 3])
    assert trainer.train([row], sft_loss_fn)["skipped_steps"] == 0
    assert sampled(trainer) != expected


def test_rows_without_a_trained_token_are_counted_and_said(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    row = TrainSequence(prompt_mask=[True, True], tokens=[2, 3])
    assert trainer.train([row, row], sft_loss_fn)["skipped_steps"] == 1
    assert "no row of batch_data has a trained token" in caplog.text


def test_a_phase_has_the_cache_it_was_given(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, engine = [], [], trainer.engine
    begin, end = engine.begin_rollout, engine.end_rollout
    monkeypatch.setattr(engine, "begin_rollout", lambda spec: (begun.append(spec), begin(spec)))
    monkeypatch.setattr(engine, "end_rollout", lambda drop=False: (ended.append(drop), end(drop)))
    with session(trainer):
        trainer.rollout_token_batch([[2] * 200], 1, PARAMS)  # longer than the cache was meant for
    assert begun == [replace(ROLLOUT, keeps_cache=False)]
    assert ended == [True]


def test_micro_batches_are_those_of_mb_spec(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop gives its own; without one, mini_bs counts, under the token budget of the spec."""
    seen, train = [], trainer.engine.train
    monkeypatch.setattr(trainer.engine, "train", lambda *args: (seen.append(args[2].mb_spec), train(*args))[1])
    rows = [TrainSequence(prompt_mask=[True, False], tokens=[2, 3])]
    trainer.train(rows, sft_loss_fn, mini_bs=3)
    trainer.train(rows, sft_loss_fn, mini_bs=3, mb_spec=MicroBatchSpec(max_tokens_per_mb=64))
    assert seen == [MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=64)]
