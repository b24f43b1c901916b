"""Compare the speed of rollouts with drafts (rollout.speculation=on) and without, over the same prompts and seeds.

Before the timed rollouts, rollouts with other seeds sample the prompts of a whole training step three times, as earlier
epochs would, and fill the table of drafts. The weights stay the same, so drafts are right more often than in a training
with large updates. With --turns above 1, each sample is a conversation: the prompt of its next turn is its last prompt,
its completion and a made-up result of a tool. All conversations about a prompt share drafts, as the conversations of
agents do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areno.bench.areno_contender import ArenoContender, decoder_config
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.bench.trl_contender import prompts_of
from areno.engine.engine import Engine
from areno.engine.reports import DraftCounts
from areno.errors import ConfigError, Problem
from areno.launch.compose import load
from areno.plan.plan import sampling_params
from areno.recipes import grpo
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationRequest, SamplingParams

_EPOCHS = 3  # rollouts of all prompts before the timed ones
_WARM_UP = 8  # rollouts of each number of samples before the timed ones
_RESULT_TOKENS = 12  # tokens of a tool's made-up result


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a training step as token ids, the largest number of samples of a prompt, and sampling settings."""

    tokens: Sequence[list[int]]
    n_samples: int
    params: SamplingParams


def run_speculation(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Time rollouts with and without drafts in turn, for each number of samples at once.

    On a CPU, the engine is always exact, because otherwise it would keep no samples of earlier rollouts. `off` and `on`
    are tokens per second, and `same` is the share of completions that are equal with and without drafts. The counts are
    those of the last rollout with drafts.
    """
    settings = replace(settings, exact=settings.exact or settings.device == "cpu")
    ours = ArenoContender(settings, folder, random_init)
    with ours.engine:
        prompts = _prompts(settings, folder, ours.vocab_size)
        _check_room(settings, prompts, ours.engine.info.context_len)
        for epoch in range(_EPOCHS):
            _roll_out(ours.engine, settings, prompts, "on", seed=epoch)
            log_progress(f"{len(prompts.tokens) * prompts.n_samples} samples, epoch {epoch + 1}")
        return {"batches": [_compare(ours.engine, settings, prompts, n_rows) for n_rows in settings.batches]}


def _prompts(settings: Settings, folder: str, vocab_size: int) -> _Prompts:
    """Return the prompts of the config, or random ones."""
    if settings.config is None:
        n_prompts = max(-(-n_rows // settings.work.n_samples) for n_rows in settings.batches)
        work = replace(settings.work, prompt_lens=settings.work.prompt_lens[:1] * n_prompts)
        params = SamplingParams(max_new_tokens=max(work.new_lens), ignore_eos=True)
        return _Prompts(work.prompts(vocab_size, 0), work.n_samples, params)
    model = str(Path(folder).absolute()).replace('"', '\\"')
    config: Any = load(grpo.ALGORITHM.config, settings.config, [f'actor.path="{model}"', *settings.overrides])
    n_samples = config.gconfig.n_samples
    n_prompts = max(-(-n_rows // n_samples) for n_rows in settings.batches)
    n_steps = -(-n_prompts // config.train_dataset.batch_size)
    tokens = [list(map(int, item.tokens)) for item in prompts_of(config, n_steps)]
    return _Prompts(tokens, n_samples, sampling_params(config.gconfig))


def _compare(engine: Engine, settings: Settings, prompts: _Prompts, n_rows: int) -> dict[str, Any]:
    n_samples = min(n_rows, prompts.n_samples)
    chosen = replace(prompts, tokens=prompts.tokens[: -(-n_rows // n_samples)], n_samples=n_samples)
    for number in range(_WARM_UP):  # they capture the CUDA graphs, so that no timed rollout has to
        _roll_out(engine, settings, chosen, "off" if number == 0 else "on", seed=_EPOCHS + number)
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    counts, n_same, n_all = DraftCounts(), 0, 0
    for number in range(settings.repeats):
        found: dict[str, list[list[int]]] = {}
        for mode, measured in list(speeds.items())[:: 1 if number % 2 else -1]:
            seed = _EPOCHS + _WARM_UP + number
            seconds, found[mode], drafts = _roll_out(engine, settings, chosen, mode, seed=seed)
            measured.append(sum(map(len, found[mode])) / seconds)
            counts = drafts if mode == "on" else counts
            log_progress(f"{n_rows} samples, speculation {mode}, repeat {number + 1}: {measured[-1]:,.0f} tokens/s")
        n_same += sum(with_drafts == without for with_drafts, without in zip(found["on"], found["off"], strict=True))
        n_all += len(found["on"])
    off, on = (statistics.median(speeds[mode]) for mode in ("off", "on"))
    of_drafts = asdict(counts) | {"acceptance": counts.acceptance, "step_share": counts.step_share}
    return {
        "rows": len(chosen.tokens) * n_samples,
        "off": off,
        "on": on,
        "ratio": on / off,
        "same": n_same / n_all,
        **of_drafts,
    }


def _roll_out(
    engine: Engine, settings: Settings, prompts: _Prompts, mode: Any, seed: int
) -> tuple[float, list[list[int]], DraftCounts]:
    """Return the seconds of a rollout, the completions of all turns, and the counts of drafts."""
    decoder = decoder_config(settings, mode)
    longest = max(map(len, prompts.tokens)) + prompts.params.max_new_tokens
    longest += (settings.turns - 1) * (prompts.params.max_new_tokens + _RESULT_TOKENS)
    max_len = min(longest, engine.info.context_len)
    n_rows = len(prompts.tokens) * prompts.n_samples
    engine.begin_rollout(RolloutSpec(max_running=n_rows, max_len=max_len, decoder=decoder))
    began, completions = time.perf_counter(), list[list[int]]()
    if settings.turns == 1:
        requests = [
            GenerationRequest(
                request_id=index,
                prompt=prompt,
                n_samples=prompts.n_samples,
                params=prompts.params,
                seed=(seed << 32) + index,
            )
            for index, prompt in enumerate(prompts.tokens)
        ]
        completions = [output.tokens for of in engine.generate(requests).values() for output in of]
    else:
        conversations = [prompt for prompt in prompts.tokens for _ in range(prompts.n_samples)]
        for turn in range(settings.turns):
            requests = [
                GenerationRequest(
                    request_id=index,
                    prompt=conversation,
                    params=prompts.params,
                    seed=(seed << 32) + (turn << 20) + index,
                    draft_scope=index // prompts.n_samples,
                )
                for index, conversation in enumerate(conversations)
            ]
            answers = [of[0].tokens for _, of in sorted(engine.generate(requests).items())]
            completions += answers
            drawn = random.Random(turn).choices(range(engine.info.vocab_size), k=_RESULT_TOKENS)
            conversations = [[*before, *new, *drawn] for before, new in zip(conversations, answers, strict=True)]
    seconds, counts = time.perf_counter() - began, engine.draft_counts()
    engine.end_rollout()
    return seconds, completions, counts


def _check_room(settings: Settings, prompts: _Prompts, context_len: int) -> None:
    """Raise ConfigError if the last turn of a conversation may not fit into the model's context."""
    new = prompts.params.max_new_tokens
    longest = max(map(len, prompts.tokens)) + settings.turns * (new + _RESULT_TOKENS) - _RESULT_TOKENS
    if longest > context_len:
        message = f"makes conversations of {longest} tokens, the model's context is {context_len}"
        raise ConfigError([Problem("--turns" if settings.turns > 1 else "--new-tokens", message)])


def speculation_page(found: dict[str, Any]) -> str:
    lines = [f"{'samples':>8}  {'off, tokens/s':>14}  {'on, tokens/s':>14}  {'ratio':>6}  accepted  steps with drafts"]
    lines += [
        f"{each['rows']:>8}  {each['off']:>14,.0f}  {each['on']:>14,.0f}  {each['ratio']:>6.2f}  "
        f"{100 * each['acceptance']:>6.1f} %  {100 * each['step_share']:>6.1f} %"
        for each in found["batches"]
    ]
    least = min(each["same"] for each in found["batches"])
    return "\n".join([*lines, f"completions that are equal with and without drafts: {100 * least:.1f} %"])
