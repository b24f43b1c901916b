"""Settings of the models: the actor with its optimizer, adapters and micro-batches, the reference and the critic.

Imports no torch. Settings that only some policy algorithms have are elsewhere: the importance ratio in
`areno.config.ratio`, the settings of a loss beside its formula in `areno.loss_fns` or in the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, forbid, setting

OptimizerType = Literal["adam", "adam_8bit", "sgd"]
ALL_LINEAR = "all-linear"
FROM_FOLDER = ("lora_rank", "lora_alpha", "target_modules", "use_rslora")
"""Settings that are read from the folder init_lora_from."""
_ADAPTERS = Needs("use_lora", so="there are no adapters")
_MOMENTS = Needs("type", "adam", "adam_8bit", so="there are no moments")


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW or SGD with fp32 master weights. Norm weights and biases have no weight decay."""

    type: OptimizerType = setting(
        "adam",
        help="adam is AdamW with fp32 moments, 8 bytes per parameter. adam_8bit keeps them in blocks of 8-bit codes, 2 "
        "bytes. sgd is SGD without momentum, which keeps none",
        flag="--adam-8bit=adam_8bit",
    )
    lr: float = setting(1e-6, help="Peak learning rate. 0 leaves the weights as they are", ge=0, flag="--lr")
    min_lr_ratio: float = setting(
        0.1,
        help="Learning rate at the end of the decay, as a fraction of lr",
        ge=0,
        le=1,
        only_with=Needs("lr_scheduler_type", "linear", "cosine", so="lr does not decay"),
        flag="--min-lr",
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "cosine", help="Shape of the decay of lr", flag="--lr-decay-style"
    )
    lr_decay_steps: int | None = setting(
        None,
        help="Optimizer steps until the decay ends at min_lr_ratio, including warm-up. null: all of the run. In a "
        "script that calls Trainer itself: 1000",
        gt=0,
        flag="--lr-decay-steps",
    )
    warmup_steps_proportion: float = setting(
        0.001, help="Fraction of lr_decay_steps used for linear warm-up from 0", ge=0, lt=1
    )
    beta1: float = setting(
        0.9, help="Adam: decay rate of the first moment", ge=0, lt=1, only_with=_MOMENTS, flag="--adam-beta1"
    )
    beta2: float = setting(
        0.999, help="Adam: decay rate of the second moment", ge=0, lt=1, only_with=_MOMENTS, flag="--adam-beta2"
    )
    eps: float = setting(1e-8, help="Adam: added to the square root of the second moment", gt=0, only_with=_MOMENTS)
    weight_decay: float = setting(0.01, help="Decoupled weight decay", ge=0, flag="--weight-decay")
    gradient_clipping: float = setting(
        1.0, help="Largest global gradient norm. 0 turns clipping off", ge=0, flag="--grad-clip-norm"
    )


@dataclass(kw_only=True)
class MicroBatchSpec(Section):
    """How the rows of an optimizer step are divided into micro-batches.

    The sizes change memory use and speed, not the result.
    """

    mini_bs: int = setting(
        16,
        help="Rows per micro-batch, if max_tokens_per_mb is null",
        gt=0,
        # Trainer.train sets both sizes, so only `build` reports a size that is not used.
        only_with=Needs("max_tokens_per_mb", None, so="micro-batches have a size in tokens", in_build=True),
        flag="--mini-bs",
    )
    max_tokens_per_mb: int | None = setting(
        None, help="Token budget of a micro-batch, filled first-fit decreasing. It takes the place of mini_bs", gt=0
    )


_DEVIATION = Needs("std_level", so="nothing is divided by a deviation")


