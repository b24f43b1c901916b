"""The size of the flight recorder's records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import hardware_of
from areno.recipes.gspo import GSPOConfig
from areno.run.flight_recorder import KeptRollout, KeptStep
from areno.tracking.step_records import RecordFolder
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TrainSequence
from tests.helpers.moe_models import quickstart_with_experts

H200 = hardware_of("h200")


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_plan_says_how_large_the_records_of_steps_are(has_experts: bool, tmp_path: Path) -> None:
    """Within a factor of 2 of a record on disk, whose tokens and experts are random."""
    n_prompts, n_samples, n_prompt, n_answer = 8, 4, 64, 256
    draw, samples, rows = np.random.default_rng(0), [], []
    for group in range(n_prompts):
        item = PromptItem(prompt="", text="", tokens=draw.integers(0, 150_000, n_prompt).tolist())
        for _ in range(n_samples):
            logprobs = -draw.exponential(0.5, n_answer).astype(np.float32).astype(np.float64)
            tokens = draw.integers(0, 150_000, n_answer)
            sequence = RolloutSequence(resp_tokens=tokens, resp_logprobs=logprobs, resp_versions=np.full(n_answer, 3))
            if has_experts:
                sequence.routes = draw.integers(0, 8, (n_prompt + n_answer - 1, 4, 2), np.uint8)
            text = " ".join(map(str, tokens.tolist()))
            outcome = RewardOutcome(draw.normal())
            samples.append(ScoredSample(item=item, sequence=sequence, completion=text, outcome=outcome, group=group))
            mask = np.arange(n_prompt + n_answer) < n_prompt
            old = np.concatenate([np.full(n_prompt, np.nan), logprobs + 1e-4]).astype(np.float32)
            advantages = np.where(mask, 0, draw.normal())
            rows.append(
                TrainSequence(tokens=[*item.tokens, *tokens], prompt_mask=mask, old_logprobs=old, advantages=advantages)
            )
    settings = [f"train_dataset.batch_size={n_prompts}", f"gconfig.n_samples={n_samples}"]
    if has_experts:
        settings += [f"actor.path={quickstart_with_experts(tmp_path / 'model')}", "actor.routing_replay=true"]
    config = load(GSPOConfig, "quickstart", settings)
    kept = KeptStep(KeptRollout(samples, np.ones(len(samples), bool), 0, 0, {}), [("actor", rows)])
    RecordFolder(tmp_path / "recorder").write(1, kept.to_tree(1, {"config": asdict(config), "digests": {}}))
    size = RecordFolder(tmp_path / "recorder").sizes()[1]
    found = forecast(config, H200, 1, n_prompt, n_answer)
    assert 0.5 < found.record_bytes / size < 2
    config.recorder.max_gib = 0.0
    assert forecast(config, H200, 1, n_prompt, n_answer).record_bytes == 0
