"""The prompts whose samples are under way across steps, with rollout.prompts_ahead.

A group is the samples of one prompt, and is whole when all of them have finished. A step samples more prompts than it
trains on, and ends its rollout when as many groups are whole as its batch has prompts. With
rollout.max_head_offpolicyness above 0, unfinished samples are parked and continue in the rollout of the next step,
under the new weights (partial rollout, arXiv 2509.18521). With 0, their tokens are thrown away, and their prompts are
postponed to a step that samples postponed prompts alone (tail batching, arXiv 2509.21009).

`InFlight` keeps the groups, decides which of them belong to a step, and is part of the training state. It samples
nothing itself.
"""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.types import GenerationOutput, PromptItem, RewardRecord, ScoredSample

logger = logging.getLogger("areno")


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt.

    Attributes:
        batch: Number of the prompt's batch, from 1.
        place: Index of the prompt in its batch.
        item: The prompt.
        n_samples: Number of samples.
        begun_at: Step in which the first token of the group was sampled. None until that step has ended. With agents,
            it is set when they start.
        finished: Sample number -> output of a finished sample. With agents, an AgentSample.
        parked: Sample number -> output of a sample that was interrupted, possibly without tokens.
        is_postponed: Whether the group was postponed. A postponed group has no tokens and waits for a step of postponed
            groups.
    """

    batch: int
    place: int
    item: PromptItem
    n_samples: int
    begun_at: int | None = None
    finished: dict[int, Any] = field(default_factory=dict)
    parked: dict[int, GenerationOutput] = field(default_factory=dict)
    is_postponed: bool = False

    @property
    def missing(self) -> int:
        """Number of unfinished samples."""
        return self.n_samples - len(self.finished)

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the finished samples, in the order of their numbers."""
        return [self.finished[sample] for sample in sorted(self.finished)]

    @property
    def unfinished(self) -> list[GenerationOutput]:
        """The outputs of the unfinished samples so far, in the order of their numbers."""
        return [self.latest(sample) for sample in range(self.n_samples) if sample not in self.finished]

    def latest(self, sample: int) -> GenerationOutput:
        """Return the output of a sample so far.

        Args:
            sample: Number of the sample.
        """
        return self.finished.get(sample) or self.parked.get(sample) or _nothing(sample)


@dataclass(slots=True, eq=False)
class AgentSample:
    """The sample of an agent that has ended.

    Attributes:
        sample: Number of the sample.
        scored: The sample, which has no reward yet.
        record: Record for reward functions. None if the agent failed.
    """

    sample: int
    scored: ScoredSample
    record: RewardRecord | None


def _nothing(sample: int) -> GenerationOutput:
    """Return the output of a sample that has no tokens."""
    return GenerationOutput(request_id=0, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason=None)


def n_due(begun_at: Sequence[int | None], step: int, limit: int, sizes: Sequence[int]) -> int:
    """Return how many groups a step must train so that every group meets its deadline.

    The deadline of a group is `limit` steps after the step in which its sampling began, or the last step of the run.
    Groups with the earliest deadlines are trained first. Later steps have room for their own batch sizes only, so some
    groups must be trained before their own deadlines.

    Args:
        begun_at: For each group, the step in which its sampling began. None if it begins in this step.
        step: Number of the step.
        limit: Largest number of steps between beginning and training.
        sizes: Number of groups that this step and each of the next `limit` steps train. Fewer steps if the run ends.

    Returns:
        The number of groups, those with the earliest deadlines.
    """
    last = len(sizes) - 1
    deadlines = [min((step if begun is None else begun) + limit - step, last) for begun in begun_at]
    room = itertools.accumulate(sizes[1:], initial=0)  # groups that the next k steps train
    return max(sum(deadline <= k for deadline in deadlines) - room_k for k, room_k in enumerate(room))


