"""Scoring of the samples of a rollout, by reward functions, the agents themselves, a reward model and a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from areno.api.session import sequence_of
from areno.config.rollout import GenerationConfig
from areno.data.chat_template import opens_reasoning
from areno.data.encode import decode_all
from areno.engine.requests import phase_spans
from areno.errors import keys_renamed
from areno.run.setup import PolicySetup
from areno.scoring.judge import JudgeTask, Judging, add_judge_scores
from areno.scoring.pool import report_failures
from areno.scoring.records import CompletionRecord, Record, RecordedPrompt, reward_problem
from areno.trainers.rows import token_arrays
from areno.types import GenerationOutput, PromptItem, RewardOutcome, ScoredSample

_NO_REWARD = "the agent gave no reward: return or report one, or set reward.fn"
_NOT_SCORED = RewardOutcome(0.0)
_AT_ONCE = 64  # completions that are decoded together; they are scored while the next ones are decoded


class Scorer(AbstractContextManager["Scorer"]):
    """Converts outputs of a rollout to scored samples, while the rollout still generates other outputs.

    Use it as a context manager: call `score_outputs` (completions) or `add` (agents' samples) during the rollout, then
    `finish`. Groups are numbered from `first_group`.
    """

    def __init__(self, setup: PolicySetup, items: Sequence[PromptItem], gconfig: GenerationConfig, first_group: int):
        self._setup, self.items, self.gconfig, self.first_group = setup, list(items), gconfig, first_group
        self._found: dict[int, tuple[ScoredSample, Record | None]] = {}  # by index in the rollout
        self._prompts: dict[int, tuple[RecordedPrompt, np.ndarray]] = {}  # item -> prompt, tokens
        self._scoring = None if setup.rewards is None else setup.rewards.scoring()
        judge = setup.config.reward.judge
        self._judging = None if setup.judge is None else Judging(judge, setup.judge, self._judge_task)

    def add_prompts(self, items: Sequence[PromptItem]) -> None:
        self.items += items

    def wait_for_rewards(self, number: int) -> list[float]:
        """Wait until functions have scored all samples of a prompt. Return the rewards of samples that did not fail."""
        assert self._scoring is not None, "no reward function scores the samples"
        with self._setup.run.stop.interruptible():
            outcomes = self._scoring.wait_for_outcomes(self._sample_indices_of(number))
        return [outcome.value for outcome in outcomes if outcome.value is not None]

    def has_rewards_of(self, number: int) -> bool:
        assert self._scoring is not None, "no reward function scores the samples"
        return self._scoring.are_scored(self._sample_indices_of(number))

    def _sample_indices_of(self, number: int) -> range:
        first, source = number * self.gconfig.n_samples, self.items[number].source
        n_samples = self._setup.config.n_samples_of(source, self.gconfig)
        return range(first, first + n_samples)

    def _judge_task(self, index: int) -> JudgeTask:
        number = index // self.gconfig.n_samples
        item = self.items[number]
        return JudgeTask(self._sample_indices_of(number), item.messages or item.prompt, opens_reasoning(item.text))

    def score_outputs(self, outputs: Sequence[GenerationOutput]) -> None:
        """Start to score finished outputs, whose `request_id` is the index of their prompt."""
        for start in range(0, len(outputs), _AT_ONCE):
            self._record_outputs(outputs[start : start + _AT_ONCE])

    def _record_outputs(self, outputs: Sequence[GenerationOutput]) -> None:
        tokenizer, sequences = self._setup.tokenizer, [sequence_of(output) for output in outputs]
        # These lists live only in this call: millions of small integers would slow down the garbage collector.
        token_rows = [np.asarray(vars(sequence)["resp_tokens"]).tolist() for sequence in sequences]
        texts = rendered = decode_all(tokenizer, token_rows, skip_special_tokens=False)
        if self.gconfig.skip_special_tokens:
            texts = decode_all(tokenizer, token_rows, skip_special_tokens=True)
        found = {}
        for output, sequence, text, raw in zip(outputs, sequences, texts, rendered, strict=True):
            prompt, tokens = self._recorded_prompt(output.request_id)
            arrays = token_arrays(tokens, sequence)
            sample = ScoredSample(
                item=prompt.item,
                sequence=sequence,
                completion=text,
                outcome=_NOT_SCORED,
                group=self.first_group + output.request_id,
                arrays=arrays,
                spans=phase_spans(output.phases),
            )
            index = output.request_id * self.gconfig.n_samples + output.sample
            found[index] = (sample, CompletionRecord(prompt, arrays, text, raw))
        self.score_samples(found)

    def _recorded_prompt(self, number: int) -> tuple[RecordedPrompt, np.ndarray]:
        if number not in self._prompts:
            item = self.items[number]
            self._prompts[number] = RecordedPrompt(item), np.array(item.tokens, np.int64)
        return self._prompts[number]

    def score_samples(self, found: Mapping[int, tuple[ScoredSample, Record | None]]) -> None:
        """Start to score samples, {index in the rollout: (sample, record)}. A failed sample has no record."""
        self._found.update(found)
        records = {index: record for index, (_, record) in found.items() if record is not None}
        for record in records.values():
            record.step, record.epoch = self._setup.run.step, self._setup.run.progress.epoch
        if self._scoring is not None:
            self._scoring.add({index: record for index, record in records.items() if self._has_function(index)})
        if self._judging is not None:
            self._judging.add(records)

    def _has_function(self, index: int) -> bool:
        """Whether a reward function scores the sample, and not its agent alone."""
        rewards = self._setup.rewards
        return rewards is not None and rewards.scores(self.items[index // self.gconfig.n_samples].source)

    @property
    def is_waiting(self) -> bool:
        """Whether some samples still wait for a reward function or for an answer of the judge's endpoint."""
        if self._judging is not None and self._judging.n_open:
            return True
        return self._scoring is not None and self._scoring.n_scored < len(self._found)

    @property
    def samples(self) -> list[ScoredSample]:
        """The samples so far, in the order of the rollout, possibly without rewards."""
        return [sample for _, (sample, _) in sorted(self._found.items())]

    def finish(self) -> list[ScoredSample]:
        """Wait for the rewards, and return the samples in the order of the rollout, with `outcome` set.

        The reward of a sample is the sum over the sources that are set: reward function, agent, reward model and judge.
        A failed sample keeps the outcome that `add` received, which has no reward.
        """
        setup, found = self._setup, dict(sorted(self._found.items()))
        asked = {index: (sample, record) for index, (sample, record) in found.items() if record is not None}
        records = [record for _, record in asked.values()]
        outcomes: list[Any] | None = None  # None in it: the sample has no reward function
        if self._scoring is not None:
            with setup.run.stop.interruptible():
                by_index = self._scoring.collect_outcomes()
            outcomes = [by_index.get(index) for index in asked]
            for index, (sample, _) in asked.items():
                if (span := self._scoring.span_of(index)) is not None:
                    sample.spans.append(("scored", *span))
            scored = [
                (record, outcome) for record, outcome in zip(records, outcomes, strict=True) if outcome is not None
            ]
            report_failures([record for record, _ in scored], [outcome for _, outcome in scored])
        own = [sample.trajectory.reward if sample.trajectory else None for sample, _ in asked.values()]
        if outcomes is None and not setup.config.needs_rewards and not setup.config.reward.has_model:
            outcomes = [_NOT_SCORED] * len(records)  # a run without rewards, such as distillation
        if any(own) or ((outcomes is None or None in outcomes) and not setup.config.reward.has_model):
            outcomes = add_agent_rewards(records, outcomes, own)
        source = "fn" if self._scoring is not None else "agent"  # of outcomes without named parts
        if setup.config.reward.path is not None:
            scores = self._model_scores([sample for sample, _ in asked.values()])
            source, before = "model" if outcomes is None else source, source
            outcomes = add_model_scores(records, outcomes, scores, before)
        if self._judging is not None:
            outcomes = self._add_judge_scores(self._judging, list(asked), records, outcomes, source)
        assert outcomes is not None
        for (sample, _), outcome in zip(asked.values(), outcomes, strict=True):
            sample.outcome = outcome
        return [sample for sample, _ in found.values()]

    def _model_scores(self, samples: Sequence[ScoredSample]) -> list[float]:
        """Return the score of the reward model for each sample.

        Equal rows are scored once, so that rounding, which depends on the position in a batch, cannot tell them apart.
        """
        trainer, steps = self._setup.trainer, self._setup.steps
        if steps is None:
            whole = [tuple(_tokens_to_score(sample)) for sample in samples]
            distinct = list(dict.fromkeys(whole))
            scores = dict(zip(distinct, trainer.score_rewards("reward", distinct), strict=True))
            return [scores[row] for row in whole]
        parts = [_prompt_and_completion(sample) for sample in samples]
        answers = decode_all(self._setup.tokenizer, [answer for _, answer in parts], skip_special_tokens=True)
        rows = steps.encode([prompt for prompt, _ in parts], answers)
        distinct_rows = list(dict.fromkeys(rows))
        tokens, ends = [list(tokens) for tokens, _ in distinct_rows], [list(ends) for _, ends in distinct_rows]
        of_steps = trainer.score_steps("reward", tokens, ends)
        rewards = {row: steps.reward_of_step_scores(each) for row, each in zip(distinct_rows, of_steps, strict=True)}
        return [rewards[row] for row in rows]

    def _add_judge_scores(
        self,
        judging: Judging,
        indices: Sequence[int],
        records: Sequence[Record],
        outcomes: Sequence[RewardOutcome] | None,
        source: str,
    ) -> list[RewardOutcome]:
        setup = self._setup
        trainer, longest = setup.trainer, {"gconfig.max_new_tokens": "reward.judge.max_tokens"}
        # A signal must not interrupt a pass, in which the devices wait for each other.
        with keys_renamed(longest.get):
            judging.answer_questions(
                partial(trainer.score_logprobs, "judge", temperature=1.0), partial(trainer.complete, "judge")
            )
        with setup.run.stop.interruptible():
            verdicts = judging.collect_outcomes()
        found = [verdicts[index] for index in indices]
        return add_judge_scores(records, outcomes, found, setup.config.reward.judge.weight, source)

    def __exit__(self, *exc: Any) -> None:
        if self._scoring is not None:
            self._scoring.__exit__(*exc)
        if self._judging is not None:
            self._judging.__exit__(*exc)


def _tokens_to_score(sample: ScoredSample) -> list[int]:
    if sample.trajectory is not None:
        return sample.trajectory.rows[-1].tokens
    return sample.item.tokens + sample.sequence.resp_tokens


def _prompt_and_completion(sample: ScoredSample) -> tuple[list[int], list[int]]:
    """Split a sample's tokens before the first sampled token. For an agent, split the last row of its trajectory."""
    if sample.trajectory is None:
        return sample.item.tokens, np.asarray(vars(sample.sequence)["resp_tokens"]).tolist()
    row = sample.trajectory.rows[-1]
    first = int(np.argmax(row.sampled))
    return row.tokens[:first], row.tokens[first:]


def add_agent_rewards(
    records: Sequence[Record],
    outcomes: Sequence[RewardOutcome | None] | None,
    own: Sequence[tuple[float, dict[str, float]] | None],
) -> list[RewardOutcome]:
    """Add the rewards that agents returned to the outcomes of the reward function.

    `own` has, for each sample, (reward, its parts by name), or None if the agent returned no reward. Without a reward
    function (an outcome None, or `outcomes` None), such a sample is a reward error. An error of the reward function
    stays an error.
    """
    pairs = zip([None] * len(own) if outcomes is None else outcomes, own, strict=True)
    out = [_with_agent_reward(outcome, given) for outcome, given in pairs]
    report_failures(records, out)
    return out


def _with_agent_reward(outcome: RewardOutcome | None, given: tuple[float, dict[str, float]] | None) -> RewardOutcome:
    if outcome is None:
        nothing = RewardOutcome(None, "error", _NO_REWARD, key="agent.fn")
        return nothing if given is None else RewardOutcome(given[0], parts=given[1])
    if given is None or outcome.value is None:
        return outcome
    parts = {**(outcome.parts or {"fn": outcome.value}), "agent": given[0], **given[1]}
    return RewardOutcome(outcome.value + given[0], parts=parts)


def add_model_scores(
    records: Sequence[Record], outcomes: Sequence[RewardOutcome] | None, scores: Sequence[float], source: str = "fn"
) -> list[RewardOutcome]:
    """Add the scores of a reward model to the rewards from `source`. A sum that is not finite is a reward error."""
    out = [outcome or RewardOutcome(0.0) for outcome in outcomes or [None] * len(records)]
    scored = [index for index, outcome in enumerate(out) if outcome.value is not None]
    for index in scored:
        function = out[index].value or 0.0
        parts = {**(out[index].parts or {source: function}), "model": scores[index]}
        value = function + scores[index]
        if problem := reward_problem(value):
            out[index] = RewardOutcome(None, "not_finite", f"with the reward model: {problem}", key="reward.path")
        else:
            out[index] = RewardOutcome(value, parts={} if outcomes is None else parts)
    report_failures([records[index] for index in scored], [out[index] for index in scored])
    return out
