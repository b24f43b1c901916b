"""The rewards of samples, and the records that reward functions get of them."""

from __future__ import annotations

from collections.abc import Sequence

from areno.api.trainers.setup import PolicySetup
from areno.config.rollout.sampling import GenerationConfig
from areno.rewards.pool import report_failures
from areno.rewards.verdict import reward_problem
from areno.types import PromptItem, RewardOutcome, RewardRecord, RolloutResult, ScoredSample

_NO_REWARD = "the agent gave no reward: return AgentTrajectory(turns, reward=...), or set reward.fn"


def completions(
    setup: PolicySetup,
    items: Sequence[PromptItem],
    results: Sequence[RolloutResult],
    gconfig: GenerationConfig,
    first_group: int,
) -> list[tuple[ScoredSample, RewardRecord | None]]:
    """Every completion with its text, yet without its reward, and the record that the reward function gets of it."""
    pairs = [(item, sequence) for item, result in zip(items, results, strict=True) for sequence in result.sequences]
    groups = [first_group + index for index, result in enumerate(results) for _ in result.sequences]
    token_rows = [sequence.resp_tokens for _, sequence in pairs]
    texts = rendered = setup.tokenizer.batch_decode(token_rows, skip_special_tokens=False)
    if gconfig.skip_special_tokens:
        texts = setup.tokenizer.batch_decode(token_rows, skip_special_tokens=True)
    found = []
    for (item, sequence), text, raw, group in zip(pairs, texts, rendered, groups, strict=True):
        sample = ScoredSample(item=item, sequence=sequence, completion=text, outcome=RewardOutcome(0.0), group=group)
        found.append((sample, RewardRecord.of_completion(item, sequence, text, raw)))
    return found


def score(setup: PolicySetup, samples: Sequence[tuple[ScoredSample, RewardRecord | None]]) -> list[ScoredSample]:
    """The samples with their rewards: of the function, of the agent, of the reward model, or the sum of these.

    A sample without a record has failed before, and keeps its outcome.
    """
    asked = [(sample, record) for sample, record in samples if record is not None]
    records = [record for _, record in asked]
    for record in records:
        record.step, record.epoch = setup.run.step, setup.run.epoch
    outcomes = None
    if setup.rewards is not None:
        with setup.run.stop.at_once():
            outcomes = setup.rewards.score(records)
    own = [sample.trajectory.reward if sample.trajectory else None for sample, _ in asked]
    if any(own) or (outcomes is None and setup.config.reward.path is None):
        outcomes = add_own(records, outcomes, own)
    if setup.config.reward.path is not None:
        scores = setup.trainer.score_rewards("reward", [_whole(sample) for sample, _ in asked])
        outcomes = add_scores(records, outcomes, scores)
    assert outcomes is not None
    for (sample, _), outcome in zip(asked, outcomes, strict=True):
        sample.outcome = outcome
    return [sample for sample, _ in samples]


def _whole(sample: ScoredSample) -> list[int]:
    """The tokens that a reward model judges: of an agent, the last row."""
    if sample.trajectory is not None:
        return sample.trajectory.rows[-1].tokens
    return sample.item.tokens + sample.sequence.resp_tokens


def add_own(
    records: Sequence[RewardRecord],
    outcomes: Sequence[RewardOutcome] | None,
    own: Sequence[tuple[float, dict[str, float]] | None],
) -> list[RewardOutcome]:
    """The outcomes of a function with the rewards that agents gave themselves added. None: there is no function.

    Without a function, a sample whose agent gave no reward is a reward error.
    """
    if outcomes is None:
        nothing = RewardOutcome(None, "error", _NO_REWARD)
        out = [nothing if given is None else RewardOutcome(given[0], parts=given[1]) for given in own]
    else:
        out = list(outcomes)
        for index, given in enumerate(own):
            function = out[index].value
            if given is not None and function is not None:
                parts = {**(out[index].parts or {"fn": function}), "agent": given[0], **given[1]}
                out[index] = RewardOutcome(function + given[0], parts=parts)
    report_failures(records, out, "agent.fn")
    return out


def add_scores(
    records: Sequence[RewardRecord], outcomes: Sequence[RewardOutcome] | None, scores: Sequence[float]
) -> list[RewardOutcome]:
    """The outcomes of a function with the scores of a reward model added. None: there is no function.

    A sum that is no reward is a reward error of its sample.
    """
    out = [RewardOutcome(0.0)] * len(records) if outcomes is None else list(outcomes)
    scored = [index for index, outcome in enumerate(out) if outcome.value is not None]
    for index in scored:
        function = out[index].value or 0.0
        parts = {**(out[index].parts or {"fn": function}), "model": scores[index]}
        value = function + scores[index]
        if problem := reward_problem(value):
            out[index] = RewardOutcome(None, "not_finite", f"with the reward model: {problem}")
        else:
            out[index] = RewardOutcome(value, parts={} if outcomes is None else parts)
    report_failures([records[index] for index in scored], [out[index] for index in scored], "reward.path")
    return out
