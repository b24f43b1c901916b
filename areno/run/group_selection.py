"""Groups of samples, and the classes that choose the groups of a step.

A group is the samples of one prompt. It is whole when all of them have finished. `FirstCompleteGroups` trains on the
groups that are whole first. `Admission` implements dynamic sampling: it drops groups and starts others in their place.
The classes do not sample: their callers report finished samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.types import GenerationOutput, PromptItem, RewardRecord, ScoredSample

DECISION_STEPS = 16
"""Decoding steps between two decisions about dynamic sampling during a rollout."""


@dataclass(slots=True, eq=False)
class Group:
    batch: int  # number of the prompt's batch, from 1
    prompt_index: int  # index of the prompt in its batch
    item: PromptItem
    n_samples: int
    begun_at: int | None = None  # None until the step of its first token has ended; agents set it at once
    finished: dict[int, Any] = field(default_factory=dict)  # by number; an AgentSample or GenerationOutput
    parked: dict[int, GenerationOutput] = field(default_factory=dict)  # interrupted samples, possibly without tokens
    is_postponed: bool = False  # it has no tokens, and waits for a step of postponed groups

    @property
    def n_missing_samples(self) -> int:
        return self.n_samples - len(self.finished)

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the finished samples, ordered by sample number."""
        return [self.finished[sample] for sample in sorted(self.finished)]

    @property
    def unfinished_outputs(self) -> list[GenerationOutput]:
        """The partial outputs of the unfinished samples, ordered by sample number."""
        return [self.latest_output(sample) for sample in range(self.n_samples) if sample not in self.finished]

    def record(self, output: Any) -> None:
        self.finished[output.sample] = output
        self.parked.pop(output.sample, None)

    def latest_output(self, sample: int) -> GenerationOutput:
        return self.finished.get(sample) or self.parked.get(sample) or _empty_output(sample)


@dataclass(slots=True, eq=False)
class AgentSample:
    """The result of an agent that has ended."""

    sample: int
    scored: ScoredSample  # has no reward yet
    record: RewardRecord | None  # for reward functions; None if the agent failed


def _empty_output(sample: int) -> GenerationOutput:
    return GenerationOutput(request_id=0, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason=None)


def n_groups_due(begun_at: Sequence[int | None], step: int, limit: int, sizes: Sequence[int]) -> int:
    """Return how many groups, the earliest first, a step must train so that every group meets its deadline.

    The deadline of a group is `limit` steps after the step that started to sample it, or the last step of the run. A
    step can train only as many groups as its batch has prompts, so some groups must be trained before their own
    deadlines. `sizes`: the number of groups that this step and each of the next `limit` steps train (shorter if the run
    ends). `begun_at`: the starting step of each group, None if it is this step.
    """
    last = len(sizes) - 1
    deadlines = [min((step if begun is None else begun) + limit - step, last) for begun in begun_at]
    room = itertools.accumulate(sizes[1:], initial=0)  # groups that the next k steps train
    return max(sum(deadline <= k for deadline in deadlines) - room_k for k, room_k in enumerate(room))


class FirstCompleteGroups:
    """Decides during the rollout which groups a step trains on.

    The step trains on all groups in `due`: those at their deadline, and postponed ones to fill the batch. Then it takes
    the groups that are whole first, up to its batch size `size`. If `size` maps sources to numbers of groups, each
    source fills its own places, so that a fast one cannot take those of a slow one. `taken` lists the whole groups of
    the step. `known` lists (group, sample) for samples of earlier steps on which this step is sure to train.
    """

    def __init__(self, groups: Sequence[Group], due: Sequence[Group], size: int | Mapping[str, int]):
        self._by_source = not isinstance(size, int)
        sizes = {"": size} if isinstance(size, int) else size
        self.groups, self.size, self.taken = groups, sum(sizes.values()), list[Group]()
        self._due = set(due)
        self._open = [group for group in groups if group not in self._due]
        n_due = Counter(map(self._places_of, due))
        self._n_open = {name: n - n_due[name] for name, n in sizes.items()}
        assert min(self._n_open.values()) >= 0
        self.known = [sample for group in groups for sample in self._certain_samples(group, group.outputs)]

    def _places_of(self, group: Group) -> str:
        return group.item.source if self._by_source else ""

    @property
    def groups_no_longer_in_flight(self) -> Sequence[Group]:
        """The groups that are not in flight after this step: those that it trains on."""
        return self.taken

    def _certain_samples(self, group: Group, finished: Sequence[Any]) -> list[tuple[Group, Any]]:
        """Return the samples on which the step is now sure to train, and was not before this call."""
        if group in self._due:
            found = finished
        elif group.n_missing_samples or not self._n_open.get(self._places_of(group)):
            return []
        else:
            found = group.outputs
            self._n_open[self._places_of(group)] -= 1
            self._open.remove(group)
        if not group.n_missing_samples:
            self.taken.append(group)
        return [(group, output) for output in found]

    def record_outputs(self, outputs: Iterable[tuple[Group, Any]]) -> list[tuple[Group, Any]]:
        """Record finished samples in their order, and return those on which the step is now sure to train.

        Each sample of the step is returned once. Those in `known` are not returned.
        """
        found = []
        for group, output in outputs:
            group.record(output)
            found += self._certain_samples(group, [output])
        return found

    @property
    def min_missing_samples(self) -> int:
        """The least number of further samples that make all groups of the step whole."""
        n_missing = sum(group.n_missing_samples for group in self._due)
        for name, n_open in self._n_open.items():
            of_name = sorted(group.n_missing_samples for group in self._open if self._places_of(group) == name)
            n_missing += sum(of_name[:n_open])
        return n_missing


