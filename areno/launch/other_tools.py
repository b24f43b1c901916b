"""The names that TRL, transformers, verl and AReaL have for our settings. The pages of docs/coming_from say the same.

A name is written as in the other tool: plain for the arguments of TRL and transformers, dotted for the files of verl
and AReaL. If a name has several settings, hints show those that the algorithm has.
"""

from __future__ import annotations

from areno.config.fp8 import FP8ModelConfig
from areno.config.lora import LoraConfig
from areno.schema.fields import settings

_BATCH = ("train_dataset.batch_size", "actor.mb_spec.mini_bs")
_DUAL_CLIP, _ADAM = ("actor.c_clip",), "actor.optimizer"
_KL = ("actor.kl_ctl",)

_OF_TRAINERS = {
    "adam_beta1": (f"{_ADAM}.beta1",),
    "adam_beta2": (f"{_ADAM}.beta2",),
    "adam_epsilon": (f"{_ADAM}.eps",),
    "attn_implementation": ("engine.attn_backend",),
    "beta": ("actor.beta", *_KL),
    "bf16": ("actor.dtype",),
    "chat_template_kwargs": ("rollout.enable_thinking",),
    "dataset_name": ("train_dataset.path",),
    "delta": _DUAL_CLIP,
    "do_sample": ("gconfig.greedy",),
    "entropy_coef": ("actor.entropy_bonus",),
    "epsilon": ("actor.eps_clip",),
    "epsilon_high": ("actor.eps_clip_higher",),
    "eval_on_start": ("evaluator.eval_before_train",),
    "eval_steps": ("evaluator.freq_steps",),
    "eval_strategy": ("evaluator.freq_steps", "evaluator.freq_epochs"),
    "fp16": ("actor.dtype",),
    "generation_batch_size": ("actor.ppo_n_minibatches",),
    "gradient_accumulation_steps": (*_BATCH, "actor.gradient_accumulation_steps"),
    "gradient_checkpointing": ("actor.gradient_checkpointing",),
    "hub_model_id": ("saver.push_to_hub",),
    "importance_sampling_level": ("actor.importance_sampling_level",),
    "label_smoothing": ("actor.label_smoothing",),
    "learning_rate": (f"{_ADAM}.lr",),
    "load_best_model_at_end": ("saver.best_metric",),
    "log_completions": ("rollout.dump_n_samples",),
    "loss_type": ("actor.loss_type", "actor.reduction"),
    "lr_scheduler_type": (f"{_ADAM}.lr_scheduler_type", f"{_ADAM}.min_lr_ratio"),
    "mask_truncated_completions": ("actor.mask_no_eos_with_zero",),
    "max_completion_length": ("gconfig.max_new_tokens",),
    "max_grad_norm": (f"{_ADAM}.gradient_clipping",),
    "max_length": ("train_dataset.max_length",),
    "max_new_tokens": ("gconfig.max_new_tokens",),
    "max_prompt_length": ("train_dataset.max_length",),
    "max_seq_length": ("train_dataset.max_length",),
    "max_steps": ("total_train_steps",),
    "metric_for_best_model": ("saver.best_metric",),
    "min_p": ("gconfig.min_p",),
    "model_name_or_path": ("actor.path",),
    "num_generations": ("gconfig.n_samples",),
    "num_generations_eval": ("eval_gconfig",),
    "num_return_sequences": ("gconfig.n_samples",),
    "num_train_epochs": ("total_train_epochs",),
    "optim": (f"{_ADAM}.type",),
    "output_dir": ("cluster.fileroot",),
    "per_device_eval_batch_size": ("valid_dataset.batch_size",),
    "per_device_train_batch_size": _BATCH,
    "push_to_hub": ("saver.push_to_hub",),
    "repetition_penalty": ("gconfig.frequency_penalty", "gconfig.presence_penalty"),
    "report_to": ("stats_logger.wandb.mode", "stats_logger.trackio.mode"),
    "resume_from_checkpoint": ("recover.mode",),
    "reward_fn": ("reward.fn",),
    "reward_funcs": ("reward.fn",),
    "reward_weights": ("reward.weights",),
    "multi_objective_aggregation": ("reward.weights",),
    "run_name": ("trial_name",),
    "sapo_temperature_neg": ("actor.sapo_tau_neg",),
    "sapo_temperature_pos": ("actor.sapo_tau_pos",),
    "save_steps": ("saver.freq_steps",),
    "save_total_limit": ("saver.keep",),
    "scale_rewards": ("actor.adv_norm.std_level",),
    "should_accept_fn": ("rollout.dynamic_sampling",),
    "shuffle_dataset": ("train_dataset.shuffle",),
    "steps_per_generation": ("actor.ppo_n_minibatches",),
    "temperature": ("gconfig.temperature",),
    "top_k": ("gconfig.top_k",),
    "top_p": ("gconfig.top_p",),
    "top_entropy_quantile": ("actor.token_selection",),
    "torch_dtype": ("actor.dtype",),
    "truncation_mode": ("train_dataset.max_length",),
    "use_adaptive_entropy": ("actor.entropy_bonus",),
    "vllm_gpu_memory_utilization": ("rollout.mem_fraction",),
    "vllm_importance_sampling_correction": ("actor.use_decoupled_loss",),
    "vllm_tensor_parallel_size": ("engine.tp_size",),
    "warmup_ratio": (f"{_ADAM}.warmup_steps_proportion",),
    "warmup_steps": (f"{_ADAM}.warmup_steps_proportion",),
    "weight_decay": (f"{_ADAM}.weight_decay",),
}

