"""Compare rollouts that wait for their longest samples with rollouts that do not (rollout.max_head_offpolicyness).

The lengths of samples are drawn from a log-normal distribution, as those of reasoning. A step is a rollout without
training. Each rollout begins with an empty KV cache, as after an update of the weights, so that samples that continue
compute all their tokens again. With --max-head-offpolicyness 0, samples do not continue, and their prompts are
postponed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from areno.bench.areno_contender import ArenoContender
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.config.rollout import DecoderConfig
from areno.engine.engine import Engine
from areno.engine.requests import requests_of_rest
from areno.engine.spec import RolloutSpec
from areno.run.groups import Group, n_tokens
from areno.run.in_flight import InFlight
from areno.types import GenerationOutput, GenerationRequest, PromptItem, SamplingParams

_SIGMA = 0.8  # of the logarithm of a length
_WARM_UP = 2  # steps, until about as many samples are parked as in later steps


@dataclass
class _Step:
    """The figures of a rollout: seconds, tokens of the trained samples, tokens computed again, oldest sample."""

    seconds: float
    trained: int
    recomputed: int
    age: int


def run_ahead(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Time rollouts that wait and rollouts that do not, in turn, over the same prompts with the same lengths.

    Args:
        settings: The parsed command line. --new-tokens is the largest length of a sample.
        folder: Path of the model folder.
        random_init: Whether to draw random weights instead of loading weights.

    Returns:
        Figures by name: `waits` and `ahead` (each with `tokens_per_second`, of trained samples), `ratio` of the two,
        `recomputed` (tokens computed again, as a share of the trained tokens), `age` (of the oldest sample, in steps),
        `prompts_ahead`.
    """
    ours = ArenoContender(settings, folder, random_init)
    with ours.engine:
        waits, ahead = _Rollouts(ours, settings, 0), _Rollouts(ours, settings, settings.ahead)
        steps: dict[_Rollouts, list[_Step]] = {waits: [], ahead: []}
        for number in range(_WARM_UP + settings.repeats):
            for rollouts, found in steps.items():
                found.append(rollouts.step())
                each = found[-1]
                log_progress(f"step {number + 1}, {rollouts.n_ahead} prompts ahead: {each.seconds:.2f} s")
    speeds = {}
    for rollouts, found in steps.items():
        timed = found[_WARM_UP:]
        speeds[rollouts] = sum(each.trained for each in timed) / sum(each.seconds for each in timed)
    timed = steps[ahead][_WARM_UP:]
    return {
        "waits": {"tokens_per_second": speeds[waits]},
        "ahead": {"tokens_per_second": speeds[ahead]},
        "ratio": speeds[ahead] / speeds[waits],
        "recomputed": sum(each.recomputed for each in timed) / sum(each.trained for each in timed),
        "age": max(each.age for each in timed),
        "prompts_ahead": settings.ahead,
        "mean_tokens": statistics.fmean(each.trained for each in timed) / settings.work.n_samples / len(waits.prompts),
    }


class _Rollouts:
    """The rollouts of one mode.

    Args:
        ours: The engine.
        settings: The parsed command line.
        n_ahead: Number of prompts that a step samples beyond its batch. 0 waits for all samples.
    """

    def __init__(self, ours: ArenoContender, settings: Settings, n_ahead: int):
        self.n_ahead, self._settings, self._engine = n_ahead, settings, ours.engine
        self.prompts = settings.work.prompts(ours.vocab_size, 0)
        limit = settings.max_head_offpolicyness if n_ahead else 0
        self._in_flight = InFlight(lambda indices: [], settings.work.n_samples, limit)
        self._step = 0
        self._spec = RolloutSpec(
            max_running=settings.at_once or len(self.prompts) * settings.work.n_samples,
            max_len=max(settings.work.row_lens),
            decoder=DecoderConfig(
                mem_fraction=settings.mem_fraction,
                max_prefill_tokens=settings.max_prefill_tokens,
                eager_decode=settings.eager_decode,
                speculation="off",  # repetitions have the same samples, which drafts would know
            ),
        )

    def step(self) -> _Step:
        """Run the rollout of a step."""
        self._step += 1
        items = [PromptItem(prompt="", text="", tokens=tokens) for tokens in self.prompts]
        choice = self._in_flight.begin(self._step, self.n_ahead, items, lambda n: [items] * n)
        groups, ids = choice.groups, itertools.count()
        before = [(group, part) for group in groups for part in group.parked.values()]
        requests, group_of = list[GenerationRequest](), dict[int, Group]()
        for group in groups:
            for part in group.unfinished:
                [request] = requests_of_rest(self._request(group, part.sample), [part], ids)
                requests.append(request)
                group_of[request.request_id] = group
        began = time.perf_counter()
        parked = _roll_out(self._engine, self._spec, requests, group_of, choice)
        seconds = time.perf_counter() - began
        self._in_flight.end(self._step, choice, [(group_of[each.request_id], each) for each in parked])
        went_on = [part for group, part in before if n_tokens(group.latest(part.sample)) > n_tokens(part)]
        trained = sum(len(output.tokens) for group in choice.taken for output in group.outputs)
        ages = [0 if group.begun_at is None else self._step - group.begun_at for group in choice.taken]
        return _Step(seconds, trained, sum(map(n_tokens, went_on)), max(ages))

    def _request(self, group: Group, sample: int) -> GenerationRequest:
        """Return the request of a sample, whose length depends on its prompt and number alone."""
        work, mean = self._settings.work, self._settings.mean_tokens
        draw = random.Random(f"{group.batch}.{group.place}.{sample}")
        length = draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
        n_tokens = min(max(1, round(length)), max(work.new_lens))
        params = SamplingParams(max_new_tokens=n_tokens, ignore_eos=True)
        seed = (group.batch << 32) + group.place
        return GenerationRequest(request_id=0, prompt=group.item.tokens, params=params, seed=seed)


def _roll_out(
    engine: Engine, spec: RolloutSpec, requests: list[GenerationRequest], group_of: dict[int, Group], choice: Any
) -> list[GenerationOutput]:
    """Sample until the groups of the step are whole, and return the samples that are stopped."""
    engine.begin_rollout(spec)
    engine.hold()
    engine.submit(requests)
    while missing := choice.missing:
        outputs, _ = engine.advance(missing)
        choice.add((group_of[output.request_id], output) for output in outputs)
    parked = engine.park()
    engine.end_rollout()
    return parked


def ahead_page(found: dict[str, Any]) -> str:
    """Format the results of `run_ahead` as text.

    Args:
        found: The results.
    """
    waits, ahead = (found[name]["tokens_per_second"] for name in ("waits", "ahead"))
    return "\n".join(
        [
            f"mean length of a sample: {found['mean_tokens']:,.0f} tokens",
            f"steps that wait:          {waits:12,.0f} tokens/s",
            f"{found['prompts_ahead']:>3} prompts ahead:        {ahead:12,.0f} tokens/s, {found['ratio']:.2f} times",
            f"computed again: {100 * found['recomputed']:.1f} % of the trained tokens; oldest sample: "
            f"{found['age']} steps",
        ]
    )