@dataclass(kw_only=True)
class NormConfig(Section):
    """Normalisation of rewards or advantages: (x - mean) / (std + eps).

    Mean and standard deviation are each taken over the group (the samples of a prompt) or the batch, or left out.
    """

    mean_level: Literal["batch", "group"] | None = setting(
        "group", help="Subtract the mean over the group or batch. null: no mean"
    )
    mean_leave1out: bool = setting(
        False,
        help="Leave the sample itself out of its mean (RLOO 2402.14740)",
        only_with=Needs("mean_level", so="no mean is subtracted"),
    )
    std_level: Literal["batch", "group"] | None = setting(
        "group", help="Divide by the standard deviation over the group or batch. null: no division (Dr.GRPO)"
    )
    std_unbiased: bool = setting(False, help="Divide by n - 1 instead of n in the variance", only_with=_DEVIATION)
    eps: float = setting(1e-6, help="Added to the standard deviation", gt=0, only_with=_DEVIATION)


@dataclass(kw_only=True)
class UpdatedModelConfig(Section):
    """Settings of a trained model and of its updates, without adapters."""

    path: str = setting(help="Hugging Face model folder or hub id", flag="--ckpt")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto",
        help="Type of weights and activations. auto: bfloat16 on GPUs that have it (from compute capability 8.0 on), "
        "float32 elsewhere. Masters are always fp32",
    )
    init_from_scratch: bool = setting(
        False,
        help="Start this model from random weights, drawn with seed, in the shape of path/config.json. Its folder "
        "needs no weight files. Models of other folders are read from these",
    )
    max_skipped_steps: int | None = setting(
        10, help="End the run after so many steps in a row whose loss or gradient was not finite. null: never", gt=0
    )
    gradient_checkpointing: bool = setting(
        True,
        help="Recompute activations in the backward pass. On CUDA, only in as many layers as needed",
        flag="--activation-checkpointing",
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        help="Micro-batches per optimizer step. null: one optimizer step per batch",
        gt=0,
        flag="--gradient-accumulation-steps",
    )
    router_aux_loss_coef: float = setting(
        0.0,
        help="For models with experts: coefficient of the loss that spreads tokens over them (Switch 2101.03961). "
        "0: no such loss. Otherwise each optimizer step has one more forward pass",
        ge=0,
    )
    mb_spec: MicroBatchSpec = setting(factory=MicroBatchSpec, help="Micro-batches")
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, help="Optimizer and its schedule")

    @forbid(
        "optimizer.lr_decay_steps",
        "is null, but with gradient_accumulation_steps and mb_spec.max_tokens_per_mb the number of updates depends on "
        "the rows; set it",
    )
    def schedule_of_unknown_length(self) -> bool:
        """Return whether the learning rate decays over all updates although their number cannot be known."""
        unknown = self.gradient_accumulation_steps is not None and self.mb_spec.max_tokens_per_mb is not None
        decays = self.optimizer.lr_scheduler_type != "constant"
        return unknown and decays and self.optimizer.lr_decay_steps is None


