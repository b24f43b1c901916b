"""Train by GRPOTrainer of TRL with the settings, the prompts and the rewards of a recipe of areno.

`trl_problems` lists the settings that TRL has no counterpart for, and `trl_settings` converts the others.
`train_with_trl` is the training itself. TRL is imported only there.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from areno.bench.timing import log_progress
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.encode import decode_all
from areno.data.loader import TokenLimit, row_encoder, row_loader
from areno.data.sources import open_rows
from areno.engine.train.learning_rate import learning_rate
from areno.errors import ConfigError, DataError, Problem
from areno.kernels.backend import default_dtype
from areno.models.registry import load_config
from areno.plan.folders import load_tokenizer
from areno.scoring.pool import RewardPool
from areno.scoring.records import record_of_completion
from areno.types import PromptItem

STD_EPS = 1e-4
"""TRL divides rewards by their unbiased standard deviation plus this number, which is no setting of TRL."""

# Settings that must keep their defaults, because GRPOTrainer has no counterpart, or computes something else with it.
_LEFT_OUT = {
    "": ("ref", "dynamic_bs"),
    "actor": (
        *("use_lora", "init_from_scratch", "gradient_accumulation_steps", "router_aux_loss_coef", "routing_replay"),
        *("ppo_n_minibatches", "reward_bias", "reward_scaling", "reward_clip", "overlong_reward_penalty"),
        *("reward_norm", "recompute_logprob", "use_decoupled_loss", "m2_threshold", "kl_ctl", "surrogate", "c_clip"),
    ),
    "actor.adv_norm": ("mean_level", "mean_leave1out"),
    "actor.optimizer": ("type",),
    "agent": ("fn",),
    "reward": ("path",),
    "rollout": ("dynamic_sampling",),
    "gconfig": (
        *("greedy", "min_new_tokens", "frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "ignore_eos"),
        "max_tokens",
    ),
    "tune": ("enabled",),
}
_LOSS_TYPES = {"seq_mean_token_mean": "grpo", "token_mean": "dapo", "seq_mean_token_sum_norm": "dr_grpo"}


@dataclass
class Training:
    """The results of a finished training."""

    model: str  # folder
    rewards: list[float] = field(default_factory=list)  # mean of the samples of each step
    step_s: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)  # seconds of sampling in each step
    rows_at_once: int | None = None  # in a micro-batch; None is chosen for each step
    n_threads: int = 1


def trl_problems(config: PolicyExperimentConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that GRPOTrainer of TRL cannot have."""
    for name, settings in _LEFT_OUT.items():
        section: Any = config
        for part in filter(None, name.split(".")):
            section = vars(section)[part]
        if section is None:
            yield Problem(name, "is null; the comparison with TRL needs this section")
            continue
        for setting in settings:
            if setting in vars(section) and not section.is_default(setting):
                text = "is {}, which GRPOTrainer of TRL does not have or computes in another way; leave it out"
                yield Problem(f"{name}.{setting}".lstrip("."), text, vars(section)[setting])
    actor = config.actor
    if actor.mask_no_eos_with_zero and vars(actor).get("reduction") != "token_mean":
        text = "is true; TRL divides by the number of all rows, so that it needs actor.reduction=token_mean"
        yield Problem("actor.mask_no_eos_with_zero", text)
    if config.valid_dataset is None:
        yield Problem("valid_dataset", "is null; the comparison with TRL measures solve rates on it")


def with_formulas_of_trl(config: PolicyExperimentConfig) -> PolicyExperimentConfig:
    """Return settings with which areno computes advantages as TRL does.

    TRL has no setting for the number that is added to the standard deviation of the rewards, or for the n of its
    variance.
    """
    norm = config.actor.adv_norm
    if norm is None or norm.std_level is None:
        return config
    norm = replace(norm, std_unbiased=True, eps=STD_EPS)
    return replace(config, actor=replace(config.actor, adv_norm=norm))


