"""Scored samples, as a rollout hands them to metrics and trackers."""

from __future__ import annotations

from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample


def sample(n_prompt, logprobs, reward, status="ok", finish_reason="stop"):
    return ScoredSample(
        item=PromptItem(prompt="p", text="p", tokens=[0] * n_prompt),
        sequence=RolloutSequence(resp_tokens=[1] * len(logprobs), resp_logprobs=logprobs, finish_reason=finish_reason),
        completion="c",
        outcome=RewardOutcome(reward, status),
    )


def samples():
    item = PromptItem(prompt="2+2?", text="<2+2?>", tokens=[1, 2, 3], solutions={"a", "4"} - {"a"}, index=17)
    return [
        ScoredSample(
            item=item,
            sequence=RolloutSequence(resp_tokens=[5, 6], resp_logprobs=[-0.1, -0.2]),
            completion="four\n4 é",
            outcome=RewardOutcome(1.0),
        ),
        ScoredSample(
            item=item,
            sequence=RolloutSequence(resp_tokens=[5], resp_logprobs=[-0.1], finish_reason="length"),
            completion="x" * 5000,
            outcome=RewardOutcome(None, "timeout", "no answer within 30 s"),
        ),
    ]
