"""Small models with experts, for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from areno.files.paths import find_file
from tests.helpers.tiny_engine import model_folder

QWEN = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "norm_topk_prob": True}

OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "swiglu_limit": 1.5,  # so that many numbers are beyond it
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "pad_token_id": None,
    "eos_token_id": 3,
}

GLM = {"moe_intermediate_size": 20, "n_routed_experts": 12, "num_experts_per_tok": 2, "head_dim": 16}


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
    experts = {**QWEN, "mlp_only_layers": [1], "num_hidden_layers": 3, **changes}
    return model_folder(folder, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **experts)
