"""Rollouts that do not wait for their longest samples (rollout.prompts_ahead), against rollouts that wait.

The lengths of samples are drawn from a log-normal distribution, as those of reasoning. A step is a rollout without
training. Each rollout begins with an empty KV cache, as after an update of the weights, so that samples that continue
compute all their tokens again. With --max-head-offpolicyness 0, samples do not continue, and their prompts are
postponed. With --equal-rewards, a share of the groups has equal rewards and is replaced (rollout.dynamic_sampling).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings, positive_int, raise_problems
from areno.engine.requests import continuation_requests
from areno.run.group_selection import DECISION_STEPS, Admission, Group, n_tokens
from areno.run.groups_in_flight import GroupsInFlight
from areno.types import GenerationOutput, GenerationRequest, PromptItem, SamplingParams
from benchmarks.turns import time_interleaved

_SIGMA = 0.8  # of the logarithm of a length
_STEPS_BEFORE = (
    8  # rollouts that do not wait leave samples for the next step: as many as later from the first timed one
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="rollout")
    add = parser.add_argument
    add("--mean-tokens", type=positive_int, default=64, help="mean length of a sample (default: %(default)s)")
    add("--ahead", type=positive_int, default=4, help="number of prompts ahead (default: %(default)s)")
    aged = "as rollout.max_head_offpolicyness (default: %(default)s)"
    add("--max-head-offpolicyness", type=int, choices=range(100), default=4, metavar="N", help=aged)
    equal = "share of prompts whose samples have equal rewards, and which are replaced (default: %(default)s)"
    add("--equal-rewards", type=float, default=0.0, metavar="SHARE", help=equal)


@dataclass
class _StepFigures:
    """The figures of a rollout, in tokens."""

    sampled: int
    trained: int  # of the samples that a step trains on
    recomputed: int  # whose keys and values were computed again


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Time rollouts that wait and rollouts that do not, in turn, over the same prompts with the same lengths.

    `tok_s` counts sampled tokens or, with --max-head-offpolicyness 0, trained ones. `recomputed` is a share of the
    trained tokens.
    """
    limit, equal = settings.max_head_offpolicyness, settings.equal_rewards
    most = max(1, limit) * len(settings.work.prompt_lens)
    raise_problems(
        [
            (not 0 <= equal < 1, "--equal-rewards", f"is {equal}; at least 0 and below 1 is needed"),
            (equal and not limit, "--equal-rewards", "needs --max-head-offpolicyness above 0"),
            (settings.ahead > most, "--ahead", f"is {settings.ahead}; samples get too old with more than {most}"),
        ]
    )
    ours = ArenoContender(settings, *checked_model(settings, folder))
    with ours.engine:
        waits = (_RoundRollouts if equal else _Rollouts)(ours, settings, 0)
        ahead = (_ReplacingRollouts if equal else _Rollouts)(ours, settings, settings.ahead)
        for _ in range(_STEPS_BEFORE):
            ahead.step()
        seconds = time_interleaved({"waits": lambda _: waits.step, "ahead": lambda _: ahead.step}, settings.repeats)
    found = {}
    for name, way in (("waits", waits), ("ahead", ahead)):
        steps = way.steps[-settings.repeats :]
        trained = sum(step.trained for step in steps)
        counted = sum(step.sampled for step in steps) if limit else trained  # otherwise tokens are thrown away
        found[name] = {
            "tok_s": counted / sum(seconds[name]),
            "step_s": sum(seconds[name]) / settings.repeats,
            "recomputed": sum(step.recomputed for step in steps) / trained,
            "mean_tokens": trained / (settings.work.n_rows * settings.repeats),
        }
    return {**found, "ratio": found["ahead"]["tok_s"] / found["waits"]["tok_s"]}