@dataclass(kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA 2106.09685): W x becomes W x + scale * B A x, and only A and B are trained.

    scale is lora_alpha / lora_rank, or lora_alpha / sqrt(lora_rank) with use_rslora.
    """

    use_lora: bool = setting(
        False,
        help="Train low-rank adapters on the linear layers (LoRA 2106.09685) and leave the model's weights as they "
        "are. The reference policy is then the model without its adapters",
    )
    lora_rank: int = setting(32, help="Rank of the adapters", gt=0, only_with=_ADAPTERS)
    lora_alpha: float = setting(16.0, help="Adapters are scaled by lora_alpha / lora_rank", gt=0, only_with=_ADAPTERS)
    target_modules: list[str] = setting(
        factory=lambda: [ALL_LINEAR],
        help="Linear layers that have adapters, such as [q_proj,v_proj]. [all-linear]: all that the model has",
        only_with=_ADAPTERS,
    )
    peft_type: Literal["lora"] = setting("lora", help="Kind of adapters")
    use_rslora: bool = setting(
        False,
        help="Scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA 2312.03732). For high ranks",
        only_with=_ADAPTERS,
    )
    init_lora_from: str | None = setting(
        None,
        help="Folder or hub id of adapters in the form of peft to start from, which bring their own rank, alpha and "
        "target modules. null: new adapters, with which the model computes what it did without",
        only_with=_ADAPTERS,
    )

    @forbid("target_modules", "is empty; name linear layers, or leave it out for all of them")
    def adapters_of_nothing(self) -> bool:
        """Return whether target_modules names no layer."""
        return not self.target_modules

    @forbid("target_modules", "has all-linear beside others; all-linear alone stands for all of them")
    def all_and_some(self) -> bool:
        """Return whether target_modules has all-linear beside names of layers."""
        return ALL_LINEAR in self.target_modules and len(self.target_modules) > 1


@dataclass(kw_only=True)
class ModelConfig(LoraConfig, UpdatedModelConfig):
    """Settings of the trained model, its adapters and its updates. Supervised fine-tuning needs no more."""

    @forbid(
        "use_lora",
        "is true, and so is init_from_scratch. Adapters are saved without the model that they are on, and that would "
        "be lost; train the model whole",
    )
    def adapters_on_nothing_that_stays(self) -> bool:
        """Return whether adapters would be trained on random weights, which no checkpoint contains."""
        return self.use_lora and self.init_from_scratch


_OVERLONG = Needs("overlong_reward_penalty", so="no reward is reduced")


@dataclass(kw_only=True)
class PolicyConfig(ModelConfig):
    """The actor of a policy algorithm: updates of a batch, and how rewards become advantages.

    An algorithm of your own inherits from this class. If its loss uses an importance ratio or a KL penalty, it
    also inherits from `ratio.RatioConfig` or `KLConfig`, which have these settings.
    """

    ppo_n_minibatches: int = setting(
        1, help="Optimizer steps per rollout batch. The ratio is always to the policy before the first of them", gt=0
    )
    routing_replay: bool = setting(
        False,
        help="For models with experts: train each token with the experts that it went through in the rollout, so that "
        "both agree. Costs a byte for each expert of a token and layer (two with 256 or more experts) of a sample",
    )
    reward_bias: float = setting(0.0, help="Added to each reward, before reward_scaling")
    reward_scaling: float = setting(1.0, help="Factor on each reward")
    reward_clip: float | None = setting(None, help="Largest absolute reward after scaling. null: no limit", gt=0)
    overlong_reward_penalty: bool = setting(
        False, help="Reduce rewards of completions close to max_new_tokens (DAPO 2503.14476 eq. 13)"
    )
    overlong_tokens: int | None = setting(
        None, help="Tokens before max_new_tokens over which the penalty grows", gt=0, only_with=_OVERLONG
    )
    overlong_penalty_factor: float | None = setting(None, help="Penalty at max_new_tokens", gt=0, only_with=_OVERLONG)
    mask_no_eos_with_zero: bool = setting(
        False, help="Do not train on completions cut off at max_new_tokens. Their rewards still count in the group"
    )
    reward_norm: NormConfig | None = setting(None, help="Normalise rewards before any other use. null: as they are")
    adv_norm: NormConfig | None = setting(
        factory=NormConfig, help="Turns rewards into advantages. null: the reward itself"
    )

    @forbid(
        "ppo_n_minibatches",
        "is {self.ppo_n_minibatches}, and gradient_accumulation_steps is {self.gradient_accumulation_steps}. Both cut "
        "the batch into optimizer steps; set only one of them",
    )
    def two_ways_to_cut_the_batch(self) -> bool:
        """Return whether two settings both determine the number of optimizer steps per batch."""
        return self.ppo_n_minibatches > 1 and self.gradient_accumulation_steps is not None

    @property
    def old_logprobs(self) -> Literal["recompute", "loglinear", "rollout"]:
        """Source of the log-probabilities that ratios divide by, as the argument old_logprobs of Trainer.train."""
        return "recompute"

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL that is subtracted from the rewards. 0 subtracts none."""
        return 0.0

    @check
    def overlong_penalty_is_whole(self) -> Iterator[Problem]:
        """Report missing settings of the overlong penalty if it is on."""
        if self.overlong_reward_penalty:
            values = {"overlong_tokens": self.overlong_tokens, "overlong_penalty_factor": self.overlong_penalty_factor}
            for name in (name for name, value in values.items() if value is None):
                yield Problem(name, "is null, but overlong_reward_penalty is true; set it")


