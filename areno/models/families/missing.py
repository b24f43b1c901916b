"""Architectures that people ask for and that do not run here, each with what it would need."""

from __future__ import annotations

_TEXT_ONLY = "images beside text; only text models run"
_SHARED = "a shared expert beside those that a router chooses"
_DELTA_EXPERTS = "experts, one of them shared, in layers with the gated delta rule; the dense Qwen3.5 runs"
_LATENT = "multi-head latent attention, and experts with its routing"

MISSING: dict[str, str] = {
    "CohereForCausalLM": "LayerNorm, and attention and MLP side by side",
    "Cohere2ForCausalLM": "LayerNorm, and attention and MLP side by side",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma2ForCausalLM": "soft caps on attention scores and logits",
    "Gemma3nForConditionalGeneration": _TEXT_ONLY,
    "GemmaForCausalLM": "norms that multiply by 1 + weight in Llama's places; Gemma 3 runs",
    "Glm4MoeForCausalLM": "a router of sigmoids with a bias, and shared experts",
    "GlmForCausalLM": "GLM-4 of 2024 without norms behind attention and MLP; glm4 (0414) runs",
    "GPT2LMHeadModel": "LayerNorm, and positions that are learned",
    "GPTNeoXForCausalLM": "LayerNorm, and attention and MLP side by side",
    "GptOssForCausalLM": "attention sinks, and experts with biases",
    "GraniteForCausalLM": "multipliers of embeddings, attention, residuals and logits",
    "Lfm2ForCausalLM": "short convolutions in the place of attention",
    "Llama4ForConditionalGeneration": _TEXT_ONLY,
    "MinistralForCausalLM": "layers with and without a window beside Mistral's names",
    "Mistral3ForConditionalGeneration": _TEXT_ONLY,
    "NemotronHForCausalLM": "Mamba layers",
    "OlmoForCausalLM": "LayerNorm without weights",
    "OlmoeForCausalLM": "one norm over all queries and one over all keys, beside experts",
    "Phi4MultimodalForCausalLM": _TEXT_ONLY,
    "PhiForCausalLM": "LayerNorm, and attention and MLP side by side",
    "PhimoeForCausalLM": "LayerNorm, and a router that masks with noise",
    "Qwen2MoeForCausalLM": _SHARED,
    "Qwen2VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen2_5_VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen3NextForCausalLM": _DELTA_EXPERTS,
    "Qwen3VLForConditionalGeneration": _TEXT_ONLY,
    "Qwen3VLMoeForConditionalGeneration": _TEXT_ONLY,
    "Qwen3_5MoeForCausalLM": _DELTA_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_EXPERTS,
    "Starcoder2ForCausalLM": "LayerNorm, and an MLP without a gate",
}
