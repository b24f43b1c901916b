"""What each model of a run is: actor and reference, their optimizer, their micro-batches. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.fields import Section, check, knob, settings
from areno.errors import Problem


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW with fp32 master weights. Norm weights and biases are not decayed."""

    type: Literal["adam", "adam_8bit"] = knob(
        "adam",
        help="adam keeps moments in fp32, 8 bytes for each parameter; adam_8bit in blocks of 8-bit codes, 2 bytes",
        flag="--adam-8bit",
    )
    lr: float = knob(1e-6, help="peak learning rate", gt=0, flag="--lr")
    min_lr_ratio: float = knob(0.1, help="learning rate at the end of the decay, as a fraction of lr", ge=0, le=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = knob(
        "cosine", help="shape of the decay", flag="--lr-decay-style"
    )
    lr_decay_steps: int = knob(
        1000, help="optimizer steps until min_lr_ratio is reached, warm-up included", gt=0, flag="--lr-decay-steps"
    )
    warmup_steps_proportion: float = knob(
        0.001, help="fraction of lr_decay_steps spent on a linear warm-up from 0", ge=0, lt=1
    )
    beta1: float = knob(0.9, help="decay of the first moment", ge=0, lt=1, flag="--adam-beta1")
    beta2: float = knob(0.999, help="decay of the second moment", ge=0, lt=1, flag="--adam-beta2")
    eps: float = knob(1e-8, help="added to the root of the second moment", gt=0)
    weight_decay: float = knob(0.01, help="decoupled weight decay", ge=0, flag="--weight-decay")
    gradient_clipping: float = knob(
        1.0, help="largest global gradient norm; 0 switches clipping off", ge=0, flag="--grad-clip-norm"
    )


@dataclass(kw_only=True)
class MicroBatchSpec(Section):
    """How an optimizer step is cut into forward passes. The result does not depend on it, only memory and speed do."""

    mini_bs: int = knob(
        16, help="rows in a micro-batch, where max_tokens_per_mb does not decide", gt=0, flag="--mini-bs"
    )
    max_tokens_per_mb: int | None = knob(
        None,
        help="token budget of a micro-batch: rows are packed first-fit decreasing, mini_bs is then ignored",
        gt=0,
    )


@dataclass(kw_only=True)
class NormConfig(Section):
    """Normalisation: (x - mean) / (std + eps), each of the two over the group, the batch, or not at all."""

    mean_level: Literal["batch", "group"] | None = knob("group", help="subtract the mean over this; null = no centring")
    mean_leave1out: bool = knob(
        False, help="the mean is that of the others, without the sample itself (RLOO 2402.14740)"
    )
    std_level: Literal["batch", "group"] | None = knob(
        "group", help="divide by the standard deviation over this; null = do not divide (Dr.GRPO)"
    )
    std_unbiased: bool = knob(False, help="divide by n - 1 in the variance")
    eps: float = knob(1e-6, help="added to the standard deviation", gt=0)

    @check
    def leave_one_out_has_a_mean(self) -> Iterator[Problem]:
        if self.mean_leave1out and self.mean_level is None:
            yield Problem("mean_leave1out", "is true, but mean_level is null, so there is no mean; set it to group")

    @check
    def unbiased_has_a_deviation(self) -> Iterator[Problem]:
        if self.std_unbiased and self.std_level is None:
            yield Problem("std_unbiased", "is true, but std_level is null, so nothing is divided by; set it to false")


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The trained model and how it is updated (all that supervised fine-tuning needs)."""

    path: str = knob(help="Hugging Face model folder or hub id", flag="--ckpt")
    dtype: Literal["auto", "bfloat16", "float32"] = knob(
        "auto", help="of weights and activations; auto is bfloat16 on CUDA and float32 on CPU. Masters are always fp32"
    )
    init_from_scratch: bool = knob(
        False, help="random weights (from seed) in the shape of path/config.json; the folder needs no weight files"
    )
    gradient_checkpointing: bool = knob(
        True,
        help="recompute activations in the backward pass; on CUDA only of as many layers as memory requires",
        flag="--activation-checkpointing",
    )
    gradient_accumulation_steps: int | None = knob(
        None,
        help="micro-batches in an optimizer step; null = the whole batch in one step",
        gt=0,
        flag="--gradient-accumulation-steps",
    )
    mb_spec: MicroBatchSpec = knob(factory=MicroBatchSpec, help="micro-batches")
    optimizer: OptimizerConfig = knob(factory=OptimizerConfig, help="optimizer and learning-rate schedule")


@dataclass(kw_only=True)
class RejectionSamplingConfig(Section):
    """What happens to tokens or rows on which the proximal policy and the one that sampled disagree."""

    level: Literal["token", "sequence"] = knob("token", help="each token by itself, or the row as a whole")
    action: Literal["mask", "clamp"] = knob(
        "mask", help="mask = leave out of training; clamp = cut the importance weight to [lower, upper] (truncated IS)"
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = knob(
        "ratio", help="ratio = proximal / behaviour probability r; k1 = log r, k2 = (log r)^2 / 2, k3 = r - log r - 1"
    )
    agg: Literal["sum", "mean", "max"] = knob(
        "mean", help="of the tokens, for level=sequence; of a ratio in log space, so that mean is the geometric mean"
    )
    upper: float = knob(5.0, help="largest metric that passes", gt=0)
    lower: float | None = knob(None, help="smallest metric that passes; null = no bound")

    @check
    def only_a_ratio_is_clamped(self) -> Iterator[Problem]:
        if self.action == "clamp" and self.metric != "ratio":
            yield Problem("action", f"is clamp, which bounds a ratio, but metric is {self.metric}; use mask")

    @check
    def a_row_is_clamped_by_its_mean(self) -> Iterator[Problem]:
        if self.action == "clamp" and self.level == "sequence" and self.agg != "mean":
            yield Problem("agg", f"is {self.agg}, but clamp cuts the weight of a row, its geometric mean; use mean")

    @check
    def agg_has_rows(self) -> Iterator[Problem]:
        if self.agg != "mean" and self.level == "token":
            yield Problem("agg", f"is {self.agg}, which is for level=sequence; level is token")

    @check
    def a_kl_of_zero_passes(self) -> Iterator[Problem]:
        if self.lower is None or self.metric == "ratio":
            return
        if self.metric != "kl_k1":
            yield Problem("lower", f"is {self.lower}, but {self.metric} is never negative, and 0 must pass; use null")
        elif self.lower >= 0:
            yield Problem("lower", f"is {self.lower}; of kl_k1 0 must pass, which is no difference, so lower < 0")

    @check
    def bounds_are_in_order(self) -> Iterator[Problem]:
        if self.lower is not None and self.lower >= self.upper:
            yield Problem("lower", f"is {self.lower}, not below upper={self.upper}")

    @check
    def a_ratio_of_one_passes(self) -> Iterator[Problem]:
        if self.metric == "ratio" and (self.upper <= 1 or (self.lower or 0.5) >= 1 or (self.lower or 0.5) <= 0):
            yield Problem("upper", f"and lower are {self.upper} and {self.lower}; for a ratio, 0 < lower < 1 < upper")


@dataclass(kw_only=True)
class PolicyConfig(ModelConfig):
    """What the actors of all policy algorithms share."""

    ppo_n_minibatches: int = knob(
        1, help="optimizer steps for each rollout batch; the ratio stays against the rollout's log-probabilities", gt=0
    )
    eps_clip: float = knob(0.2, help="ratio clip: 1 - eps_clip .. 1 + eps_clip", gt=0)
    eps_clip_higher: float | None = knob(
        None, help="upper ratio clip where it differs (clip-higher, DAPO 2503.14476)", gt=0
    )
    c_clip: float | None = knob(
        None, help="dual clip (1912.09729): bound on the loss of negative advantages, > 1", gt=1, flag="--clip-ratio-c"
    )
    recompute_logprob: bool = knob(
        False,
        help="take the ratio against log-probabilities recomputed by the training forward pass, not the rollout's: one "
        "more forward pass, and bf16 noise between the two no longer reaches the ratio clip (it matters for GSPO)",
    )
    use_decoupled_loss: bool = knob(
        False,
        help="clip against the proximal policy (see prox_logp_method) and weigh each token by proximal / behaviour "
        "probability (decoupled PPO 2505.24298); corrects for stale or mismatched rollouts",
    )
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = knob(
        "recompute",
        help="proximal log-probabilities by a forward pass, by interpolation between behaviour and current policy with "
        "the row's staleness (no forward pass), or by the former with the error of the latter logged",
    )
    rejection_sampling: RejectionSamplingConfig | None = knob(
        None, help="truncate or mask what use_decoupled_loss weighs by too extreme a weight; null = leave it"
    )
    m2_threshold: float | None = knob(
        None,
        help="mask the tokens farthest from the behaviour policy until the mean squared log-ratio is at most this "
        "(M2PO 2510.01161: 0.04)",
        gt=0,
    )
    kl_ctl: float = knob(0.0, help="coefficient of the KL to ref; 0 = off", ge=0, flag="--kl-loss-coef")
    kl_estimator: Literal["k1", "k2", "k3"] = knob(
        "k3",
        help="estimator of the KL: -log r, (log r)^2 / 2, or r - log r - 1 with r = ref / policy",
        flag="--kl-loss-type",
    )
    use_kl_in_reward: bool = knob(
        False, help="take kl_ctl * KL off the reward of each token, instead of adding it to the loss"
    )
    reward_bias: float = knob(0.0, help="added to each reward, before reward_scaling")
    reward_scaling: float = knob(1.0, help="factor on each reward")
    reward_clip: float | None = knob(None, help="largest absolute reward after scaling; null = no limit", gt=0)
    overlong_reward_penalty: bool = knob(
        False, help="take something off the reward of completions near max_new_tokens (DAPO 2503.14476 eq. 13)"
    )
    overlong_tokens: int | None = knob(None, help="tokens before max_new_tokens over which the penalty grows", gt=0)
    overlong_penalty_factor: float | None = knob(None, help="penalty at max_new_tokens", gt=0)
    mask_no_eos_with_zero: bool = knob(
        False, help="do not train on completions cut off at max_new_tokens (their reward still counts in the group)"
    )
    reward_norm: NormConfig | None = knob(None, help="normalise rewards before anything else is made of them")
    adv_norm: NormConfig | None = knob(factory=NormConfig, help="reward to advantage; null = the reward itself")

    def loss_settings(self, max_new_tokens: int) -> dict[str, Any]:
        """Keyword arguments of the loss function that these settings are for (`areno.loss_fns`)."""
        return {
            "clip_eps": self.eps_clip,
            "clip_eps_higher": self.eps_clip_higher,
            "c_clip": self.c_clip,
            "kl_coef": 0.0 if self.use_kl_in_reward else self.kl_ctl,
            "kl_estimator": self.kl_estimator,
        }

    @check
    def one_way_to_cut_the_batch(self) -> Iterator[Problem]:
        if self.ppo_n_minibatches > 1 and self.gradient_accumulation_steps is not None:
            yield Problem(
                "ppo_n_minibatches",
                f"is {self.ppo_n_minibatches}, set together with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}; both cut the batch into optimizer steps, set one of them",
            )

    @check
    def rejection_has_weights(self) -> Iterator[Problem]:
        if self.rejection_sampling is not None and not self.use_decoupled_loss:
            yield Problem(
                "rejection_sampling", "judges the weights of use_decoupled_loss, which is false; set it to true"
            )

    @check
    def leave_one_out_is_for_samples(self) -> Iterator[Problem]:
        norm = self.adv_norm
        if norm is not None and norm.mean_leave1out and self.use_kl_in_reward and norm.mean_level != "group":
            yield Problem(
                "adv_norm.mean_leave1out",
                "is for samples; with use_kl_in_reward only the advantages of a group are those of samples: set "
                "adv_norm.mean_level=group",
            )

    @check
    def loglinear_decides_late(self) -> Iterator[Problem]:
        late = self.prox_logp_method == "loglinear"
        if late and (self.rejection_sampling is not None or self.m2_threshold is not None or self.recompute_logprob):
            yield Problem(
                "prox_logp_method",
                "is loglinear, which has no log-probabilities before the update; rejection_sampling, m2_threshold and "
                "recompute_logprob need recompute",
            )

    @check
    def proximal_policy_is_used(self) -> Iterator[Problem]:
        if self.prox_logp_method != "recompute" and not self.use_decoupled_loss:
            yield Problem(
                "prox_logp_method", f"is {self.prox_logp_method}, but use_decoupled_loss is false; set it to true"
            )

    @check
    def kl_in_reward_has_a_coefficient(self) -> Iterator[Problem]:
        if self.use_kl_in_reward and not self.kl_ctl:
            yield Problem("use_kl_in_reward", "is true, but kl_ctl is 0, so it takes nothing off; set kl_ctl")

    @check
    def overlong_penalty_is_whole(self) -> Iterator[Problem]:
        if self.overlong_reward_penalty:
            for name in ("overlong_tokens", "overlong_penalty_factor"):
                if getattr(self, name) is None:
                    yield Problem(name, "is null, but overlong_reward_penalty is true; set it")
        elif self.overlong_tokens is not None or self.overlong_penalty_factor is not None:
            yield Problem(
                "overlong_reward_penalty", "is false, so overlong_tokens and overlong_penalty_factor do nothing"
            )


@dataclass(kw_only=True)
class TokenPolicyConfig(PolicyConfig):
    """The actor of GRPO and PPO, whose ratio is that of each token."""

    reduction: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = knob(
        "seq_mean_token_mean",
        help="how token losses become one number: GRPO paper, DAPO, or Dr.GRPO (sum / max_new_tokens)",
    )
    importance_sampling_level: Literal["token", "sequence"] = knob(
        "token", help="sequence = the ratio of the row, with the gradient of each token (GSPO-token 2507.18071 eq. 13)"
    )
    use_cispo_loss: bool = knob(
        False, help="clip the weight of the gradient instead of the objective (CISPO 2506.13585 eq. 4)"
    )
    use_sapo_loss: bool = knob(False, help="a soft gate in place of the clip (SAPO 2511.20347)")
    sapo_tau_pos: float = knob(1.0, help="temperature of SAPO's gate for positive advantages", gt=0)
    sapo_tau_neg: float = knob(1.05, help="the same for negative ones", gt=0)

    def loss_settings(self, max_new_tokens: int) -> dict[str, Any]:
        """See PolicyConfig; these are for `grpo_loss_fn` and `ppo_loss_fn`."""
        return super().loss_settings(max_new_tokens) | {
            "reduction": self.reduction,
            "norm_length": max_new_tokens,
            "importance_sampling_level": self.importance_sampling_level,
            "surrogate": "sapo" if self.use_sapo_loss else "cispo" if self.use_cispo_loss else "clip",
            "sapo_tau_pos": self.sapo_tau_pos,
            "sapo_tau_neg": self.sapo_tau_neg,
            "prox_logp_method": "loglinear" if self.prox_logp_method == "loglinear" else "recompute",
        }

    @check
    def one_surrogate(self) -> Iterator[Problem]:
        if self.use_cispo_loss and self.use_sapo_loss:
            yield Problem("use_sapo_loss", "is true, and so is use_cispo_loss; set one of them")

    @check
    def dual_clip_has_a_clip(self) -> Iterator[Problem]:
        other = "use_sapo_loss" if self.use_sapo_loss else "use_cispo_loss" if self.use_cispo_loss else ""
        if other and self.c_clip is not None:
            yield Problem("c_clip", f"is {self.c_clip}, but the loss of {other} has no dual clip; set it to null")

    @check
    def upper_clip_has_a_clip(self) -> Iterator[Problem]:
        if self.use_sapo_loss and self.eps_clip_higher is not None:
            yield Problem(
                "eps_clip_higher",
                f"is {self.eps_clip_higher}, but the loss of use_sapo_loss does not clip; set it to null",
            )

    @check
    def gate_is_used(self) -> Iterator[Problem]:
        taus = settings(TokenPolicyConfig)
        for name in ("sapo_tau_pos", "sapo_tau_neg"):
            if not self.use_sapo_loss and getattr(self, name) != taus[name].default():
                yield Problem(name, f"is {getattr(self, name)}, but use_sapo_loss is false; set it to true")


@dataclass(kw_only=True)
class RefConfig(Section):
    """The frozen reference policy."""

    path: str | None = knob(
        None, help="model folder or hub id; null = the actor as it starts, loaded once", flag="--ref-ckpt"
    )
    offload: bool = knob(False, help="keep it in host memory while it is not used (CUDA)")


@dataclass(kw_only=True)
class ScoringRefConfig(Section):
    """A reference that is needed before training only: it is loaded, scores the data and is released."""

    path: str | None = knob(
        None, help="model folder or hub id; null = the actor as it starts, which scores itself", flag="--ref-ckpt"
    )


@dataclass(kw_only=True)
class CriticConfig(Section):
    """PPO's value function: a transformer body with one output for each token."""

    path: str | None = knob(
        None, help="model folder or hub id; null = the actor's body as it starts", flag="--critic-ckpt"
    )
    offload: bool = knob(False, help="keep it in host memory while it is not used (CUDA)")
    warmup_steps: int = knob(20, help="steps that train the critic alone", ge=0, flag="--critic-warmup-steps")
    eps_clip: float = knob(0.5, help="values stay this near to those of the rollout", gt=0, flag="--value-clip-eps")
    value_loss_coef: float = knob(0.5, help="factor on the value loss", gt=0, flag="--value-loss-coef")
    ppo_n_minibatches: int = knob(1, help="optimizer steps for each rollout batch", gt=0)
    gradient_checkpointing: bool = knob(True, help="as actor.gradient_checkpointing")
    mb_spec: MicroBatchSpec = knob(factory=MicroBatchSpec, help="micro-batches")
    optimizer: OptimizerConfig = knob(
        factory=lambda: OptimizerConfig(lr=1e-5), help="optimizer and learning-rate schedule (lr: 001's --critic-lr)"
    )
