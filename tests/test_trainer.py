"""What the loops do with a Trainer, and what a failure in between leaves behind. Scripts: test_sdk.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import ROLLOUT, model_folder, spec

from areno.api.trainer import Trainer
from areno.config.model_roles import MicroBatchSpec
from areno.engine.types import SamplingParams, TrainSequence
from areno.errors import EngineError
from areno.loss_fns.sft import sft_loss_fn

PROMPTS = [[2, 3, 4], [5, 6]]
PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture(params=["inline", "spawn"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    with Trainer.from_spec(spec(model_folder(tmp_path)), None, workers=request.param) as made:
        yield made


def sampled(trainer: Trainer) -> list[list[int]]:
    with trainer.rollout_phase(ROLLOUT):
        results = trainer.rollout_token_batch(PROMPTS, 2, PARAMS, seed=5)
    return [sequence.resp_tokens for result in results for sequence in result.sequences]


def test_an_error_in_a_rollout_phase_ends_it(trainer: Trainer) -> None:
    expected = sampled(trainer)
    with pytest.raises(EngineError, match=r"raise gconfig.max_tokens"), trainer.rollout_phase(ROLLOUT):
        trainer.rollout_token_batch([[2], [3] * 512], 2, PARAMS)

    def fail(*_: object) -> None:
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"), trainer.rollout_phase(ROLLOUT):
        trainer.rollout_token_batch(PROMPTS, 4, PARAMS, on_progress=fail)  # with samples under way
    with pytest.raises(EngineError, match="outside a rollout session"):
        trainer.rollout_token_batch(PROMPTS, 2, PARAMS)
    assert sampled(trainer) == expected
    row = TrainSequence(prompt_mask=[True, False], tokens=[2, 3])
    assert trainer.train([row], sft_loss_fn)["skipped_steps"] == 0
    assert sampled(trainer) != expected


def test_a_phase_has_the_cache_it_was_given(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, engine = [], [], trainer.engine
    begin, end = engine.begin_rollout, engine.end_rollout
    monkeypatch.setattr(engine, "begin_rollout", lambda spec: (begun.append(spec), begin(spec)))
    monkeypatch.setattr(engine, "end_rollout", lambda drop=False: (ended.append(drop), end(drop)))
    with trainer.rollout_phase(ROLLOUT, drop=True):
        trainer.rollout_token_batch([[2] * 200], 1, PARAMS)  # longer than the cache was meant for
    assert begun == [ROLLOUT]
    assert ended == [True]


def test_micro_batches_are_those_of_mb_spec(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop gives its own; without one, mini_bs counts, under the token budget of the spec."""
    seen, train = [], trainer.engine.train
    monkeypatch.setattr(trainer.engine, "train", lambda *a, **how: (seen.append(how["mb_spec"]), train(*a, **how))[1])
    rows = [TrainSequence(prompt_mask=[True, False], tokens=[2, 3])]
    trainer.train(rows, sft_loss_fn, mini_bs=3)
    trainer.train(rows, sft_loss_fn, mini_bs=3, mb_spec=MicroBatchSpec(max_tokens_per_mb=64))
    assert seen == [MicroBatchSpec(mini_bs=3), MicroBatchSpec(max_tokens_per_mb=64)]
