"""A rollout by agents that send one request each over HTTP, against sampling directly on the engine."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from areno.agents.pool import AgentPool
from areno.agents.proxy import SessionProxy
from areno.agents.trajectories import AgentBatch, AgentContext
from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender, requests
from areno.bench.arguments import Settings
from areno.config.agent import AgentConfig
from areno.types import SamplingParams
from benchmarks.texts import RandomTexts, add_tokenizer_argument
from benchmarks.turns import speeds, time_interleaved

_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_tokenizer_argument(parser)
    parser.set_defaults(kind="rollout")


def run(settings: Settings, folder: Path) -> dict[str, dict[str, float]]:
    from transformers import AutoTokenizer

    ours = ArenoContender(settings, *checked_model(settings, folder))
    work, tokenizer = settings.work, AutoTokenizer.from_pretrained(settings.tokenizer)
    words = RandomTexts(tokenizer)
    agent = AgentConfig(fn=str(Path(__file__).with_name("one_turn_agent.py")), timeout_s=_TIMEOUT_S)
    with ours.engine as engine, AgentPool({"": agent}, n_devices=1) as pool:
        pool.wait_ready()
        limits = ours.begin_rollout(work.n_rows, 2 * max(work.row_lens) + 64)  # a text may have more tokens than words
        proxy = SessionProxy(engine, limits, tokenizer, SamplingParams(), timeout_s=_TIMEOUT_S, seed=0, thinking=None)
        context = AgentContext(proxy.base_url, proxy.api_key, proxy.session, _TIMEOUT_S)

        # Each way gets prompts of its own, so that neither finds the other's in the prefix cache.
        def direct(repeat: int) -> Any:
            conversations = ([{"role": "user", "content": text}] for text in words.draw(work, "direct", repeat))
            prompts = [proxy.server.chat.prompts.build_prompt(messages).tokens for messages in conversations]
            return partial(engine.generate, requests(work, prompts))

        def by_agents(repeat: int) -> Any:
            texts, records = words.draw(work, "agents", repeat), [{"new_tokens": new} for new in work.new_lens]
            batch = AgentBatch(records, texts, [[]] * len(texts), work.n_samples)

            def roll_out() -> None:
                proxy.prefetch(batch)
                failed = [
                    outcome.message
                    for outcome in pool.run(list(batch), lambda items: context)
                    if outcome.status != "ok"
                ]
                if failed:
                    raise RuntimeError(f"{len(failed)} agents failed; the first: {failed[0]}")

            return roll_out

        seconds = time_interleaved({"direct": direct, "agents": by_agents}, settings.repeats)
        proxy.stop()
    return speeds(work.n_new_tokens, seconds)
