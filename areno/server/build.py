"""Puts a server together: conversations, sampling and endpoints over one engine."""

from __future__ import annotations

import time
from typing import Any

from areno.engine.engine import Engine
from areno.engine.limits import RequestLimits
from areno.server.app import Server
from areno.server.chat import ChatCompletions
from areno.server.completions import Completions
from areno.server.conversations import Conversations, prompt_threads
from areno.server.parsers import parser_for_template
from areno.server.sampling import Sampler, ServerLimits
from areno.types import SamplingParams


def build_server(
    engine: Engine,
    room: RequestLimits,
    tokenizer: Any,
    *,
    models: list[str],
    keys: list[str],
    defaults: SamplingParams,
    limits: ServerLimits | None = None,
    seed: int = 0,
    thinking: bool | None = None,
    session: str | None = None,
) -> Server:
    """A server over an engine in a rollout phase, which has `room`.

    session: of training, where answers have their tokens and nothing is forced by tool_choice. The other arguments are
    those of Server, Sampler and Conversations.
    """
    stop_ids = frozenset(engine.spec.eos_token_ids) | frozenset(defaults.stop_token_ids or ())
    limits = limits or ServerLimits()
    sampler = Sampler(engine, room, limits, seed, stop_ids)
    threads = prompt_threads(tokenizer)
    conversations = Conversations(
        tokenizer, parser_for_template(tokenizer.chat_template), thinking=thinking, threads=threads,
        most_tokens=limits.max_remembered, most_prompt=sampler.most_prompt,
    )  # fmt: skip
    return Server(
        chat=ChatCompletions(conversations, sampler, session=session, enforces_calls=session is None),
        completions=Completions(tokenizer, sampler, threads, tells_tokens=session is not None),
        sampler=sampler,
        threads=threads,
        models=models,
        keys=keys,
        defaults=defaults,
        created=int(time.time()),
    )