class Choice:
    """Decides during the rollout which groups a step trains on.

    Groups that are due belong to the step: those at their deadline, or postponed ones that complete the batch. The rest
    of the step's batch is filled with the groups that are whole first.

    Args:
        groups: The groups that the step samples, the oldest first.
        due: The groups that are due.
        size: Number of groups that the step trains on.

    Attributes:
        groups: The groups that the step samples.
        size: Number of groups that the step trains on.
        taken: The groups of the step that are whole so far, in the order in which they became whole.
        known: The samples of earlier steps that the step trains on, each with its group.
    """

    def __init__(self, groups: Sequence[Group], due: Sequence[Group], size: int):
        assert len(due) <= size
        self.groups, self.size, self.taken = groups, size, list[Group]()
        self._due = set(due)
        self._open = [group for group in groups if group not in self._due]
        self._n_open = size - len(due)
        self.known = [sample for group in groups for sample in self._certain(group, group.outputs)]

    def _certain(self, group: Group, finished: Sequence[Any]) -> list[tuple[Group, Any]]:
        """Take a group that is whole and belongs to the step.

        Args:
            group: The group.
            finished: Those of its samples that have finished since the last call for this group.

        Returns:
            The samples of which it is certain since this call that the step trains on them, each with the group.
        """
        if group in self._due:
            found = finished
        elif group.missing or not self._n_open:
            return []
        else:
            found = group.outputs
            self._n_open -= 1
            self._open.remove(group)
        if not group.missing:
            self.taken.append(group)
        return [(group, output) for output in found]

    def add(self, outputs: Iterable[tuple[Group, Any]]) -> list[tuple[Group, Any]]:
        """Record finished samples.

        Args:
            outputs: Each finished sample (GenerationOutput or AgentSample) with its group, in the order in which the
                samples finished.

        Returns:
            The samples of which it is certain now that the step trains on them, each with its group. Each sample of the
            step is returned once, by this method or in `known`.
        """
        found = []
        for group, output in outputs:
            group.finished[output.sample] = output
            group.parked.pop(output.sample, None)
            found += self._certain(group, [output])
        return found

    @property
    def missing(self) -> int:
        """Smallest number of further samples after which all groups of the step can be whole. 0 if all are."""
        due = sum(group.missing for group in self._due)
        return due + sum(sorted(group.missing for group in self._open)[: self._n_open])


