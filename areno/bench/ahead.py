"""Compare rollouts that wait for their longest samples with rollouts that do not (rollout.max_head_offpolicyness).

The lengths of samples are drawn from a log-normal distribution, as those of reasoning. A step is a rollout without
training. Each rollout begins with an empty KV cache, as after an update of the weights, so that samples that continue
compute all their tokens again. With --max-head-offpolicyness 0, samples do not continue, and their prompts are
postponed. With --equal-rewards, a share of the groups has equal rewards and is replaced (rollout.dynamic_sampling).

Rollouts that do not wait leave samples for the next step. So that the first timed step has as many of them as later
steps, the steps before are simulated: each decoding step takes the same time, and the tokens are random.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from areno.bench.areno_contender import ArenoContender, decoder_config
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.engine.engine import Engine
from areno.engine.requests import requests_of_rest
from areno.run.group_selection import DECISION_STEPS, Admission, Choice, Group, n_tokens
from areno.run.groups_in_flight import InFlight
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationOutput, GenerationRequest, PromptItem, SamplingParams

_SIGMA = 0.8  # of the logarithm of a length
_SIMULATED = 8  # steps before the first timed one
_FULL_STEPS = 64  # decoding steps of a full batch that are timed


@dataclass
class _Step:
    """The figures of a rollout."""

    seconds: float
    sampled: int
    trained: int  # tokens of the trained samples
    recomputed: int  # tokens whose keys and values were computed again
    age: int  # of the oldest trained group, in steps
    dropped: int  # groups with equal rewards, or without a place in the step


def run_ahead(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Time rollouts that wait and rollouts that do not, in turn, over the same prompts with the same lengths.

    `tokens_per_second` of `waits` and `ahead` counts sampled tokens or, with --max-head-offpolicyness 0, trained ones.
    `over_full` is `step_s` divided by the time that its sampled tokens take at full batch. `dropped` is in groups per
    step, `recomputed` a share of the trained tokens, and `age` that of the oldest sample in steps.
    """
    ours = ArenoContender(settings, folder, random_init)
    with ours.engine:
        waits = (_Rounds if settings.equal_rewards else _Waits)(ours, settings)
        ahead = (_Replaces if settings.equal_rewards else _Ahead)(ours, settings)
        for _ in range(_SIMULATED):
            ahead.step(_Simulated(ours.vocab_size, ahead.at_once))
        full = _full_batch_speed(ours.engine, ahead)
        log_progress(f"a full batch decodes {full:,.0f} tokens/s")
        steps: dict[_Mode, list[_Step]] = {waits: [], ahead: []}
        for number in range(settings.repeats):
            for mode, found in steps.items():
                found.append(mode.step(ours.engine))
                log_progress(f"step {number + 1}, {mode.name}: {found[-1].seconds:.2f} s")
    of_waits, of_ahead = (_figures(each, full, settings.max_head_offpolicyness) for each in steps.values())
    n_samples = settings.repeats * settings.work.n_samples * len(waits.prompts)
    return {
        "full_batch": {"tokens_per_second": full},
        "waits": of_waits,
        "ahead": of_ahead,
        "ratio": of_ahead["tokens_per_second"] / of_waits["tokens_per_second"],
        "recomputed": sum(each.recomputed for each in steps[ahead]) / sum(each.trained for each in steps[ahead]),
        "age": max(each.age for each in steps[ahead]),
        "prompts_ahead": settings.ahead,
        "mean_tokens": sum(each.trained for each in steps[waits]) / n_samples,
    }


def _figures(steps: Sequence[_Step], full: float, limit: int) -> dict[str, float]:
    seconds, sampled = sum(each.seconds for each in steps), sum(each.sampled for each in steps)
    counted = sampled if limit else sum(each.trained for each in steps)  # without a limit, tokens are thrown away
    return {
        "tokens_per_second": counted / seconds,
        "step_s": seconds / len(steps),
        "over_full": seconds * full / sampled,
        "dropped": statistics.fmean(each.dropped for each in steps),
    }


