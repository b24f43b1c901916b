"""Settings of the actor, its optimizer and its micro-batches. Imports no torch.

Settings of the models beside the actor: the reference and the critic. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.lora import LoraConfig
from areno.config.rejection import RejectionSamplingConfig
from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, forbid, setting

OptimizerType = Literal["adam", "adam_8bit", "sgd"]
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
    """How an optimizer step is cut into forward passes. It changes memory use and speed, not the result."""

    mini_bs: int = setting(
        16,
        help="Rows per micro-batch, if max_tokens_per_mb is null",
        gt=0,
        # The engine makes a size of each from arguments of a script.
        only_with=Needs("max_tokens_per_mb", None, so="micro-batches have a size in tokens", in_build=True),
        flag="--mini-bs",
    )
    max_tokens_per_mb: int | None = setting(
        None, help="Token budget of a micro-batch, filled first-fit decreasing. It takes the place of mini_bs", gt=0
    )


_DEVIATION = Needs("std_level", so="nothing is divided by a deviation")


@dataclass(kw_only=True)
class NormConfig(Section):
    """Normalisation: (x - mean) / (std + eps). Mean and std are each over the group or the batch, or left out."""

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
    """The model that is trained, and how it is updated."""

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
        unknown = self.gradient_accumulation_steps is not None and self.mb_spec.max_tokens_per_mb is not None
        decays = self.optimizer.lr_scheduler_type != "constant"
        return unknown and decays and self.optimizer.lr_decay_steps is None


@dataclass(kw_only=True)
class ModelConfig(LoraConfig, UpdatedModelConfig):
    """The model that is trained, and how it is updated. Supervised fine-tuning needs no other settings."""

    @forbid(
        "use_lora",
        "is true, and so is init_from_scratch. Adapters are saved without the model that they are on, and that would "
        "be lost; train the model whole",
    )
    def adapters_on_nothing_that_stays(self) -> bool:
        return self.use_lora and self.init_from_scratch


_KL = Needs("kl_ctl", so="there is no KL")
_WEIGHTS = Needs("use_decoupled_loss", so="tokens have no weights")
_OVERLONG = Needs("overlong_reward_penalty", so="no reward is reduced")


@dataclass(kw_only=True)
class PolicyConfig(ModelConfig):
    """Settings that the actors of all policy algorithms have."""

    ppo_n_minibatches: int = setting(
        1, help="Optimizer steps per rollout batch. The ratio is always to the policy before the first of them", gt=0
    )
    eps_clip: float = setting(
        0.2, help="Clip range of the ratio: 1 - eps_clip to 1 + eps_clip", gt=0, flag="--clip-eps"
    )
    eps_clip_higher: float | None = setting(None, help="Upper clip range, if different (DAPO 2503.14476)", gt=0)
    c_clip: float | None = setting(
        None, help="Dual clip (1912.09729): bounds the loss of negative advantages", gt=1, flag="--clip-ratio-c"
    )
    recompute_logprob: bool = setting(
        True,
        help="Take the old log-probabilities from the training pass. The first update of a batch has them anyway; "
        "later ones cost a scoring pass. false: use those of the rollout; they differ by rounding, which alone can "
        "push ratios out of a narrow clip range",
    )
    routing_replay: bool = setting(
        False,
        help="For models with experts: train each token with the experts that it went through in the rollout, so that "
        "both agree. Costs a byte for each expert of a token and layer (two with 256 or more experts) of a sample",
    )
    use_decoupled_loss: bool = setting(
        False,
        help="Clip against the proximal policy (prox_logp_method) and weight tokens by proximal / behaviour "
        "probability (decoupled PPO 2505.24298). Corrects for stale or mismatched rollouts",
    )
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = setting(
        "recompute",
        help="Proximal log-probabilities. recompute: by a forward pass. loglinear: no extra pass; the first update of "
        "a batch uses its own, later ones interpolate between behaviour and current policy by the row's staleness. "
        "metrics: recompute, and log the error of loglinear",
        only_with=Needs("use_decoupled_loss", so="there is no proximal policy"),
    )
    rejection_sampling: RejectionSamplingConfig | None = setting(
        None, help="Mask or truncate extreme weights of use_decoupled_loss. null: neither", only_with=_WEIGHTS
    )
    m2_threshold: float | None = setting(
        None, help="Mask the largest log-ratios until their mean square is at most this (M2PO 2510.01161: 0.04)", gt=0
    )
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

    @property
    def kl_in_loss(self) -> float:
        """The coefficient of the KL term of the loss: kl_ctl, unless the KL is part of the reward."""
        return 0.0 if self.use_kl_in_reward else self.kl_ctl

    @forbid(
        "ppo_n_minibatches",
        "is {self.ppo_n_minibatches}, and gradient_accumulation_steps is {self.gradient_accumulation_steps}. Both cut "
        "the batch into optimizer steps; set only one of them",
    )
    def two_ways_to_cut_the_batch(self) -> bool:
        return self.ppo_n_minibatches > 1 and self.gradient_accumulation_steps is not None

    @forbid(
        "adv_norm.mean_leave1out",
        "needs one advantage per sample. With use_kl_in_reward, only group advantages are per sample; set "
        "adv_norm.mean_level=group",
    )
    def leave_one_out_is_for_samples(self) -> bool:
        norm = self.adv_norm
        return norm is not None and norm.mean_leave1out and self.use_kl_in_reward and norm.mean_level != "group"

    @forbid(
        "prox_logp_method",
        "is loglinear, but rejection_sampling and m2_threshold need proximal log-probabilities before the update; set "
        "it to recompute",
    )
    def loglinear_decides_late(self) -> bool:
        needed = self.rejection_sampling is not None or self.m2_threshold is not None
        return self.prox_logp_method == "loglinear" and needed

    @forbid(
        "recompute_logprob",
        "is false, but use_decoupled_loss compares with the policy before the update, not with the rollout; leave "
        "recompute_logprob out",
    )
    def decoupled_from_the_rollout(self) -> bool:
        return self.use_decoupled_loss and not self.recompute_logprob

    @property
    def ratio_level(self) -> Literal["token", "sequence"]:
        """Whether tokens have importance ratios of their own, or share the ratio of their sequence."""
        return "token"

    @property
    def clip_against_rollout(self) -> float | None:
        """The clip range of a ratio that compares with the rollout. None where ratios compare with training."""
        updates_again = self.ppo_n_minibatches > 1 or self.gradient_accumulation_steps is not None
        interpolates = self.prox_logp_method == "loglinear" and updates_again
        return self.eps_clip if interpolates or not self.recompute_logprob else None

    @property
    def old_logprobs(self) -> Literal["recompute", "loglinear", "rollout"]:
        """Where importance ratios take their denominator from, as `areno.Trainer.train` names the choices."""
        if not self.recompute_logprob:
            return "rollout"
        return "loglinear" if self.prox_logp_method == "loglinear" else "recompute"

    @check
    def overlong_penalty_is_whole(self) -> Iterator[Problem]:
        if self.overlong_reward_penalty:
            values = {"overlong_tokens": self.overlong_tokens, "overlong_penalty_factor": self.overlong_penalty_factor}
            for name in (name for name, value in values.items() if value is None):
                yield Problem(name, "is null, but overlong_reward_penalty is true; set it")


@dataclass(kw_only=True)
class TokenPolicyConfig(PolicyConfig):
    """The actor of GRPO and PPO, which have one ratio per token."""

    reduction: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = setting(
        "seq_mean_token_mean",
        help="How token losses become one number: as in the GRPO paper, DAPO, or Dr.GRPO (sum / max_new_tokens)",
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", help="sequence: the row's ratio with each token's gradient (GSPO-token 2507.18071 eq. 13)"
    )
    use_cispo_loss: bool = setting(False, help="Clip the gradient's weight, not the objective (CISPO 2506.13585 eq. 4)")
    use_sapo_loss: bool = setting(False, help="Replace the clip by a soft gate (SAPO 2511.20347)")
    sapo_tau_pos: float = setting(1.0, help="Temperature of the SAPO gate for positive advantages", gt=0)
    sapo_tau_neg: float = setting(1.05, help="Temperature of the SAPO gate for negative advantages", gt=0)

    @property
    def ratio_level(self) -> Literal["token", "sequence"]:
        return self.importance_sampling_level

    @property
    def clip_against_rollout(self) -> float | None:
        return super().clip_against_rollout if self.surrogate != "sapo" else None

    @property
    def surrogate(self) -> Literal["clip", "cispo", "sapo"]:
        """How the loss uses the importance ratio; see areno.loss_fns.surrogates."""
        return "sapo" if self.use_sapo_loss else "cispo" if self.use_cispo_loss else "clip"

    @forbid("use_sapo_loss", "is true, and so is use_cispo_loss; set one of them")
    def two_surrogates(self) -> bool:
        return self.use_cispo_loss and self.use_sapo_loss

    @forbid("c_clip", "is {self.c_clip}, but the loss of use_{self.surrogate}_loss has no dual clip; set it to null")
    def dual_clip_has_a_clip(self) -> bool:
        return self.surrogate != "clip" and self.c_clip is not None

    @forbid("eps_clip", "is {self.eps_clip}, but the loss of use_sapo_loss does not clip; leave it out")
    def clip_without_clip(self) -> bool:
        return self.use_sapo_loss and not self.is_default("eps_clip")

    @forbid("eps_clip_higher", "is {self.eps_clip_higher}, but the loss of use_sapo_loss does not clip; set it to null")
    def upper_clip_without_clip(self) -> bool:
        return self.use_sapo_loss and self.eps_clip_higher is not None

    @check
    def gate_is_used(self) -> Iterator[Problem]:
        for name, value in {"sapo_tau_pos": self.sapo_tau_pos, "sapo_tau_neg": self.sapo_tau_neg}.items():
            if not self.use_sapo_loss and not self.is_default(name):
                yield Problem(name, f"is {value}, but use_sapo_loss is false; set it to true")


@dataclass(kw_only=True)
class RefConfig(Section):
    """The frozen reference policy."""

    path: str | None = setting(
        None,
        help="Model folder or hub id. null: the actor's initial weights, loaded once for both",
        flag="--ref-ckpt",
    )
    offload: bool = setting(False, help="Keep the model in host memory while it is not in use (CUDA)")


@dataclass(kw_only=True)
class ScoringRefConfig(Section):
    """A reference that scores the data before training and is then released."""

    path: str | None = setting(
        None, help="Model folder or hub id. null: the actor itself, before training", flag="--ref-ckpt"
    )


@dataclass(kw_only=True)
class CriticConfig(Section):
    """The value function of PPO: a transformer body with one output per token."""

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