_KL = Needs("kl_ctl", so="there is no KL")


@dataclass(kw_only=True)
class KLConfig(PolicyConfig):
    """The actor of an algorithm with a penalty on the KL divergence to the reference model.

    An algorithm of your own inherits from this class if its loss or its advantages use these settings.
    """

    kl_ctl: float = setting(0.0, help="Coefficient of the KL to ref. 0 turns it off", ge=0, flag="--kl-loss-coef")
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        help="KL estimator, with r = ref / policy. k1: -log r. k2: (log r)^2 / 2. k3: r - log r - 1",
        only_with=_KL,
        flag="--kl-loss-type",
    )
    use_kl_in_reward: bool = setting(
        False, help="Subtract kl_ctl * KL from each token's reward instead of adding it to the loss", only_with=_KL
    )

    @property
    def kl_in_loss(self) -> float:
        """Coefficient of the KL term in the loss. 0 if the KL is subtracted from the rewards instead."""
        return 0.0 if self.use_kl_in_reward else self.kl_ctl

    @property
    def kl_in_reward(self) -> float:
        """Coefficient of the KL that is subtracted from the rewards. 0 if the KL is a term of the loss instead."""
        return self.kl_ctl if self.use_kl_in_reward else 0.0

    @forbid(
        "adv_norm.mean_leave1out",
        "needs one advantage per sample. With use_kl_in_reward, only group advantages are per sample; set "
        "adv_norm.mean_level=group",
    )
    def leave_one_out_is_for_samples(self) -> bool:
        """Return whether a leave-one-out mean is set for advantages that differ between tokens."""
        norm = self.adv_norm
        return norm is not None and norm.mean_leave1out and self.use_kl_in_reward and norm.mean_level != "group"


@dataclass(kw_only=True)
class RefConfig(Section):
    """The frozen reference model of a policy algorithm."""

    path: str | None = setting(
        None,
        help="Model folder or hub id. null: the actor's initial weights, loaded once for both",
        flag="--ref-ckpt",
    )
    offload: bool = setting(False, help="Keep the model in host memory while it is not in use (CUDA)")


@dataclass(kw_only=True)
class ScoringRefConfig(Section):
    """A reference model that computes the log-probabilities of all rows before training, and is then released."""

    path: str | None = setting(
        None, help="Model folder or hub id. null: the actor itself, before training", flag="--ref-ckpt"
    )


@dataclass(kw_only=True)
class CriticConfig(Section):
    """The value function of PPO: a transformer body whose head computes one value per token."""

    path: str | None = setting(None, help="Model folder or hub id. null: the actor's body", flag="--critic-ckpt")
    init_from_scratch: bool = setting(
        False,
        help="Start the critic from random weights, drawn with seed, in the shape of path/config.json. Its folder "
        "needs no weight files",
    )
    offload: bool = setting(False, help="Keep the model in host memory while it is not in use (CUDA)")
    mask_no_eos_with_zero: bool = setting(
        False,
        help="Do not train the critic on completions cut off at max_new_tokens. With actor.mask_no_eos_with_zero, "
        "neither model trains on them",
    )
    warmup_steps: int = setting(20, help="First steps: they train only the critic", ge=0, flag="--critic-warmup-steps")
    eps_clip: float = setting(0.5, help="Clip range around the values of the rollout", gt=0, flag="--value-clip-eps")
    value_loss_coef: float = setting(0.5, help="Factor on the value loss", gt=0, flag="--value-loss-coef")
    ppo_n_minibatches: int = setting(1, help="Optimizer steps per rollout batch", gt=0)
    gradient_checkpointing: bool = setting(
        True, help="Recompute the critic's activations in the backward pass", flag="--activation-checkpointing"
    )
    mb_spec: MicroBatchSpec = setting(factory=MicroBatchSpec, help="Micro-batches")
    optimizer: OptimizerConfig = setting(
        factory=lambda: OptimizerConfig(lr=1e-5),
        help="Optimizer and its schedule",
        flags={"lr": "--critic-lr", "type": "--adam-8bit=adam_8bit"},
    )