_OF_VERL = {
    "actor.clip_ratio": ("actor.eps_clip",),
    "actor.clip_ratio_c": _DUAL_CLIP,
    "actor.clip_ratio_high": ("actor.eps_clip_higher",),
    "actor.clip_ratio_low": ("actor.eps_clip",),
    "actor.entropy_coeff": ("actor.entropy_bonus",),
    "actor.fsdp_config.optimizer_offload": ("actor.offload",),
    "actor.grad_clip": (f"{_ADAM}.gradient_clipping",),
    "actor.kl_loss_coef": _KL,
    "actor.kl_loss_type": ("actor.kl_estimator",),
    "actor.loss_agg_mode": ("actor.reduction",),
    "actor.optim.betas": (f"{_ADAM}.beta1", f"{_ADAM}.beta2"),
    "actor.optim.lr": (f"{_ADAM}.lr",),
    "actor.optim.lr_scheduler_type": (f"{_ADAM}.lr_scheduler_type",),
    "actor.optim.lr_warmup_steps": (f"{_ADAM}.warmup_steps_proportion",),
    "actor.optim.lr_warmup_steps_ratio": (f"{_ADAM}.warmup_steps_proportion",),
    "actor.optim.min_lr_ratio": (f"{_ADAM}.min_lr_ratio",),
    "actor.optim.weight_decay": (f"{_ADAM}.weight_decay",),
    "actor.ppo_max_token_len_per_gpu": ("actor.mb_spec.max_tokens_per_mb",),
    "actor.ppo_micro_batch_size_per_gpu": ("actor.mb_spec.mini_bs",),
    "actor.ppo_mini_batch_size": ("actor.ppo_n_minibatches",),
    "actor.use_dynamic_bsz": ("actor.mb_spec.max_tokens_per_mb",),
    "actor.use_kl_loss": _KL,
    "algorithm.filter_groups.enable": ("rollout.dynamic_sampling",),
    "algorithm.filter_groups.max_num_gen_batches": ("rollout.max_sampling_rounds",),
    "algorithm.gamma": ("actor.discount",),
    "algorithm.kl_ctrl.kl_coef": (*_KL, "actor.use_kl_in_reward"),
    "algorithm.lam": ("actor.gae_lambda",),
    "algorithm.norm_adv_by_std_in_grpo": ("actor.adv_norm.std_level",),
    "algorithm.rollout_correction.bypass_mode": ("actor.recompute_logprob",),
    "algorithm.rollout_correction.rollout_is": ("actor.use_decoupled_loss",),
    "algorithm.rollout_correction.rollout_is_threshold": ("actor.use_decoupled_loss",),
    "algorithm.rollout_correction.rollout_rs": ("actor.rejection_sampling",),
    "algorithm.use_kl_in_reward": ("actor.use_kl_in_reward",),
    "critic.cliprange_value": ("critic.eps_clip",),
    "critic.model.path": ("critic.path",),
    "critic.optim.lr": ("critic.optimizer.lr",),
    "critic.ppo_mini_batch_size": ("critic.ppo_n_minibatches",),
    "data.apply_chat_template_kwargs": ("rollout.enable_thinking",),
    "data.custom_cls.path": ("train_dataset.loader",),
    "data.max_prompt_length": ("train_dataset.max_length",),
    "data.max_response_length": ("gconfig.max_new_tokens",),
    "data.prompt_key": ("train_dataset.columns.prompt",),
    "data.seed": ("seed",),
    "data.shuffle": ("train_dataset.shuffle",),
    "data.train_batch_size": ("train_dataset.batch_size",),
    "data.train_files": ("train_dataset.path",),
    "data.val_batch_size": ("valid_dataset.batch_size",),
    "data.val_files": ("valid_dataset.path",),
    "model.enable_gradient_checkpointing": ("actor.gradient_checkpointing",),
    "model.path": ("actor.path",),
    "ref.fsdp_config.param_offload": ("ref.offload",),
    "reward.custom_reward_function.name": ("reward.fn",),
    "reward.custom_reward_function.path": ("reward.fn",),
    "reward.num_workers": ("reward.workers",),
    "reward.reward_model.enable": ("reward.path",),
    "reward.reward_model.model_path": ("reward.path",),
    "rollout.enforce_eager": ("rollout.eager_decode",),
    "rollout.free_cache_engine": ("rollout.drop_rollout_state",),
    "rollout.gpu_memory_utilization": ("rollout.mem_fraction",),
    "rollout.ignore_eos": ("gconfig.ignore_eos",),
    "rollout.max_num_batched_tokens": ("rollout.max_prefill_tokens",),
    "rollout.max_num_seqs": ("rollout.max_concurrent_rollouts",),
    "rollout.n": ("gconfig.n_samples",),
    "rollout.temperature": ("gconfig.temperature",),
    "rollout.tensor_model_parallel_size": ("engine.tp_size",),
    "rollout.top_k": ("gconfig.top_k",),
    "rollout.top_p": ("gconfig.top_p",),
    "rollout.val_kwargs.n": ("eval_gconfig",),
    "rollout.val_kwargs.temperature": ("eval_gconfig",),
    "trainer.critic_warmup": ("critic.warmup_steps",),
    "trainer.default_local_dir": ("cluster.fileroot", "saver.path"),
    "trainer.experiment_name": ("trial_name",),
    "trainer.logger": ("stats_logger.console", "stats_logger.wandb.mode"),
    "trainer.max_actor_ckpt_to_keep": ("saver.keep",),
    "trainer.n_gpus_per_node": ("cluster.n_gpus_per_node",),
    "trainer.nnodes": ("cluster.n_nodes",),
    "trainer.project_name": ("experiment_name",),
    "trainer.resume_mode": ("recover.mode",),
    "trainer.rollout_data_dir": ("rollout.dump_to_file",),
    "trainer.save_freq": ("saver.freq_steps",),
    "trainer.test_freq": ("evaluator.freq_steps",),
    "trainer.total_epochs": ("total_train_epochs",),
    "trainer.total_training_steps": ("total_train_steps",),
    "trainer.val_before_train": ("evaluator.eval_before_train",),
}

