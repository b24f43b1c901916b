"""Small models with experts, for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from areno.files.paths import find_file
from tests.helpers import tiny_shape
from tests.helpers.tiny_engine import model_folder

SHAPE = {**tiny_shape.SHAPE, "num_hidden_layers": 3}
QWEN = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "norm_topk_prob": True}
# Name -> model_type, and the fields beside SHAPE.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0], "tie_word_embeddings": False}),
    "qwen3-tied": (
        "qwen3_moe",
        {
            **QWEN,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "mixtral-tied": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
}


def random_reference(case: str, folder: Path) -> Any:
    """A transformers model with random weights, norms and biases included, saved to `folder`."""
    import transformers

    kind, extra = CASES[case]
    return tiny_shape.random_model(transformers.AutoConfig.for_model(kind, **SHAPE, **extra), folder)


def quickstart_with_experts(folder: Path) -> Path:
    """The shape and the tokenizer of the quickstart's model, with experts: for actor.init_from_scratch."""
    source = find_file("examples/quickstart/model")
    folder.mkdir(parents=True)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **QWEN, "initializer_range": 0.2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def moe_folder(folder: Path, **changes: Any) -> Path:
    """As `model_folder` of tiny_engine, with three layers, of which two have experts."""
    file = model_folder(folder) / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3}
    config |= {**QWEN, "mlp_only_layers": [1], **changes}
    file.write_text(json.dumps(config))
    return folder
