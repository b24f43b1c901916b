"""What a rollout through agents costs: the same prompts sampled directly, and by agents over HTTP."""

from __future__ import annotations

import os
import time
from pathlib import Path

from areno.agents.context import AgentContext
from areno.agents.pool import AgentPool
from areno.agents.proxy import SessionProxy
from areno.agents.trajectories import AgentBatch
from areno.bench.arguments import Settings
from areno.bench.ours import Ours, requests
from areno.bench.sampling import speeds
from areno.bench.texts import Texts
from areno.bench.timing import repeat_name, tell
from areno.config.rollout.agent import AgentConfig
from areno.types import SamplingParams

_TIMEOUT_S = 600.0
_MOST_PROCESSES = 8


def run_agents(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """direct, agents -> median seconds, tokens per second, and the speed relative to direct sampling.

    The prompts are texts in the chat template of --tokenizer, about as long as --prompt-len. The two take turns.
    """
    from transformers import AutoTokenizer

    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer or folder)
    words = Texts(tokenizer)
    ours = Ours(settings, folder, random_init)
    agent = AgentConfig(
        fn=str(Path(__file__).with_name("one_turn.py")), timeout_s=_TIMEOUT_S,
        workers=max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) // 2)),
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"direct": [], "agents": []}
    with ours.engine as engine, AgentPool(agent) as pool:
        pool.wait_ready()
        room = ours.begin(work.n_rows, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        proxy = SessionProxy(engine, room, tokenizer, SamplingParams(), timeout_s=_TIMEOUT_S, seed=0, thinking=None)
        context = AgentContext(proxy.base_url, proxy.api_key, proxy.session, _TIMEOUT_S)
        conversations = proxy.server.chat.conversations
        for repeat in range(-1, settings.repeats):
            # Other prompts for each, so that neither finds those of the other in the cache.
            texts = {name: words.of(work, name, repeat) for name in seconds}
            prompts = [conversations.prompt([{"role": "user", "content": text}]).tokens for text in texts["direct"]]
            batch = AgentBatch([{"new_tokens": new} for new in work.new_lens], texts["agents"], prompts, work.n_samples)
            started = time.perf_counter()
            engine.generate(requests(work, prompts))
            middle = time.perf_counter()
            proxy.expect(batch)
            outcomes = pool.run(list(batch), context)
            ended = time.perf_counter()
            if failed := [outcome.message for outcome in outcomes if outcome.status != "ok"]:
                raise RuntimeError(f"{len(failed)} agents failed; the first: {failed[0]}")
            taken = {"direct": middle - started, "agents": ended - middle}
            title = repeat_name(repeat, settings.repeats)
            tell(f"{title}: direct {taken['direct']:.3f} s, agents {taken['agents']:.3f} s")
            for name, value in taken.items() if repeat >= 0 else ():
                seconds[name].append(value)
        proxy.stop()
    return speeds(work, seconds, "direct")
