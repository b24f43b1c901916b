"""Qwen3-MoE, Qwen3.5-MoE, Mixtral and GLM-4.5: the MLP of a layer is a mixture of experts.

Qwen3-MoE has the attention of Qwen3. A separate field sets the inner size of its experts, and some layers may have a
plain MLP. Mixtral has the attention of Llama without biases, and experts in every layer. In Mixtral, the weights of a
token's chosen experts always add up to 1. Qwen3.5-MoE has the layers of Qwen3.5, and in every layer experts whose
weights add up to 1, beside a gated shared expert.

In GLM-4.5 to 4.7, the score of an expert is a sigmoid (Wang et al. 2024, arXiv 2408.15664). A bias, which pretraining
has set to balance the experts, changes which of them are chosen, but not their weights. The first layers have a plain
MLP, the others a shared expert without a gate, if `n_shared_experts` is not 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areno.layers.config import MoEConfig
from areno.models.config import UNUSED_WINDOW, Family, TransformerConfig, read_decoder
from areno.models.families import qwen
from areno.models.folder import RawConfig


def read_qwen3_moe(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Qwen3-MoE model.

    A layer has experts if its index + 1 is a multiple of `decoder_sparse_step` and `mlp_only_layers` does not list it.
    """
    config = read_decoder(raw, "qwen3_moe", may_bias=True)
    step = raw.get("decoder_sparse_step", int, 1, ge=1)
    if raw.get("use_sliding_window", bool, False):
        raw.add_unsupported("use_sliding_window", "false, since sliding-window attention is not implemented")
    plain = _layer_indices(raw, "mlp_only_layers", config.num_layers)
    plain |= {index for index in range(config.num_layers) if (index + 1) % step}
    if len(plain) == config.num_layers:
        raw.add_problem("mlp_only_layers and decoder_sparse_step leave no layer with experts; expected at least one")
    experts = read_experts(
        raw,
        ("num_experts", "num_local_experts"),  # transformers 5 writes the second
        inner_size=raw.get("moe_intermediate_size", int, ge=1),
        normalised=raw.get("norm_topk_prob", bool, False),
        dense_layers=frozenset(plain),
    )
    return replace(config, qk_norm=True, experts=experts)


