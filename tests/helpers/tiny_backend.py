"""A train backend over a tiny random model, and rows for it."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import torch

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.models.registry import build_model, load_config
from areno.types import TrainSequence
from tests.helpers.tiny_engine import train_on
from tests.helpers.train_backend import train_backend

VOCAB = 61
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
WHOLE = MicroBatchSpec(mini_bs=1000)


@cache
def model_config():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        return load_config(Path(folder))


def make(optimizer=OPTIMIZER, recompute=False, dtype=torch.float32, **kwargs):
    """Backends over the same weights."""
    model = build_model(model_config(), dtype=dtype, device="cpu")
    model.init_weights(7)
    return train_backend(model, optimizer, gradient_checkpointing=recompute, **kwargs)


def make_rows(n=10, seed=0):
    """Different lengths, holes in the mask, one row without a trained token."""
    rng = random.Random(seed)
    rows = []
    for index in range(n):
        size = rng.randint(3, 24)
        mask = [True] * 2 + [rng.random() < 0.25 for _ in range(size - 2)]
        if index == 3:
            mask = [True] * size
        rows.append(
            TrainSequence(
                tokens=[rng.randrange(VOCAB) for _ in range(size)],
                prompt_mask=mask,
                logprobs=(logprobs := [0.0 if m else -rng.uniform(1, 5) for m in mask]),
                old_logprobs=[value + 0.2 * (-1) ** place for place, value in enumerate(logprobs)],
                advantages=[rng.gauss(0, 1)] * size,
                ref_logprobs=[-rng.uniform(1, 5) for _ in mask],
            )
        )
    return rows


def loss_and_gradient(backend, rows, loss_fn, spec=WHOLE, **how):
    stats = train_on(backend, rows, loss_fn, spec, **how)
    return stats, backend.flat.grads.clone()


class Shares:
    """Data-parallel ranks run one after the other: what they would sum is added up here by hand."""

    size = 3

    def __init__(self, rank):
        self.rank = rank
        self.sent = []

    def all_reduce(self, x, op=None):
        self.sent.append(x.clone())
        return x
