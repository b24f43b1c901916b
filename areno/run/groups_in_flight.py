"""The prompts that are sampled across steps, with rollout.prompts_ahead.

A group is the samples of one prompt, and is whole when all of them have finished. A step samples more prompts than it
trains on. Its rollout ends when as many groups are whole as its batch has prompts. With rollout.max_head_offpolicyness
above 0, unfinished samples are parked, and continue in the next step's rollout with the new weights (partial rollout,
arXiv 2509.18521). With 0, tokens of unfinished samples are discarded. Their prompts are postponed to a later step that
samples only postponed prompts (tail batching, arXiv 2509.21009).

`GroupsInFlight` keeps the groups, decides which of them a step samples, and is part of the training state. It does no
sampling itself.
"""

from __future__ import annotations

import base64
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from areno.run.group_selection import Admission, FirstCompleteGroups, Group, n_groups_due, n_tokens
from areno.types import TOKEN_SCORE, GenerationOutput, PromptItem

logger = logging.getLogger("areno")


class GroupsInFlight:
    """The groups that are sampled across steps, the oldest first in `groups`.

    `limit` is the largest number of steps between the first token of a group and the training on it, which is the
    largest staleness. With 0, a group is trained in the step that starts it, or its tokens are discarded.
    `n_samples` may be a function of a prompt's source. `sampled_with` are the sampling settings. Samples
    cannot continue after a change of them. `keeps_samples` is False with agents: their processes end with the run, so a
    resumed run samples their prompts anew.
    """

    def __init__(
        self,
        items_at: Callable[[Sequence[tuple[str, int]]], Sequence[PromptItem]],
        n_samples: int | Callable[[str], int],
        limit: int,
        sampled_with: Mapping[str, Any] | None = None,
        keeps_samples: bool = True,
    ):
        self._keeps_samples = keeps_samples
        self._items_at, self._n_samples, self._limit = items_at, n_samples, limit
        self._sampled_with = {"limit": limit, "n_samples": self._n_samples_of(""), **(sampled_with or {})}
        self.groups: list[Group] = []
        self._lengths: dict[int, list[int]] = {}  # step -> lengths of the trained samples that it began
        self._newest = (0, -1)  # (batch, index) of the newest admitted prompt; all earlier ones were admitted

    def _n_samples_of(self, source: str) -> int:
        return self._n_samples(source) if callable(self._n_samples) else self._n_samples

    def begin_rollout(
        self,
        step: int,
        n_ahead: int,
        batch: Sequence[PromptItem],
        upcoming: Callable[[int], Sequence[Sequence[PromptItem]]],
        number: int | None = None,
    ) -> FirstCompleteGroups:
        """Begin the rollout of a step: add `n_ahead` prompts beyond its batch, and choose the groups to sample.

        `batch` is empty if the run has no batch left but prompts are in flight. `upcoming(n)` returns the prompts of
        the next n steps, fewer if the run ends before. `number` is the number of the batch. None: every step so far has
        taken one batch.
        """
        number = step if number is None else number
        size, limit = len(batch) or len(self.groups), self._limit
        self.admit(number, batch)
        postponed = [group for group in self.groups if group.is_postponed]
        if len(postponed) >= size:
            return FirstCompleteGroups(postponed[:size], postponed[:size], size)
        n_missing, n_later = size + n_ahead - (len(self.groups) - len(postponed)), 0
        # A prompt is begun at most `limit` steps before its own step, so that later steps have room for all. A prompt
        # whose tokens are thrown away can be begun earlier.
        while n_missing > 0 and (n_later < limit or not limit) and len(later := upcoming(n_later + 1)) > n_later:
            n_later += 1
            n_missing -= self.admit(number + n_later, later[-1], n_missing)
        groups = [group for group in self.groups if not group.is_postponed]
        if limit:
            # Prompts of later batches are left from before a decrease of the limit.
            groups = [group for group in groups if group.begun_at is not None or group.batch <= number + limit]
            now = Counter(item.source for item in batch or [group.item for group in self.groups])
            later = [Counter(item.source for item in items) for items in upcoming(limit)]
            due = [group for source in now for group in self._groups_due(groups, step, source, [now, *later])]
            return FirstCompleteGroups(groups, due, now)
        # At the end of a run, too few prompts are left for a step without the postponed ones.
        due = postponed[: max(0, size - len(groups))]
        return FirstCompleteGroups([*due, *groups[: size + n_ahead]], due, size)

    def _groups_due(
        self, groups: Sequence[Group], step: int, source: str, sizes: Sequence[Mapping[str, int]]
    ) -> list[Group]:
        """Return the groups of a source that a step must train. `sizes` are those of this step and the next ones."""
        mine = [group for group in groups if group.item.source == source]
        by_age = sorted(mine, key=lambda group: step if group.begun_at is None else group.begun_at)
        n = n_groups_due([group.begun_at for group in by_age], step, self._limit, [each[source] for each in sizes])
        # More than these places are due only if a run with dynamic sampling has left them, for additional steps.
        return by_age[: min(sizes[0][source], n)]

    def admit(self, batch: int, items: Sequence[PromptItem], most: int | None = None) -> int:
        """Add the prompts of a batch that are not added yet, at most `most`. Return their number."""
        new = [index for index in range(len(items)) if (batch, index) > self._newest]
        new = new if most is None else new[: max(0, most)]
        if not new:
            return 0
        self.groups += [Group(batch, index, items[index], self._n_samples_of(items[index].source)) for index in new]
        self._newest = (batch, new[-1])
        return len(new)

    def begin_dynamic_sampling(
        self, step: int, size: int, most: int, at_once: int, more: Callable[[], tuple[int, Sequence[PromptItem]] | None]
    ) -> Admission:
        """Begin the rollout of a step with dynamic sampling. It adds prompts while it runs.

        `size`, `most` and `at_once` are arguments of Admission. `more` returns (number, prompts) of the next batch, or
        None.
        """

        def next_group() -> Group | None:
            while not waiting:
                if (batch := more()) is None:
                    return None
                before = len(self.groups)
                self.admit(*batch)
                waiting.extend(self.groups[before:])
            return waiting.popleft()

        waiting = deque(group for group in self.groups if group.begun_at is None)
        begun = sorted(
            (group for group in self.groups if group.begun_at is not None), key=lambda group: group.begun_at or 0
        )
        n = n_groups_due([group.begun_at for group in begun], step, self._limit, [size] * (self._limit + 1))
        return Admission(begun, min(n, size), size, most, at_once, next_group)

    def end_rollout(
        self, step: int, choice: FirstCompleteGroups | Admission, parked: Iterable[tuple[Group, GenerationOutput]]
    ) -> int:
        """End the rollout of a step, and return the number of discarded tokens (0 if `limit` is above 0)."""
        for group, output in parked:
            if output.finish_reason is None:
                group.parked[output.sample] = output
            else:
                group.record(output)
        gone = set(choice.groups_no_longer_in_flight)
        self.groups = [group for group in self.groups if group not in gone]
        n_thrown_away = 0
        for group in self.groups:
            if self._limit and group.begun_at is not None:
                continue
            n_sampled = sum(map(n_tokens, (*group.finished.values(), *group.parked.values())))
            if not self._limit:
                group.is_postponed = group.is_postponed or (n_sampled > 0 and group.n_missing_samples > 0)
                group.finished, group.parked = {}, {}
                n_thrown_away += n_sampled
            elif n_sampled:
                group.begun_at = step
        return n_thrown_away

    def stalest_lengths(self, step: int, trained: Iterable[Group]) -> list[int]:
        """Return the lengths in tokens of trained samples whose groups were started `limit` steps before this step.

        All groups of that step have been trained or dropped by now, so their lengths are not biased towards short
        samples. Call this once per step, after its rollout. `trained`: the groups that this step trains on.
        """
        for group in trained:
            begun_at = step if group.begun_at is None else group.begun_at
            self._lengths.setdefault(begun_at, []).extend(map(n_tokens, group.outputs))
        found = self._lengths.get(step - self._limit, [])
        self._lengths = {begun: lengths for begun, lengths in self._lengths.items() if begun > step - self._limit}
        return found

    def state_dict(self) -> dict[str, Any]:
        groups = [_group_to_json(group, self._keeps_samples) for group in self.groups]
        lengths = [[step, _to_base64(np.asarray(each, "<i4"))] for step, each in self._lengths.items()]
        return {
            "newest": list(self._newest),
            "groups": groups,
            "lengths": lengths,
            "sampled_with": self._sampled_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups. If the sampling settings have changed, discard the tokens of the groups."""
        batch, index = state["newest"]
        self._newest = batch, index
        items = self._items_at([(group.get("source", ""), group["row"]) for group in state["groups"]])
        self.groups = [
            Group(group["batch"], group["place"], item, self._n_samples_of(item.source))
            for group, item in zip(state["groups"], items, strict=True)
        ]
        if state["sampled_with"] != self._sampled_with:
            if self.groups:
                logger.info("the settings of sampling have changed: %d prompts are sampled anew", len(self.groups))
            return
        self._lengths = {step: _from_base64(each, "<i4") for step, each in state.get("lengths", [])}
        for group, written in zip(self.groups, state["groups"], strict=True):
            group.begun_at, group.is_postponed = written["begun_at"], written["is_postponed"]
            group.finished = {output.sample: output for output in map(_sample_from_json, written["finished"])}
            group.parked = {output.sample: output for output in map(_sample_from_json, written["parked"])}


_ARRAYS = {"tokens": "<i4", "logprobs": "<f8", "versions": "<i4"}


def _group_to_json(group: Group, with_samples: bool) -> dict[str, Any]:
    return {
        "batch": group.batch,
        "place": group.prompt_index,
        "row": group.item.index,
        "source": group.item.source,
        "begun_at": group.begun_at if with_samples else None,
        "is_postponed": group.is_postponed,
        "finished": [_sample_to_json(output) for output in group.finished.values()] if with_samples else [],
        "parked": [_sample_to_json(output) for output in group.parked.values()],
    }


def _sample_to_json(output: GenerationOutput) -> dict[str, Any]:
    """Return a sample as JSON values. Arrays, such as token ids, are written as bytes in base64."""
    given = vars(output)
    record: dict[str, Any] = {name: _to_base64(np.asarray(given[name], dtype)) for name, dtype in _ARRAYS.items()}
    if output.routes is not None:
        routes = output.routes
        record["routes"] = {"dtype": routes.dtype.str, "shape": list(routes.shape), "bytes": _to_base64(routes)}
    if len(top := given["top_logprobs"]):
        record["top_scores"] = _to_base64(np.asarray(top, TOKEN_SCORE))
    return {"sample": output.sample, "finish_reason": output.finish_reason, **record}


def _sample_from_json(record: Mapping[str, Any]) -> GenerationOutput:
    arrays: dict[str, Any] = {name: _from_base64(record[name], dtype) for name, dtype in _ARRAYS.items()}
    routes = record.get("routes")
    if routes is not None:
        routes = np.frombuffer(base64.b64decode(routes["bytes"]), routes["dtype"]).reshape(routes["shape"])
    if "top_scores" in record:
        top = np.frombuffer(base64.b64decode(record["top_scores"]), TOKEN_SCORE)
        arrays["top_logprobs"] = top.reshape(len(arrays["tokens"]), -1)
    return GenerationOutput(
        request_id=0, sample=record["sample"], finish_reason=record["finish_reason"], routes=routes, **arrays
    )


def _to_base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _from_base64(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()