class _Decodes(Protocol):
    """The part of an Engine that a rollout uses."""

    def begin_rollout(self, spec: RolloutSpec) -> Any: ...
    def hold(self) -> None: ...
    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...
    def advance(self, n_finished: int, n_steps: int | None = None) -> tuple[list[GenerationOutput], Any]: ...
    def park(self) -> list[GenerationOutput]: ...
    def end_rollout(self) -> None: ...


class _Simulated:
    """Stands in for an Engine: each running sample gets a random token in each decoding step."""

    def __init__(self, vocab_size: int, at_once: int):
        self._vocab_size, self._at_once, self._draw = vocab_size, at_once, random.Random(7)
        self._waiting: deque[tuple[GenerationRequest, int]] = deque()  # request, tokens so far
        self._running: list[tuple[GenerationRequest, int]] = []

    def begin_rollout(self, spec: RolloutSpec) -> None: ...

    def hold(self) -> None: ...

    def end_rollout(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += [(each, 0 if each.begun is None else len(each.begun.tokens)) for each in requests]

    def advance(self, n_finished: int, n_steps: int | None = None) -> tuple[list[GenerationOutput], None]:
        left, finished = n_steps or 1 << 40, list[GenerationOutput]()
        while left and len(finished) < n_finished and (self._running or self._waiting):
            while self._waiting and len(self._running) < self._at_once:
                self._running.append(self._waiting.popleft())
            n = min(left, *(each.params.max_new_tokens - done for each, done in self._running))
            running = [(each, done + n) for each, done in self._running]
            finished += [self._output(*each, "length") for each in running if each[1] == each[0].params.max_new_tokens]
            self._running = [each for each in running if each[1] < each[0].params.max_new_tokens]
            left -= n
        return finished, None

    def park(self) -> list[GenerationOutput]:
        parked = [self._output(*each, None) for each in (*self._running, *self._waiting)]
        self._running, self._waiting = [], deque()
        return parked

    def _output(self, request: GenerationRequest, n: int, reason: Any) -> GenerationOutput:
        begun = [] if request.begun is None else list(request.begun.tokens)
        tokens = begun + self._draw.choices(range(self._vocab_size), k=n - len(begun))
        return GenerationOutput(
            request_id=request.request_id,
            sample=request.first_sample,
            tokens=tokens,
            logprobs=[-1.0] * n,
            versions=[0] * n,
            finish_reason=reason,
        )


class _Mode:
    """The rollouts of one way to end a step. Subclasses decide about groups.

    A step samples `n_ahead` prompts beyond its batch. 0 waits for all samples.
    """

    name = "waits"
    n_steps: int | None = None  # between two decisions; None lets the engine choose

    def __init__(self, ours: ArenoContender, settings: Settings, n_ahead: int = 0):
        self.settings, self.n_ahead = settings, n_ahead
        self.prompts = settings.work.prompts(ours.vocab_size, 0)
        self.items = [PromptItem(prompt="", text="", tokens=tokens) for tokens in self.prompts]
        limit = settings.max_head_offpolicyness if n_ahead else 0
        self.in_flight = InFlight(lambda indices: [], settings.work.n_samples, limit)
        self.at_once = settings.at_once or len(self.prompts) * settings.work.n_samples
        self.number, self.n_batches = 0, 0
        self.spec = RolloutSpec(
            max_running=self.at_once,
            max_len=max(settings.work.row_lens),
            decoder=decoder_config(settings),
        )
        self.choice: Choice | Admission

    def batch(self) -> tuple[int, list[PromptItem]]:
        """Return (number, prompts) of the next batch."""
        self.n_batches += 1
        return self.n_batches, self.items

    def begin(self) -> list[Group]:
        """Begin a step, and return the groups to sample."""
        raise NotImplementedError

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        """Record finished samples. Return (number of unfinished samples of the step, groups that begin)."""
        raise NotImplementedError

    def step(self, engine: _Decodes) -> _Step:
        self.number += 1
        ids, group_of, before = itertools.count(), dict[int, Group](), list[tuple[Group, GenerationOutput, int]]()

        def requests(groups: Sequence[Group]) -> list[GenerationRequest]:
            found = list[GenerationRequest]()
            for group in groups:
                for part in group.unfinished:
                    [request] = requests_of_rest(self._request(group, part.sample), [part], ids)
                    found.append(request)
                    group_of[request.request_id] = group
                    before.append((group, part, n_tokens(part)))
            return found

        first = self.begin()
        missing, more = self.add([])
        due = requests([*first, *more])
        began = time.perf_counter()
        engine.begin_rollout(self.spec)
        engine.hold()
        while missing:
            if due:
                engine.submit(due)
            outputs, _ = engine.advance(missing, self.n_steps)
            missing, more = self.add([(group_of[output.request_id], output) for output in outputs])
            due = requests(more)
        parked = [(group_of[output.request_id], output) for output in engine.park()]
        engine.end_rollout()
        seconds = time.perf_counter() - began
        ended = {(group, output.sample): output for group, output in parked}
        now = [n_tokens(ended.get((group, part.sample)) or group.latest(part.sample)) for group, part, _ in before]
        went_on = [old for (_, _, old), new in zip(before, now, strict=True) if new > old]
        ages = [0 if group.begun_at is None else self.number - group.begun_at for group in self.choice.taken]
        self.in_flight.end(self.number, self.choice, parked)
        trained = sum(n_tokens(output) for group in self.choice.taken for output in group.outputs)
        sampled = sum(now) - sum(old for _, _, old in before)
        n_dropped = len(self.choice.gone) - len(self.choice.taken)
        return _Step(seconds, sampled, trained, sum(went_on), max(ages), n_dropped)

    def _request(self, group: Group, sample: int) -> GenerationRequest:
        """Return the request of a sample, whose length depends on its prompt and number alone."""
        work, mean = self.settings.work, self.settings.mean_tokens
        draw = random.Random(f"{group.batch}.{group.place}.{sample}")
        length = draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
        n_tokens = min(max(1, round(length)), max(work.new_lens))
        params = SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)
        seed = (group.batch << 32) + group.place
        return GenerationRequest(request_id=0, prompt=group.item.tokens, params=params, seed=seed)

    def has_equal_rewards(self, group: Group) -> bool:
        return random.Random(f"reward {group.batch}.{group.place}").random() < self.settings.equal_rewards