class _Rollouts:
    """Rollouts. If `n_ahead`, the number of prompts beyond a step's batch, is 0, a step waits for all its samples."""

    decision_steps: int | None = None  # decoding steps between two decisions; None lets the engine choose
    choice: Any  # of the groups of a step: a Choice or an Admission

    def __init__(self, ours: ArenoContender, settings: Settings, n_ahead: int):
        self._ours, self.settings, self.n_ahead = ours, settings, n_ahead
        prompts = settings.work.random_prompts(ours.vocab_size, 0)
        self.items = [PromptItem(prompt="", text="", tokens=tokens) for tokens in prompts]
        limit = settings.max_head_offpolicyness if n_ahead else 0
        self.in_flight = GroupsInFlight(lambda indices: [], settings.work.n_samples, limit)
        self.at_once = settings.at_once or settings.work.n_rows
        self.n_batches = 0
        self.steps: list[_StepFigures] = []

    def next_batch(self) -> tuple[int, list[PromptItem]]:
        """Return (number, prompts) of the next batch."""
        self.n_batches += 1
        return self.n_batches, self.items

    def begin(self, number: int) -> list[Group]:
        """Begin the step with this number, and return the groups to sample."""
        _, items = self.next_batch()
        self.choice = self.in_flight.begin_rollout(number, self.n_ahead, items, lambda n: [items] * n)
        return list(self.choice.groups)

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        """Record finished samples. Return (number of unfinished samples of the step, groups that begin)."""
        self.choice.record_outputs(found)
        return self.choice.min_missing_samples, []

    def step(self) -> None:
        ids, group_of, before = itertools.count(), dict[int, Group](), list[tuple[Group, GenerationOutput, int]]()

        def requests(groups: Sequence[Group]) -> list[GenerationRequest]:
            found = list[GenerationRequest]()
            for group in groups:
                for part in group.unfinished_outputs:
                    [request] = continuation_requests(self._request(group, part.sample), [part], ids)
                    found.append(request)
                    group_of[request.request_id] = group
                    before.append((group, part, n_tokens(part)))
            return found

        number, engine = len(self.steps) + 1, self._ours.engine
        first = self.begin(number)
        missing, more = self.add([])
        due = requests([*first, *more])
        self._ours.begin_rollout(self.at_once, max(self.settings.work.row_lens))
        engine.hold_decoding()
        while missing:
            if due:
                engine.submit(due)
            outputs, _ = engine.advance(missing, self.decision_steps)
            missing, more = self.add([(group_of[output.request_id], output) for output in outputs])
            due = requests(more)
        parked = [(group_of[output.request_id], output) for output in engine.park()]
        engine.end_rollout()
        ended = {(group, output.sample): output for group, output in parked}
        now = [
            n_tokens(ended.get((group, part.sample)) or group.latest_output(part.sample)) for group, part, _ in before
        ]
        went_on = [old for (_, _, old), new in zip(before, now, strict=True) if new > old]
        self.in_flight.end_rollout(number, self.choice, parked)
        trained = sum(n_tokens(output) for group in self.choice.taken for output in group.outputs)
        self.steps.append(_StepFigures(sum(now) - sum(old for _, _, old in before), trained, sum(went_on)))

    def _request(self, group: Group, sample: int) -> GenerationRequest:
        """Return the request of a sample, whose length depends only on the prompt and the number of the sample."""
        draw = random.Random(f"{group.batch}.{group.prompt_index}.{sample}")
        length = draw.lognormvariate(math.log(self.settings.mean_tokens) - _SIGMA**2 / 2, _SIGMA)
        new_len = min(max(1, round(length)), max(self.settings.work.new_lens))
        params = SamplingParams(max_new_tokens=new_len, ignore_eos=True)
        seed = (group.batch << 32) + group.prompt_index
        return GenerationRequest(request_id=0, prompt=group.item.tokens, params=params, seed=seed)

    def has_equal_rewards(self, group: Group) -> bool:
        return random.Random(f"reward {group.batch}.{group.prompt_index}").random() < self.settings.equal_rewards


class _ReplacingRollouts(_Rollouts):
    """Rollouts that do not wait, and replace groups with equal rewards. A reward is known as soon as a sample ends."""

    decision_steps = DECISION_STEPS

    def begin(self, number: int) -> list[Group]:
        size = len(self.items)
        self.choice = self.in_flight.begin_dynamic_sampling(
            number, size, size + self.n_ahead, self.at_once, self.next_batch
        )
        return []

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        more: list[Group] = []
        return self.choice.decide(found, more.extend, self.has_equal_rewards), more


class _RoundRollouts(_Rollouts):
    """Rollouts that wait, and sample a further batch as soon as dropped groups show that the step needs it.

    A step trains on the first groups with different rewards in the order of the prompts, and drops the others.
    """

    decision_steps = DECISION_STEPS

    def begin(self, number: int) -> list[Group]:
        self.choice = Admission([], 0, len(self.items), 1 << 40, 1, lambda: None)
        self._n_equal = 0
        return []

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        for group, output in found:
            group.record(output)
            self._n_equal += not group.n_missing_samples and self.has_equal_rewards(group)
        more = list[Group]()
        size, groups = len(self.items), self.choice.groups
        while len(groups) - self._n_equal < size:
            number, items = self.next_batch()
            more += [Group(number, place, item, self.settings.work.n_samples) for place, item in enumerate(items)]
            groups += more[-size:]
        n_missing = sum(group.n_missing_samples for group in groups)
        if not n_missing:
            self.choice.taken = [group for group in groups if not self.has_equal_rewards(group)][:size]
            self.choice.dropped = [group for group in groups if group not in self.choice.taken]
        return n_missing, more
