"""The prompts whose samples are under way across steps, with rollout.max_head_offpolicyness above 0.

A step samples more prompts than it trains on. It ends its rollout when as many groups as its batch has prompts are
whole, where a group is the samples of one prompt. Unfinished samples are parked and continue in the rollout of the next
step, under the new weights. `InFlight` keeps the groups, decides which of them belong to a step, and is part of the
training state. It samples nothing itself.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.types import GenerationOutput, PromptItem


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt.

    Attributes:
        batch: Number of the prompt's batch, from 1.
        place: Index of the prompt in its batch.
        item: The prompt.
        n_samples: Number of samples.
        begun_at: Step in which the first token of the group was sampled. None before.
        finished: Sample number -> output of a finished sample.
        parked: Sample number -> output of a sample that was interrupted, possibly without tokens.
    """

    batch: int
    place: int
    item: PromptItem
    n_samples: int
    begun_at: int | None = None
    finished: dict[int, GenerationOutput] = field(default_factory=dict)
    parked: dict[int, GenerationOutput] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Number of unfinished samples."""
        return self.n_samples - len(self.finished)

    @property
    def outputs(self) -> list[GenerationOutput]:
        """The outputs of the finished samples, in the order of their numbers."""
        return [self.finished[sample] for sample in sorted(self.finished)]

    @property
    def unfinished(self) -> list[GenerationOutput]:
        """The outputs of the unfinished samples so far, in the order of their numbers."""
        return [
            self.parked.get(sample) or _nothing(sample)
            for sample in range(self.n_samples)
            if sample not in self.finished
        ]


def _nothing(sample: int) -> GenerationOutput:
    """Return the output of a sample that has no tokens."""
    return GenerationOutput(request_id=0, sample=sample, tokens=[], logprobs=[], versions=[], finish_reason=None)


def n_due(begun_at: Sequence[int | None], step: int, limit: int, sizes: Sequence[int]) -> int:
    """Return how many groups must be trained in a step, so that no group is trained later than allowed.

    A group may be trained up to `limit` steps after the step in which its sampling began. Groups with the earliest
    deadlines are trained first. Later steps have room for their own batch sizes only, so some groups must be trained
    before their own deadlines.

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
    room = itertools.accumulate(sizes[1:], initial=0)  # of the k steps after this one
    return max(sum(deadline <= k for deadline in deadlines) - room_k for k, room_k in enumerate(room))


class Choice:
    """The choice of the groups that a step trains on, while they are sampled.

    Groups that are due belong to the step. The rest of the step's batch is filled with the groups that are whole first.

    Args:
        groups: All groups under way, the oldest first.
        due: The groups that are due.
        size: Number of groups that the step trains on.

    Attributes:
        size: Number of groups that the step trains on.
        taken: The groups of the step that are whole so far, in the order in which they became whole.
    """

    def __init__(self, groups: Sequence[Group], due: Sequence[Group], size: int):
        self.size, self.taken = size, list[Group]()
        self._due, self._open = set(due), [group for group in groups if group not in set(due)]
        self._n_open = size - len(due)
        self._take(groups)

    def _take(self, groups: Iterable[Group]) -> list[Group]:
        """Take those of some groups that are whole and belong to the step, and return them."""
        taken = []
        for group in groups:
            if group.missing or group in self.taken:
                continue
            if group not in self._due:
                if not self._n_open:
                    continue
                self._n_open -= 1
                self._open.remove(group)
            taken.append(group)
            self.taken.append(group)
        return taken

    def add(self, outputs: Iterable[tuple[Group, GenerationOutput]]) -> list[Group]:
        """Record finished samples.

        Args:
            outputs: Each finished sample with its group, in the order in which the samples finished.

        Returns:
            The groups of the step that have become whole.
        """
        taken = []
        for group, output in outputs:
            group.finished[output.sample] = output
            group.parked.pop(output.sample, None)
            taken += self._take([group])
        return taken

    @property
    def missing(self) -> int:
        """Number of samples that must finish, at the least, until all groups of the step are whole. 0 if all are."""
        due = sum(group.missing for group in self._due)
        return due + sum(sorted(group.missing for group in self._open)[: self._n_open])


class InFlight:
    """The groups that are sampled across steps.

    Args:
        items_at: Returns the encoded prompts with given indices in the dataset.
        n_samples: Number of samples of each prompt.

    Attributes:
        groups: The groups under way, the oldest first.
    """

    def __init__(self, items_at: Callable[[Sequence[int]], Sequence[PromptItem]], n_samples: int):
        self._items_at, self._n_samples = items_at, n_samples
        self.groups: list[Group] = []
        self._newest = (0, 0)  # (batch, place) of the newest admitted prompt, and those before it were admitted, too

    def admit(self, batch: int, items: Sequence[PromptItem]) -> None:
        """Add the first prompts of a batch, except for prompts that were added before.

        Args:
            batch: Number of the batch, from 1.
            items: The first prompts of the batch.
        """
        for place, item in enumerate(items):
            if (batch, place) > self._newest:
                self.groups.append(Group(batch, place, item, self._n_samples))
                self._newest = (batch, place)

    def choose(self, step: int, limit: int, sizes: Sequence[int]) -> Choice:
        """Begin the choice of the groups that a step trains on.

        Args:
            step: Number of the step.
            limit: Largest number of steps between the first token of a group and the training on it.
            sizes: Number of groups that this step and each of the next `limit` steps train. Fewer steps if the run
                ends.
        """
        by_age = sorted(self.groups, key=lambda group: step if group.begun_at is None else group.begun_at)
        n = n_due([group.begun_at for group in by_age], step, limit, sizes)
        return Choice(self.groups, by_age[:n], sizes[0])

    def end(self, step: int, taken: Iterable[Group], parked: Iterable[tuple[Group, GenerationOutput]]) -> None:
        """End the rollout of a step.

        Args:
            step: Number of the step.
            taken: The groups that the step trains on, which are no longer under way.
            parked: Each unfinished sample with its group.
        """
        for group, output in parked:
            if output.finish_reason is None:
                group.parked[output.sample] = output
            else:
                group.finished[output.sample] = output
                group.parked.pop(output.sample, None)
        gone = set(taken)
        self.groups = [group for group in self.groups if group not in gone]
        for group in self.groups:
            if group.begun_at is None and (group.finished or any(part.tokens for part in group.parked.values())):
                group.begun_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return the groups under way with their samples, as plain values for a JSON file."""
        return {"newest": list(self._newest), "groups": [_written(group) for group in self.groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The saved groups.
        """
        batch, place = state["newest"]
        self._newest = batch, place
        items = self._items_at([group["row"] for group in state["groups"]])
        self.groups = [
            Group(
                group["batch"],
                group["place"],
                item,
                self._n_samples,
                group["begun_at"],
                {output.sample: output for output in map(_output, group["finished"])},
                {output.sample: output for output in map(_output, group["parked"])},
            )
            for group, item in zip(state["groups"], items, strict=True)
        ]


_ARRAYS = {"tokens": "<i4", "logprobs": "<f8", "versions": "<i4"}


def _written(group: Group) -> dict[str, Any]:
    """Return a group as plain values. The prompt is written as the index of its row."""
    return {
        "batch": group.batch,
        "place": group.place,
        "row": group.item.index,
        "begun_at": group.begun_at,
        "finished": [_record(output) for output in group.finished.values()],
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
