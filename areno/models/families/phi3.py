"""Phi-3 and Phi-4 as text: Llama's layers with other names, of whose heads only a part may be rotated.

With `longrope`, which the versions for long contexts have, the context ends where the first training's did.
"""

from __future__ import annotations

from areno.models.config import Family, TransformerConfig, read_decoder
from areno.models.families.mistral import with_window
from areno.models.folder.raw_config import RawConfig


def read(raw: RawConfig) -> TransformerConfig:
    """`sliding_window` is that of all layers."""
    raw.assume(rms_norm_eps=1e-5)
    config = read_decoder(raw, "phi3", partial_rotary=1.0, may_slide=True)
    for name in ("resid_pdrop", "embd_pdrop"):
        if raw.get(name, float, 0.0):
            raw.refuse(name, "0, since there is no dropout")
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's own code; transformers knows neither
        if raw.get(name, int, 1, ge=0) != 1:
            raw.refuse(name, "1")
    return with_window(raw, config)


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    read,
    stacked={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
