"""What a script does with a Trainer, and what a failure in between leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import ROLLOUT, model_folder, spec

from areno.api.trainer import Trainer
from areno.engine.types import SamplingParams, TrainSequence
from areno.errors import EngineError
from areno.loss_fns.sft import sft_loss_fn

PROMPTS = [[2, 3, 4], [5, 6]]
PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture(params=["inline", "spawn"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    with Trainer(spec(model_folder(tmp_path)), workers=request.param) as made:
        yield made


def sampled(trainer: Trainer) -> list[list[int]]:
    with trainer.rollout_phase(ROLLOUT):
        results = trainer.rollout_token_batch(PROMPTS, 2, PARAMS, seed=5)
    return [sequence.resp_tokens for result in results for sequence in result.sequences]


def test_an_error_in_a_rollout_phase_ends_it(trainer: Trainer) -> None:
    expected = sampled(trainer)
    with pytest.raises(EngineError, match="the prompt has no tokens"), trainer.rollout_phase(ROLLOUT):
        trainer.rollout_token_batch([[2], []], 2, PARAMS)

    def fail(*_: object) -> None:
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"), trainer.rollout_phase(ROLLOUT):
        trainer.rollout_token_batch(PROMPTS, 4, PARAMS, on_progress=fail)  # with samples under way
    with pytest.raises(EngineError, match="outside a rollout phase"):
        trainer.rollout_token_batch(PROMPTS, 2, PARAMS)
    assert sampled(trainer) == expected
    row = TrainSequence(prompt_mask=[True, False], tokens=[2, 3])
    assert trainer.train([row], sft_loss_fn)["skipped_steps"] == 0
    assert sampled(trainer) != expected