def read_mixtral(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Mixtral model. `intermediate_size` is the inner size of an expert."""
    config = read_decoder(raw, "mixtral")
    if raw.get("sliding_window", int, -1, ge=0) >= 0:
        raw.add_unsupported("sliding_window", "null, since sliding-window attention is not implemented")
    if raw.get("router_jitter_noise", float, 0.0):
        raw.add_unsupported("router_jitter_noise", "0, since the router has no noise")
    sections = raw.values, raw.values.get("rope_parameters"), raw.values.get("rope_scaling")
    if not any(isinstance(section, dict) and section.get("rope_theta") for section in sections):
        raw.add_problem(
            "rope_theta is missing, expected the base of the rotary frequencies (Mixtral's own is 1000000.0)"
        )
    experts = read_experts(
        raw, ("num_local_experts", "num_experts"), inner_size=config.intermediate_size, normalised=True
    )
    return replace(config, experts=experts)


def read_qwen3_5_moe(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a Qwen3.5-MoE model. It has no field for the inner size of a plain MLP."""
    inner_size = raw.get("moe_intermediate_size", int, 512, ge=1)
    raw.set_defaults(intermediate_size=inner_size, num_experts=256, num_experts_per_tok=8)
    config = qwen.read_qwen3_5(raw, "qwen3_5_moe_text")
    experts = read_experts(
        raw,
        ("num_experts", "num_local_experts"),
        inner_size=inner_size,
        normalised=True,
        shared_size=raw.get("shared_expert_intermediate_size", int, 512, ge=1),
        shared_gated=True,
    )
    return replace(config, experts=experts)


def read_glm4_moe(raw: RawConfig) -> TransformerConfig:
    """Read the shape of a GLM-4.5, 4.6 or 4.7 model. `attention_bias` sets the biases of q, k and v."""
    raw.set_defaults(rms_norm_eps=1e-5, num_key_value_heads=8, n_routed_experts=128, num_experts_per_tok=8)
    config = read_decoder(raw, "glm4_moe", partial_rotary=0.5)
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(name, str, only) != only:
            raw.add_unsupported(name, repr(only))
    n_dense = raw.get("first_k_dense_replace", int, 1, ge=0)
    inner_size = raw.get("moe_intermediate_size", int, 1408, ge=1)
    if n_dense >= config.num_layers:
        raw.add_unsupported("first_k_dense_replace", f"fewer than num_hidden_layers={config.num_layers}")
    n_problems = len(raw.problems)
    experts = read_experts(
        raw,
        ("n_routed_experts", "num_local_experts"),
        inner_size=inner_size,
        normalised=raw.get("norm_topk_prob", bool, True),
        sigmoid=True,
        n_groups=raw.get("n_group", int, 1, ge=1),
        top_groups=raw.get("topk_group", int, 1, ge=1),
        scale=raw.get("routed_scaling_factor", float, 1.0),
        shared_size=inner_size * raw.get("n_shared_experts", int, 1, ge=0),
        shared_field="moe_intermediate_size",
        dense_layers=frozenset(range(min(n_dense, config.num_layers))),
    )
    if len(raw.problems) == n_problems:
        _check_groups(raw, experts)
    return replace(
        config,
        qkv_bias=raw.get("attention_bias", bool, False),
        qk_norm=raw.get("use_qk_norm", bool, False),
        experts=experts,
        unread_layers=raw.get("num_nextn_predict_layers", int, raw.get("num_mtp_layers", int, 1, ge=0), ge=0),
    )


def _check_groups(raw: RawConfig, experts: MoEConfig) -> None:
    """Add a problem unless each group has at least two experts, and those of a token's groups are enough for it."""
    size, rest = divmod(experts.n_experts, experts.n_groups)
    if rest or (size < 2 and experts.n_experts > 1):
        raw.add_unsupported(
            "n_group", f"a divisor of {experts.field}={experts.n_experts} that leaves at least two in each group"
        )
    elif experts.top_groups > experts.n_groups or experts.top_k > experts.top_groups * size:
        text = f"at most n_group={experts.n_groups}, and enough groups of {size} experts for num_experts_per_tok"
        raw.add_unsupported("topk_group", f"{text}={experts.top_k}")


def read_experts(raw: RawConfig, fields: tuple[str, str], **more: Any) -> MoEConfig:
    """Read the experts. `fields`: two possible names of the number of experts. `more`: other fields of `MoEConfig`."""
    given = [field for field in fields if raw.values.get(field) is not None] or [fields[0]]
    n_problems = len(raw.problems)
    n_experts = raw.get(given[0], int, ge=1, le=2**15 - 1)
    is_valid = len(raw.problems) == n_problems
    if len(given) == 2 and raw.get(given[1], int, ge=1) != n_experts:
        raw.add_problem(f"{given[1]} is {raw.values[given[1]]}, and {given[0]} is {n_experts}; expected one number")
    top_k = raw.get("num_experts_per_tok", int, ge=1)
    if top_k > n_experts and is_valid:
        raw.add_unsupported("num_experts_per_tok", f"at most {given[0]}={n_experts}")
    return MoEConfig(n_experts=n_experts, top_k=top_k, field=given[0], **more)


def _layer_indices(raw: RawConfig, field: str, num_layers: int) -> set[int]:
    """Return the layer indices in a field. If one of them does not exist, add a problem and return an empty set."""
    listed = raw.get(field, list, [])
    if not all(type(index) is int and 0 <= index < num_layers for index in listed):
        raw.add_unsupported(field, f"numbers of layers, 0 to {num_layers - 1}")
        return set()
    return set(listed)


ROUTER_LOSS = {"router_aux_loss_coef", "output_router_logits"}  # a run has a setting of its own

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=read_qwen3_moe,
    unused=UNUSED_WINDOW | ROUTER_LOSS,
    expert_names={
        "mlp.router": ("mlp.gate",),
        "mlp.experts_gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts_down": ("mlp.experts.{}.down_proj",),
    },
)
QWEN3_5_MOE = replace(
    qwen.QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    has_value_class=False,
    read=read_qwen3_5_moe,
    unused=qwen.UNUSED_QWEN3_5 | ROUTER_LOSS | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
    expert_names={
        **QWEN3_MOE.expert_names,
        "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared.down": ("mlp.shared_expert.down_proj",),
        "mlp.shared_gate": ("mlp.shared_expert_gate",),
    },
    fused_experts={
        "mlp.experts.gate_up_proj": "mlp.experts_gate_up",
        "mlp.experts.down_proj": "mlp.experts_down",
    },
    around="Qwen3_5MoeForConditionalGeneration",
)
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=read_mixtral,
    unused=frozenset(ROUTER_LOSS),
    expert_names={
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.experts_gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts_down": ("block_sparse_moe.experts.{}.w2",),
    },
)
GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    has_value_class=False,
    has_step_class=False,
    read=read_glm4_moe,
    unused=frozenset(ROUTER_LOSS),
    expert_names={
        **QWEN3_MOE.expert_names,
        "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": ("mlp.shared_experts.down_proj",),
    },
    float32=("mlp.gate.e_score_correction_bias",),
)
