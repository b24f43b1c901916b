"""Architectures that people ask for and that do not run here, each with what it would need."""

from __future__ import annotations

_TEXT_ONLY = "images beside text; only text models run"
_LATENT = "multi-head latent attention, and experts with its routing"

MISSING: dict[str, str] = {
    "CohereForCausalLM": "LayerNorm, and attention and MLP side by side",
    "Cohere2ForCausalLM": "LayerNorm, and attention and MLP side by side",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma2ForCausalLM": "soft caps on attention scores and logits",
    "Gemma3nForConditionalGeneration": _TEXT_ONLY,
    "GemmaForCausalLM": "norms that multiply by 1 + weight in Llama's places; Gemma 3 runs",
    "GlmForCausalLM": "GLM-4 of 2024 without norms behind attention and MLP; glm4 (0414) runs",
    "GptOssForCausalLM": "attention sinks, and experts with biases",
    "GraniteForCausalLM": "multipliers of embeddings, attention, residuals and logits",
    "Llama4ForConditionalGeneration": _TEXT_ONLY,
    "MinistralForCausalLM": "layers with and without a window beside Mistral's names",
    "Mistral3ForConditionalGeneration": _TEXT_ONLY,
    "OlmoForCausalLM": "LayerNorm without weights",
    "Phi4MultimodalForCausalLM": _TEXT_ONLY,
    "PhiForCausalLM": "LayerNorm, and attention and MLP side by side",
    "Starcoder2ForCausalLM": "LayerNorm, and an MLP without a gate",
}