_OF_SGLANG = {
    "attention_backend": ("engine.attn_backend",),
    "chunked_prefill_size": ("rollout.max_prefill_tokens",),
    "context_length": ("gconfig.max_tokens",),
    "disable_cuda_graph": ("rollout.eager_decode",),
    "dtype": ("actor.dtype",),
    "enable_lora": ("actor.use_lora",),
    "enable_memory_saver": ("rollout.drop_rollout_state",),
    "enable_return_routed_experts": ("actor.routing_replay",),
    "kv_cache_dtype": ("rollout.kv_cache_dtype",),
    "log_level": ("stats_logger.console",),
    "max_lora_rank": ("actor.lora_rank",),
    "max_prefill_tokens": ("rollout.max_prefill_tokens",),
    "max_running_requests": ("rollout.max_concurrent_rollouts",),
    "mem_fraction_static": ("rollout.mem_fraction",),
    "model_path": ("actor.path",),
    "random_seed": ("seed",),
}
_OF_VLLM = {
    "dtype": ("actor.dtype",),
    "enable_lora": ("actor.use_lora",),
    "kv_cache_dtype": ("rollout.kv_cache_dtype",),
    "enable_sleep_mode": ("rollout.drop_rollout_state",),
    "enforce_eager": ("rollout.eager_decode",),
    "gpu_memory_utilization": ("rollout.mem_fraction",),
    "max_lora_rank": ("actor.lora_rank",),
    "max_model_len": ("gconfig.max_tokens",),
    "max_num_seqs": ("rollout.max_concurrent_rollouts",),
    "model": ("actor.path",),
    "seed": ("seed",),
}
_OF_POLICY = {*settings(FP8ModelConfig), *settings(LoraConfig)}