class InFlight:
    """The groups that are sampled across steps.

    Args:
        items_at: Returns the encoded prompts with given indices in the dataset.
        n_samples: Number of samples of each prompt.
        limit: Largest number of steps between the first token of a group and the training on it. 0: the step that
            begins a group trains on it, or its tokens are thrown away.
        sampled_with: The settings of sampling, as plain values. After a change of them, samples cannot continue.
        keeps_samples: Whether the samples are a part of the state. False with agents, whose processes end with the run.
            A resumed run samples their prompts anew.

    Attributes:
        groups: The groups under way, the oldest first.
    """

    def __init__(
        self,
        items_at: Callable[[Sequence[int]], Sequence[PromptItem]],
        n_samples: int,
        limit: int,
        sampled_with: Mapping[str, Any] | None = None,
        keeps_samples: bool = True,
    ):
        self._keeps_samples = keeps_samples
        self._items_at, self._n_samples, self._limit = items_at, n_samples, limit
        self._sampled_with = {"limit": limit, "n_samples": n_samples, **(sampled_with or {})}
        self.groups: list[Group] = []
        self._newest = (0, -1)  # (batch, index) of the newest admitted prompt; all earlier ones were admitted

    def begin(
        self,
        step: int,
        n_ahead: int,
        batch: Sequence[PromptItem],
        upcoming: Callable[[int], Sequence[Sequence[PromptItem]]],
    ) -> Choice:
        """Begin the rollout of a step: admit prompts, and choose the groups to sample.

        Args:
            step: Number of the step.
            n_ahead: Number of prompts that the step samples beyond its batch.
            batch: The prompts of the step.
            upcoming: Returns the prompts of the next n steps, or of fewer steps if the run ends before.

        Returns:
            The choice of the groups that the step trains on.
        """
        size, limit = len(batch), self._limit
        self._admit(step, batch)
        postponed = [group for group in self.groups if group.is_postponed]
        if len(postponed) >= size:
            return Choice(postponed[:size], postponed[:size], size)
        n_missing, n_later = size + n_ahead - (len(self.groups) - len(postponed)), 0
        # A prompt is begun at most `limit` steps before its own step, so that later steps have room for all. A prompt
        # whose tokens are thrown away can be begun earlier.
        while n_missing > 0 and (n_later < limit or not limit) and len(later := upcoming(n_later + 1)) > n_later:
            n_later += 1
            n_missing -= self._admit(step + n_later, later[-1], n_missing)
        groups = [group for group in self.groups if not group.is_postponed]
        if limit:
            # Prompts of later batches are left from before a decrease of the limit.
            groups = [group for group in groups if group.begun_at is not None or group.batch <= step + limit]
            by_age = sorted(groups, key=lambda group: step if group.begun_at is None else group.begun_at)
            sizes = [size, *map(len, upcoming(limit))]
            due = by_age[: n_due([group.begun_at for group in by_age], step, limit, sizes)]
            return Choice(groups, due, size)
        # At the end of a run, too few prompts are left for a step without the postponed ones.
        due = postponed[: max(0, size - len(groups))]
        return Choice([*due, *groups[: size + n_ahead]], due, size)

    def _admit(self, batch: int, items: Sequence[PromptItem], most: int | None = None) -> int:
        """Add at most `most` prompts of a batch that were not added before, and return their number."""
        new = [place for place in range(len(items)) if (batch, place) > self._newest]
        new = new if most is None else new[: max(0, most)]
        if not new:
            return 0
        self.groups += [Group(batch, place, items[place], self._n_samples) for place in new]
        self._newest = (batch, new[-1])
        return len(new)

    def end(self, step: int, choice: Choice, parked: Iterable[tuple[Group, GenerationOutput]]) -> int:
        """End the rollout of a step. The groups that the step trains on are no longer under way.

        Args:
            step: Number of the step.
            choice: The choice of the groups.
            parked: Each unfinished sample with its group.

        Returns:
            The number of tokens that are thrown away, which is 0 with a limit above 0.
        """
        for group, output in parked:
            if output.finish_reason is None:
                group.parked[output.sample] = output
            else:
                group.finished[output.sample] = output
                group.parked.pop(output.sample, None)
        gone = set(choice.taken)
        self.groups = [group for group in self.groups if group not in gone]
        n_thrown_away = 0
        for group in self.groups:
            if self._limit and group.begun_at is not None:
                continue
            n_sampled = sum(map(n_tokens, (*group.finished.values(), *group.parked.values())))
            if not self._limit:
                group.is_postponed = group.is_postponed or (n_sampled > 0 and group.missing > 0)
                group.finished, group.parked = {}, {}
                n_thrown_away += n_sampled
            elif n_sampled:
                group.begun_at = step
        return n_thrown_away

    def state_dict(self) -> dict[str, Any]:
        """Return the groups under way with their samples, as plain values for a JSON file."""
        groups = [_written(group, self._keeps_samples) for group in self.groups]
        return {"newest": list(self._newest), "groups": groups, "sampled_with": self._sampled_with}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups that `state_dict` returned.

        If the settings of sampling have changed, the prompts stay under way, and their tokens are thrown away.

        Args:
            state: The saved groups.
        """
        batch, place = state["newest"]
        self._newest = batch, place
        items = self._items_at([group["row"] for group in state["groups"]])
        self.groups = [
            Group(group["batch"], group["place"], item, self._n_samples)
            for group, item in zip(state["groups"], items, strict=True)
        ]
        if state["sampled_with"] != self._sampled_with:
            if self.groups:
                logger.info("the settings of sampling have changed: %d prompts are sampled anew", len(self.groups))
            return
        for group, written in zip(self.groups, state["groups"], strict=True):
            group.begun_at, group.is_postponed = written["begun_at"], written["is_postponed"]
            group.finished = {output.sample: output for output in map(_output, written["finished"])}
            group.parked = {output.sample: output for output in map(_output, written["parked"])}


def n_tokens(output: GenerationOutput) -> int:
    """Return the number of sampled tokens of an output.

    Args:
        output: The output.
    """
    return len(vars(output)["tokens"])  # reading the attribute would make a list of an array


_ARRAYS = {"tokens": "<i4", "logprobs": "<f8", "versions": "<i4"}


def _written(group: Group, with_samples: bool) -> dict[str, Any]:
    """Return a group as plain values, possibly without its samples. The prompt is written as the index of its row."""
    return {
        "batch": group.batch,
        "place": group.place,
        "row": group.item.index,
        "begun_at": group.begun_at if with_samples else None,
        "is_postponed": group.is_postponed,
        "finished": [_record(output) for output in group.finished.values()] if with_samples else [],
        "parked": [_record(output) for output in group.parked.values()],
    }


def _record(output: GenerationOutput) -> dict[str, Any]:
    """Return a sample as plain values. Numbers of tokens are written as the bytes of arrays, in base64."""
    given = vars(output)
    record: dict[str, Any] = {name: _encoded(np.asarray(given[name], dtype)) for name, dtype in _ARRAYS.items()}
    if output.routes is not None:
        routes = output.routes
        record["routes"] = {"dtype": routes.dtype.str, "shape": list(routes.shape), "bytes": _encoded(routes)}
    return {"sample": output.sample, "finish_reason": output.finish_reason, **record}


def _output(record: Mapping[str, Any]) -> GenerationOutput:
    """Return the sample that `_record` wrote."""
    arrays = {name: np.frombuffer(base64.b64decode(record[name]), dtype).tolist() for name, dtype in _ARRAYS.items()}
    routes = record.get("routes")
    if routes is not None:
        routes = np.frombuffer(base64.b64decode(routes["bytes"]), routes["dtype"]).reshape(routes["shape"])
    return GenerationOutput(
        request_id=0, sample=record["sample"], finish_reason=record["finish_reason"], routes=routes, **arrays
    )


def _encoded(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
