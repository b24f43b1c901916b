"""What each model of a run is: actor and reference, their optimizer, their micro-batches. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.fields import Section, check, knob
from areno.errors import Problem


@dataclass(kw_only=True)
class OptimizerConfig(Section):
    """AdamW with fp32 master weights and moments. Norm weights and biases are not decayed."""

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
    std_level: Literal["batch", "group"] | None = knob(
        "group", help="divide by the standard deviation over this; null = do not divide (Dr.GRPO)"
    )
    std_unbiased: bool = knob(False, help="divide by n - 1 in the variance")
    eps: float = knob(1e-6, help="added to the standard deviation", gt=0)


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
        True, help="recompute activations per layer in the backward pass", flag="--activation-checkpointing"
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
class PolicyConfig(ModelConfig):
    """The actor of GRPO and GSPO."""

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
    kl_ctl: float = knob(0.0, help="coefficient of the KL loss to ref; 0 = off", ge=0, flag="--kl-loss-coef")
    kl_estimator: Literal["k3"] = knob("k3", help="estimator of the KL loss (2402.03300 eq. 4)", flag="--kl-loss-type")
    adv_norm: NormConfig = knob(factory=NormConfig, help="reward to advantage")

    @check
    def one_way_to_cut_the_batch(self) -> Iterator[Problem]:
        if self.ppo_n_minibatches > 1 and self.gradient_accumulation_steps is not None:
            yield Problem(
                "ppo_n_minibatches",
                f"is {self.ppo_n_minibatches}, set together with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}; both cut the batch into optimizer steps, set one of them",
            )


@dataclass(kw_only=True)
class RefConfig(Section):
    """The frozen reference policy of the KL loss."""

    path: str | None = knob(
        None, help="model folder or hub id; null = the actor as it starts, loaded once", flag="--ref-ckpt"
    )
