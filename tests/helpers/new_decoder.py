"""A decoder of any model, from the settings that a test is about."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from areno.config.rollout import DecoderConfig
from areno.config.run import EngineConfig
from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.grammar import Grammar
from areno.models.transformer import Transformer
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec


def new_decoder(
    model: Transformer,
    *,
    n_blocks: int = 200,
    block_size: int = 4,
    max_running: int = 16,
    max_prefill_tokens: int = 256,
    eos_token_ids: Collection[int] = (),
    texts: Collection[tuple[int, int]] = (),
    attn_backend: str = "sdpa",
    exact: bool = False,
    use_graphs: bool = False,
    keeps_routes: bool = False,
    runs_ahead: bool = True,
    stream_every_s: float = 0.0,
    detokenize: Callable[[list[int]], str] | None = None,
    compile_grammar: Callable[[str], Grammar] | None = None,
) -> Decoder:
    """Rows may be as long as the context."""
    vocabulary: Any = SimpleNamespace(
        eos_token_ids=eos_token_ids,
        ids_with_text=texts,
        tokenizer=SimpleNamespace(decode=detokenize),
        grammars=SimpleNamespace(compile=compile_grammar),
    )
    engine = EngineSpec(
        actor=RoleSpec(path=""), devices=["cpu"], engine=EngineConfig(exact=exact), routing_replay=keeps_routes
    )
    rollout = RolloutSpec(
        max_running=max_running,
        max_len=model.config.max_position_embeddings,
        decoder=DecoderConfig(max_prefill_tokens=max_prefill_tokens, eager_decode=not use_graphs),
    )
    how = {"n_blocks": n_blocks, "block_size": block_size, "attn_backend": attn_backend}
    decoder = Decoder(model, vocabulary, engine, rollout, **how, runs_ahead=runs_ahead)
    decoder.stream_every_s = stream_every_s
    return decoder