def trl_settings(config: Any, n_steps: int, rows_at_once: int, device: str) -> dict[str, Any]:
    """Convert settings of areno to those of TRL's GRPOConfig.

    The schedule of the learning rate is not among them, because `train_with_trl` uses areno's own. The master weights
    are in float32 for both libraries. In bfloat16, TRL computes by autocast. `rows_at_once` must divide the rows of a
    step.
    """
    actor, gconfig, optimizer, on_cpu = config.actor, config.gconfig, config.actor.optimizer, device == "cpu"
    dtype = str(default_dtype([device])).removeprefix("torch.") if actor.dtype == "auto" else actor.dtype
    higher = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
    return {
        "max_steps": n_steps,
        "seed": config.seed,
        "shuffle_dataset": False,  # the prompts come in the order in which areno draws them
        "per_device_train_batch_size": rows_at_once,
        "gradient_accumulation_steps": n_rows(config) // rows_at_once,
        "num_generations": gconfig.n_samples,
        "num_iterations": 1,
        "max_completion_length": gconfig.max_new_tokens,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": max(0, gconfig.top_k),
        "min_p": gconfig.min_p or None,
        "repetition_penalty": 1.0,
        "beta": 0.0,
        "epsilon": actor.eps_clip,
        "epsilon_high": higher,
        "importance_sampling_level": actor.ratio_level,
        "loss_type": _LOSS_TYPES[vars(actor).get("reduction", "seq_mean_token_mean")],
        "scale_rewards": actor.adv_norm.std_level or "none",
        "mask_truncated_completions": actor.mask_no_eos_with_zero,
        "learning_rate": optimizer.lr,
        "optim": "adamw_torch_fused",
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.gradient_clipping,
        "gradient_checkpointing": actor.gradient_checkpointing,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": dtype == "bfloat16",
        "fp16": False,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "use_vllm": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def n_rows(config: PolicyExperimentConfig) -> int:
    return config.train_dataset.batch_size * config.gconfig.n_samples


def smaller_divisor(rows: int, rows_at_once: int) -> int | None:
    """Return the largest divisor of `rows` that is at most half of `rows_at_once`, or None."""
    return next((size for size in range(rows_at_once // 2, 0, -1) if rows % size == 0), None)


def prompts_of(config: PolicyExperimentConfig, n_steps: int) -> list[PromptItem]:
    """Return the prompts of a run of areno, in the order in which the run draws them."""
    rows, section = open_rows(config.train_dataset, None, "prompt", "train_dataset")
    tokenizer, thinking = load_tokenizer(_tokenizer_folder(config)), config.rollout.enable_thinking
    encode = row_encoder("prompt", tokenizer, section.changed_turns, thinking=thinking)
    context = TokenLimit(load_config(config.actor.path).max_position_embeddings, "the model's context")
    loader = row_loader("prompt", rows, encode, section, context, seed=config.seed)
    try:
        batches = list(itertools.islice(loader.batches_until_epoch(config.total_train_epochs), n_steps))
    finally:
        loader.close()
    if len(batches) < n_steps or any(len(batch.items) < section.batch_size for batch in batches):
        text = f"is {n_steps}, and {config.total_train_epochs} epochs have {len(batches)} steps; lower it"
        raise ConfigError([Problem("--steps", text)])
    return [item for batch in batches for item in batch.items]


def _tokenizer_folder(config: PolicyExperimentConfig) -> str:
    return config.tokenizer_path or config.actor.path


def train_with_trl(
    config: PolicyExperimentConfig,
    items: Sequence[PromptItem],
    rows_at_once: int,
    device: str,
    n_threads: int,
    folder: Path,
) -> Training | None:
    """Train a model by GRPOTrainer into `folder`/model. None if the device ran out of memory.

    `items` are the prompts of all steps. Small models are fastest with one thread on a CPU.
    """
    n_steps = len(items) // config.train_dataset.batch_size
    if device == "cpu":
        torch.set_num_threads(n_threads)
    try:
        with RewardPool(config.reward, n_devices=1) as pool:
            pool.wait_ready()
            return _train(config, items, trl_settings(config, n_steps, rows_at_once, device), pool, folder)
    except torch.OutOfMemoryError:
        return None


def _train(
    config: PolicyExperimentConfig,
    items: Sequence[PromptItem],
    settings: dict[str, Any],
    pool: RewardPool,
    folder: Path,
) -> Training:
    import trl
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PrinterCallback

    tokenizer = load_tokenizer(_tokenizer_folder(config))
    _check_tokens(tokenizer, items)
    n_steps = settings["max_steps"]
    schedule = replace(config.actor.optimizer, lr_decay_steps=config.actor.optimizer.lr_decay_steps or n_steps)

    class Trainer(trl.GRPOTrainer):
        """GRPOTrainer with areno's schedule, because those of transformers warm up from a rate of 0."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            share = lambda step: learning_rate(schedule, step) / (schedule.lr or 1.0)  # noqa: E731
            mine: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(mine, share)
            return self.lr_scheduler

    found = Training(str(folder / "model"), rows_at_once=settings["per_device_train_batch_size"])
    trainer = Trainer(
        model=config.actor.path,
        processing_class=tokenizer,
        reward_funcs=_reward_fn(config, items, pool),
        args=trl.GRPOConfig(output_dir=str(folder), **settings),
        train_dataset=Dataset.from_list([{"prompt": item.text, "place": place} for place, item in enumerate(items)]),
    )
    trainer.remove_callback(PrinterCallback)
    model: Any = trainer.model
    generation = model.generate = _Stopwatch(model.generate)
    trainer.add_callback(_step_callback(found, generation, n_steps))
    trainer.train()
    trainer.save_model(found.model)
    return found


def _check_tokens(tokenizer: Any, items: Sequence[PromptItem]) -> None:
    """Raise DataError if TRL, which encodes texts itself, would not get the token ids of areno."""
    for item in items:
        if tokenizer(text=item.text)["input_ids"] != item.tokens:
            raise DataError("TRL would encode the prompt of row {} in another way than areno", item.index)


def _reward_fn(config: PolicyExperimentConfig, items: Sequence[PromptItem], pool: RewardPool) -> Callable[..., Any]:
    tokenizer, skips = load_tokenizer(_tokenizer_folder(config)), config.gconfig.skip_special_tokens

    def reward(completion_ids: list[list[int]], place: list[int], trainer_state: Any, **_: Any) -> list[float]:
        texts = rendered = decode_all(tokenizer, completion_ids, skip_special_tokens=False)
        if skips:
            texts = decode_all(tokenizer, completion_ids, skip_special_tokens=True)
        records = [
            record_of_completion(items[at], tokens, [0.0] * len(tokens), text, raw, trainer_state.global_step + 1)
            for at, tokens, text, raw in zip(place, completion_ids, texts, rendered, strict=True)
        ]
        outcomes = pool.score(records)
        return [math.nan if outcome.value is None else outcome.value for outcome in outcomes]

    return reward


class _Stopwatch:
    """Calls a function, and adds up the seconds of all calls, each until the device has finished."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = self._function(*args, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        return found


def _step_callback(found: Training, generation: _Stopwatch, n_steps: int) -> Any:
    """Return a callback of transformers that adds the reward and the seconds of each step to `found`."""
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        """Measures each step from the end of the step before it. A step ends when its metrics are logged."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._end, self._generated = time.perf_counter(), generation.seconds

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            if logs is None or "reward" not in logs:  # the summary at the end
                return
            now = time.perf_counter()
            found.rewards.append(logs["reward"])
            found.step_s.append(now - self._end)
            found.rollout_s.append(generation.seconds - self._generated)
            self._end, self._generated = now, generation.seconds
            told = f"reward {found.rewards[-1]:.3f}, {found.step_s[-1]:.2f} s"
            log_progress(f"trl: step {len(found.rewards)}/{n_steps}, {told}")

    return StepTimer()
