"""Fields of `config.json` that nothing reads because they have no effect on what a model computes, by family."""

from __future__ import annotations

_NAMES = "architectures model_type transformers_version name_or_path model_name torch_dtype dtype tokenizer_class"
_TOKENS = "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id bos_token eos_token pad_token unk_token"
_LABELS = "id2label label2id num_labels problem_type finetuning_task task_specific_params"
_HOW_IT_RUNS = (
    "use_cache cache_implementation return_dict output_attentions output_hidden_states torchscript is_decoder "
    "gradient_checkpointing attn_implementation use_flash_attention use_flash_attn use_flashattn"
)
_LENGTHS = "model_max_length tokenizer_model_max_length max_sequence_length max_seq_length seq_length"
_SAMPLING = (  # older versions of transformers kept them here
    "max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences"
)
_TOOLS = "unsloth_fixed unsloth_version is_llama_config transformers.js_config tokenizer_padding_side padding_side"
_EVERYWHERE = frozenset(" ".join((_NAMES, _TOKENS, _LABELS, _HOW_IT_RUNS, _LENGTHS, _SAMPLING, _TOOLS)).split())
_UNUSED_WINDOW = {"sliding_window", "max_window_layers"}  # without use_sliding_window
_MORE_TOKENS_AT_ONCE = {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}  # layers that nothing reads
_ROUTER_LOSS = {"router_aux_loss_coef", "output_router_logits"}  # a run has a setting of its own

HARMLESS: dict[str, frozenset[str]] = {
    "gemma3_text": _EVERYWHERE,
    "glm4": _EVERYWHERE,
    "llama": _EVERYWHERE | {"pretraining_tp"},
    "mistral": _EVERYWHERE,
    "olmo2": _EVERYWHERE,
    "olmo3": _EVERYWHERE,
    "phi3": _EVERYWHERE | {"attention_bias"},  # there is none
    "qwen2": _EVERYWHERE | _UNUSED_WINDOW | {"attention_bias"},  # q, k and v have a bias whatever it says
    "qwen3": _EVERYWHERE | _UNUSED_WINDOW,
    "qwen3_5_text": _EVERYWHERE | _MORE_TOKENS_AT_ONCE | {"mamba_ssm_dtype"},  # states are float32 here, always
    "qwen3_moe": _EVERYWHERE | _UNUSED_WINDOW | _ROUTER_LOSS,
    "mixtral": _EVERYWHERE | _ROUTER_LOSS,
    "smollm3": _EVERYWHERE | _UNUSED_WINDOW | {"pretraining_tp"},
}
HARMLESS_IN_ROPE = frozenset({"original_max_position_embeddings", "finetuned"})