class Admission:
    """Decides which groups a rollout with dynamic sampling (DAPO, arXiv 2503.14476) starts and trains on.

    A group whose rewards are all equal is dropped once the rewards are known, and another prompt starts in its place
    (as in AReaL, arXiv 2505.24298). The step trains on `size` other groups, in the order in which they became whole.
    The groups of `begun` were started in earlier steps. The first `n_due` of them are at their deadline: they have a
    place in the step unless they are dropped. At most `most` groups are started and not dropped, and `at_once` samples
    are decoded at the same time.

    Decisions depend on the order of finished samples and on rewards, but not on when a reward is known. To this end,
    `next_group_to_compare` names the groups whose rewards the caller must wait for. It names a group only if the step
    may be complete, or if the device would otherwise decode fewer samples than it can. The earliest time is the
    decoding interval after the one in which the group became whole.
    """

    def __init__(
        self,
        begun: Sequence[Group],
        n_due: int,
        size: int,
        most: int,
        at_once: int,
        next_group: Callable[[], Group | None],
    ):
        self.groups, self.size = list[Group](), size
        self.taken, self.dropped = list[Group](), list[Group]()
        self._most, self._at_once, self._next_group = most, at_once, next_group
        self._carried, self._due = list(begun), set(begun[:n_due])
        self._unknown: list[Group] = []  # whole groups whose rewards are not known yet, in the order of becoming whole
        self._later: list[Group] = []  # groups with different rewards for which the step has no place
        self._n_old = 0  # unknown groups that were whole at the last `end_interval`
        self._n_open = 0  # unfinished samples

    @property
    def groups_no_longer_in_flight(self) -> Sequence[Group]:
        """The groups that are not in flight after this step: those that it trains on or drops."""
        return [*self.taken, *self.dropped]

    @property
    def is_over(self) -> bool:
        """Whether the step has all its groups, or nothing is left to sample."""
        return len(self.taken) == self.size or not (self._n_open or self._unknown)

    @property
    def n_open_groups(self) -> int:
        return self._n_open

    def begin_groups(self) -> list[Group]:
        """Start groups while there is room, and return them. The first call continues the groups of earlier steps."""
        if len(self.taken) == self.size:
            return []
        found, self._carried = self._carried, []
        room = self._most - (len(self.groups) - len(self.dropped)) - len(found)
        for _ in range(room):
            if (group := self._next_group()) is None:
                break
            found.append(group)
        self.groups += found
        self._n_open += sum(group.n_missing_samples for group in found)
        self._unknown += [group for group in found if not group.n_missing_samples]
        return found

    def record_outputs(self, outputs: Iterable[tuple[Group, GenerationOutput]]) -> None:
        """Record finished samples, in the order in which they finished."""
        for group, output in outputs:
            group.record(output)
            self._n_open -= 1
            if not group.n_missing_samples:
                self._unknown.append(group)

    def decide(
        self,
        outputs: Iterable[tuple[Group, GenerationOutput]],
        on_begin: Callable[[list[Group]], None],
        is_uniform: Callable[[Group], bool],
    ) -> int:
        """Make all decisions after a decoding interval. Return the number of unfinished samples, 0 if the step is over.

        `on_begin` is called with groups that start, before rewards are awaited. `is_uniform` waits for the rewards of a
        whole group, and returns whether they are all equal.
        """
        self.record_outputs(outputs)
        on_begin(self.begin_groups())
        while (group := self.next_group_to_compare()) is not None:
            self.record_uniformity(is_uniform(group))
            on_begin(self.begin_groups())
        self.end_interval()
        return 0 if self.is_over else self._n_open

    def next_group_to_compare(self) -> Group | None:
        """Return a group whose rewards must be known before the rollout continues, or None."""
        if self.is_over or not self._unknown:
            return None
        if not self._n_open:  # nothing is left to decode meanwhile
            return self._unknown[0]
        may_end = len(self.taken) + len(self._unknown) >= self.size
        is_needed = may_end or self._n_open < self._at_once
        return self._unknown[0] if self._n_old and is_needed else None

    def record_uniformity(self, is_uniform: bool) -> None:
        """Drop or accept the group that `next_group_to_compare` returned. `is_uniform`: its rewards are all equal."""
        group = self._unknown.pop(0)
        self._n_old -= self._n_old > 0
        if is_uniform:
            self.dropped.append(group)
        elif group in self._due:
            self.taken.append(group)
        else:
            self._later.append(group)
        self._due.discard(group)
        while self._later and len(self.taken) + len(self._due) < self.size:
            self.taken.append(self._later.pop(0))

    def end_interval(self) -> None:
        """End a decoding interval. From then on, `next_group_to_compare` may return the groups that are whole now."""
        self._n_old = len(self._unknown)

    def keep_dropped(self, has_reward: Callable[[Group], bool]) -> None:
        """Train on dropped groups that have a reward. Called at the end of a step that has dropped all groups."""
        self.taken = [group for group in self.dropped if has_reward(group)][: self.size]
        self.dropped = [group for group in self.dropped if group not in self.taken]


def n_tokens(output: Any) -> int:
    if isinstance(output, AgentSample):
        return output.scored.sequence.n_tokens
    return len(vars(output)["tokens"])  # reading the attribute would make a list of an array