def is_of_any_model(name: str) -> bool:
    """Return whether a setting in a model's section is not one of FP8 or adapters, which a critic has not."""
    return _OF_POLICY.isdisjoint(name.split("."))


_ENDS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_OF_BACKENDS = {
    **{
        f"{engine}.fp8_config.{name}": (f"actor.fp8_config.{name}",)
        for engine, names in (("archon", ("mode", "exclude_modules")), ("megatron", ("mode", "wgrad", *_ENDS)))
        for name in names
    },
    **dict.fromkeys(("fsdp.offload_params", "archon.offload_params", "fsdp.per_layer_optim_step"), ("actor.offload",)),
    **dict.fromkeys(
        ("archon.ac_mode", "megatron.recompute_granularity", "megatron.recompute_method", "megatron.recompute_modules"),
        ("actor.gradient_checkpointing",),
    ),
    **dict.fromkeys(
        ("archon.use_deterministic_algorithms", "megatron.use_deterministic_algorithms"), ("engine.deterministic",)
    ),
    "archon.attn_type": ("engine.attn_backend",),
    "megatron.async_save": ("saver.mode",),
    "megatron.ddp.use_distributed_optimizer": ("engine.zero_stage",),
    "megatron.exp_avg_dtype": (f"{_ADAM}.type",),
    "megatron.exp_avg_sq_dtype": (f"{_ADAM}.type",),
}
_OF_AREAL = {
    "behave_imp_weight_cap": ("actor.rejection_sampling.upper",),
    "behave_imp_weight_mode": ("actor.rejection_sampling.action", "actor.rejection_sampling.metric"),
    "max_new_tokens": ("gconfig.max_new_tokens",),
    "temperature": ("gconfig.temperature",),
    "adv_norm.group_size": ("gconfig.n_samples",),
    "reward_norm.group_size": ("gconfig.n_samples",),
    **_OF_BACKENDS,
}

COUNTERPARTS: dict[str, tuple[str, ...]] = {
    **_OF_TRAINERS,
    **_OF_VERL,
    **{f"sglang.{name}": ours for name, ours in _OF_SGLANG.items()},
    **{f"vllm.{name}": ours for name, ours in _OF_VLLM.items()},
    **{
        f"{section}.{name}": ours
        for section in ("actor", "ref", "critic")
        for name, ours in _OF_AREAL.items()
        if section != "critic" or is_of_any_model(name)
    },
    "agent.agent_cls_path": ("agent.fn",),
    "agent.engine_max_tokens": ("gconfig.max_tokens",),
    "agent.subproc_max_workers": ("agent.workers",),
    "session_tracer": ("perf_tracer.session_tracer",),
    "rollout.consumer_batch_size": ("train_dataset.batch_size",),
    "rollout.tokenizer_path": ("tokenizer_path",),
    "rollout.return_routed_experts": ("actor.routing_replay",),
}
"""Name in another tool -> our settings. verl's prefix `actor_rollout_ref.` is left out."""

