"""Shapes of large models and their roles in a run, for what is computed from shapes alone."""

from __future__ import annotations

from dataclasses import replace

from areno.config.models import OptimizerConfig
from areno.cost.footprint import ModelFootprint
from areno.layers.config import RopeConfig
from areno.models.config import TransformerConfig

QWEN3_8B = TransformerConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1e6),
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    eos_token_ids=(1,),
    initializer_range=0.02,
    hf={},
)

QWEN3_06B = replace(
    QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_word_embeddings=True
)
ACTOR = ModelFootprint(name="actor", config=QWEN3_8B, path="", optimizer=OptimizerConfig())
REF = ModelFootprint(name="ref", config=QWEN3_8B, path="", key="ref.path")
CRITIC = replace(ACTOR, name="critic", key="critic.path", config=replace(QWEN3_8B, head="value"))
REWARD = replace(CRITIC, name="reward", key="reward.path", optimizer=None)