class _Waits(_Mode):
    """Steps that wait for all samples or, with prompts ahead, do not."""

    choice: Choice

    def begin(self) -> list[Group]:
        number, items = self.batch()
        self.choice = self.in_flight.begin(self.number, self.n_ahead, items, lambda n: [self.items] * n, number)
        return list(self.choice.groups)

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        self.choice.add(found)
        return self.choice.missing, []


class _Ahead(_Waits):
    name = "ahead"

    def __init__(self, ours: ArenoContender, settings: Settings):
        super().__init__(ours, settings, settings.ahead)


class _Replaces(_Mode):
    """Steps that do not wait, and replace groups with equal rewards. A reward is known as soon as its sample ends."""

    name, n_steps = "ahead, replaces", DECISION_STEPS
    choice: Admission

    def __init__(self, ours: ArenoContender, settings: Settings):
        super().__init__(ours, settings, settings.ahead)

    def begin(self) -> list[Group]:
        size = len(self.items)
        self.choice = self.in_flight.begin_replacing(self.number, size, size + self.n_ahead, self.at_once, self.batch)
        return []

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        more: list[Group] = []
        return self.choice.decide(found, more.extend, self.has_equal_rewards), more


class _Rounds(_Mode):
    """Steps that wait, and sample a further batch as soon as dropped groups show that the step needs it.

    A step trains on the first groups with different rewards in the order of the prompts, and drops the others.
    """

    name, n_steps = "waits, in rounds", DECISION_STEPS
    choice: Admission

    def begin(self) -> list[Group]:
        self.choice = Admission([], 0, len(self.items), 1 << 40, 1, lambda: None)
        self._missing: dict[Group, int] = {}
        self._n_equal = 0
        return []

    def add(self, found: Iterable[tuple[Group, GenerationOutput]]) -> tuple[int, list[Group]]:
        for group, output in found:
            group.record(output)
            self._n_equal += not group.missing and self.has_equal_rewards(group)
        more = list[Group]()
        size = len(self.items)
        while len(self.choice.groups) - self._n_equal < size:
            number, items = self.batch()
            groups = [Group(number, place, item, self.settings.work.n_samples) for place, item in enumerate(items)]
            self.choice.groups += groups
            more += groups
        n_missing = sum(group.missing for group in self.choice.groups)
        if not n_missing:
            differ = [group for group in self.choice.groups if not self.has_equal_rewards(group)]
            self.choice.taken = differ[:size]
            self.choice.dropped = [group for group in self.choice.groups if group not in self.choice.taken]
        return n_missing, more


