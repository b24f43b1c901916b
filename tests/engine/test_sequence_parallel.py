"""Sequence parallel: tensor-parallel ranks that share the tokens between products find what one rank finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.errors import ConfigError
from areno.models.registry import load_config
from tests.helpers.tiny_engine import engine_spec, folder_with
from tests.helpers.tp_ranks import Groups, compare, on_ranks

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
QWEN3 = {"tie_word_embeddings": True, "num_hidden_layers": 3}
EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
FORMS = [{}, {"gradient_checkpointing": True}, {"head": "value"}, {"kind": "adam_8bit"}]


def compare_forms(folder: Path, tp: int, cp: int, forms: list[dict[str, Any]], stages: tuple[int, ...] = (1,)) -> None:
    layout = Groups.of(tp, cp)
    for alone in forms:
        for zero_stage in stages:
            compare(folder, layout, alone, zero_stage=zero_stage, sequence_parallel=True)


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """A loss, its gradients, scores and weights; micro-batches of an odd number of tokens, too."""
    on_ranks(2, compare_forms, folder_with(tmp_path, 64, **QWEN3), 2, 1, [{}])


def compare_all(folder: Path) -> None:
    """Four ranks: of one group, which holds each key-value head twice; two copies; two ranks of a context."""
    compare_forms(folder, 4, 1, FORMS)
    compare_forms(folder, 2, 1, FORMS[:1], (0, 2))
    if load_config(folder).num_kv_heads == 4:
        compare_forms(folder, 2, 2, FORMS[1:2], (0,))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [QWEN3 | EIGHT_HEADS, LLAMA], ids=["qwen3", "llama"])
def test_four_ranks_in_all_forms(tmp_path: Path, changes: dict[str, Any]) -> None:
    on_ranks(4, compare_all, folder_with(tmp_path, 64, **changes))


def test_who_shares_tokens() -> None:
    def of(tp_size: int = 2, **settings: Any) -> bool:
        return engine_spec(devices=["cpu"] * 2, tp_size=tp_size, **settings).is_sequence_parallel

    assert of()
    assert of(sequence_parallel=True)
    assert not of(sequence_parallel=False)
    assert not of(exact=True)
    assert not of(tp_size=1)
    with pytest.raises(ConfigError, match="sequence_parallel: is true, but tp_size=1 has no ranks that share tokens"):
        of(tp_size=1, sequence_parallel=True)