_IN_ALL = {"experiment_name": "experiment_name", "trial_name": "trial_name", "fileroot": "cluster.fileroot"}
_SECTIONS = ("actor", "ref", "critic", "rollout", "saver", "evaluator", "recover", "stats_logger", "perf_tracer")

EQUAL = {
    **{name: ours[0] for name, ours in COUNTERPARTS.items() if len(ours) == 1 and "." in name},
    **{f"{section}.{name}": ours for section in _SECTIONS for name, ours in _IN_ALL.items()},
    **{
        f"ref.{name}": f"actor.{name}"
        for name in ("dtype", "mb_spec", "gradient_checkpointing", "backend", "enable_tree_training")
    },
    "critic.dtype": "actor.dtype",
}
"""Name in another tool -> our setting. If both have the same value, the name can be ignored."""

HOLDS: dict[str, tuple[object, ...]] = {
    **{
        f"{section}.{name}": values
        for section in ("actor", "ref", "critic")
        for name, values in {
            "disable_dropout": (True,),
            "grad_reduce_dtype": ("float32",),
            "optimizer_dtype": ("float32",),
            "_version": ("v1", "v2"),
            "weight_update_mode": ("xccl", "disk"),
            "mb_spec.n_mbs": (1,),
            "mb_spec.n_mbs_divisor": (1,),
            "mb_spec.granularity": (1,),
            "mb_spec.packing_algorithm": ("ffd",),
            "optimizer": (None,),
        }.items()
    },
    **dict.fromkeys(("actor.reward_norm.group_size", "actor.adv_norm.group_size"), (1,)),
    **{
        f"actor.{section}.{name}": (False,)
        for section in ("fp8_config", "archon.fp8_config", "megatron.fp8_config")
        for name in ("include_experts", "param", "dot_product_attention", "multi_head_attention")
    },
    "actor.importance_sampling_level": ("sequence",),  # of gspo, which has no such setting
    "agent.chat_template_type": ("concat",),
    "critic.fp8_config.mode": ("disabled",),
    "critic.is_critic": (True,),
    "rollout._version": ("v1", "v2"),
    "rollout.check_trajectory_format": (True,),
    "rollout.consumer_batch_size": (1,),
    "sglang.skip_tokenizer_init": (True,),
    "vllm.skip_tokenizer_init": (True,),
}
"""Name in another tool -> values that are always true of areno, so that the name can be ignored."""

PARTS = {
    *(f"{section}.{name}" for section in _SECTIONS[:4] for name in ("scheduling_spec", "scheduling_strategy")),
    *(f"{section}.{name}" for section in _SECTIONS[:4] for name in ("setup_timeout", "workers_ready_timeout")),
    *(f"{section}.{name}" for section in _SECTIONS[:4] for name in ("admin_api_key", "request_timeout", "log_level")),
    *(f"{section}.{name}" for section in ("train_dataset", "valid_dataset") for name in ("num_workers", "pin_memory")),
    *(f"{section}.{name}" for section in ("train_dataset", "valid_dataset") for name in ("scheduling_spec", "type")),
    "agent.scheduling_spec",
    *("cluster.name_resolve", "cluster.cluster_name", "launcher", "scheduler.endpoint", "scheduler.deploy_mode"),
    *("rollout.request_retries", "rollout.pause_grace_period", "rollout.lora_name", "gconfig.lora_name"),
    *("eval_gconfig.lora_name", "train_dataset.num_dataset_workers", "valid_dataset.num_dataset_workers"),
}
"""Settings of servers, processes and loaders that areno does not have. They change no result and are ignored."""