def _full_batch_speed(engine: Engine, mode: _Mode) -> float:
    """Return the tokens per second of a full batch, with the mean context lengths of decoding.

    Warms up all batch sizes.
    """
    work, mean = mode.settings.work, mode.settings.mean_tokens
    draw, vocab = random.Random(11), range(engine.info.vocab_size)
    # Long samples are decoded for a long time, so that the lengths are weighted by the length.
    center, new = math.log(mean) + _SIGMA**2 / 2, 8 * _FULL_STEPS
    begun = [draw.lognormvariate(center, _SIGMA) * draw.random() for _ in range(mode.at_once)]
    begun_lens = [max(1, min(round(length), max(work.new_lens) - new)) for length in begun]
    spec = replace(mode.spec, max_len=max(mode.spec.max_len, max(work.prompt_lens) + new + 1))
    prompts = [
        [*mode.prompts[k % len(mode.prompts)], *draw.choices(vocab, k=n_begun)] for k, n_begun in enumerate(begun_lens)
    ]
    engine.begin_rollout(spec)
    engine.hold()
    engine.submit([_ignoring_ends(k, prompt[:8], k + 2) for k, prompt in enumerate(prompts)])
    engine.advance(mode.at_once, max(_FULL_STEPS, 2 * mode.at_once))
    engine.park()
    engine.submit([_ignoring_ends(k, prompt, new) for k, prompt in enumerate(prompts)])
    _, [stats] = engine.advance(1 << 40, DECISION_STEPS)
    while stats.waiting and stats.generated_tokens < mode.at_once * _FULL_STEPS:  # prefill
        _, [stats] = engine.advance(1 << 40, DECISION_STEPS)
    _, [before] = engine.advance(1 << 40, DECISION_STEPS)
    began = time.perf_counter()
    _, [after] = engine.advance(1 << 40, _FULL_STEPS)
    seconds = time.perf_counter() - began
    engine.park()
    engine.end_rollout()
    return (after.generated_tokens - before.generated_tokens) / seconds


def _ignoring_ends(request_id: int, prompt: list[int], n_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)
    return GenerationRequest(request_id=request_id, prompt=prompt, params=params, seed=request_id)


def ahead_page(found: dict[str, Any]) -> str:
    lines = [
        f"mean length of a sample: {found['mean_tokens']:,.0f} tokens",
        f"full batch:                {found['full_batch']['tokens_per_second']:12,.0f} tokens/s",
    ]
    for name, title in (("waits", "steps that wait:"), ("ahead", f"{found['prompts_ahead']:>3} prompts ahead:")):
        each = found[name]
        lines.append(
            f"{title:<26} {each['tokens_per_second']:12,.0f} tokens/s; a step takes {each['step_s']:.2f} s, "
            f"{each['over_full']:.2f} times its tokens at full batch; {each['dropped']:.1f} prompts dropped"
        )
    lines.append(
        f"ratio: {found['ratio']:.2f}; computed again: {100 * found['recomputed']:.1f} % of the trained tokens; oldest "
        f"sample: {found['age']} steps"
    )
    return "\n".join(lines)
