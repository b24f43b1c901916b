"""Settings of the models: the actor with its optimizer and micro-batches, the reference and the critic.

Imports no torch. Settings that only some policy algorithms have are elsewhere. Those of the importance ratio are in
`areno.config.ratio`. Those of a loss are in `areno.loss_fns` or in the recipe, next to the formula that uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.fp8 import FP8ModelConfig
from areno.config.lora import LoraConfig
from areno.config.norms import NormConfig
from areno.config.optimizers import ADAM_8BIT, OptimizerConfig
from areno.config.resuming import FROM_HERE, FROM_STATE, NEVER, SAME_CONTENT, SPEED
from areno.errors import Problem
from areno.schema.fields import Flag, Needs, Section, check, require, setting

_REF_CKPT = Flag(
    "--ref-ckpt", help="Model folder or hub id of the reference model. Default: the policy before training"
)

ROWS_COUNTED = 16
"""Rows in a micro-batch if gradient_accumulation_steps is set, but no size of micro-batches."""


@dataclass(kw_only=True)
class MicroBatchSpec(Section):
    """How the rows of an optimizer step are divided into micro-batches.

    The sizes change memory use and speed, not the result. If both are null, areno chooses a number of tokens from the
    sizes of the models and the memory of the device.
    """

    mini_bs: int | None = setting(
        None,
        help="Number of rows per micro-batch. null: the size is a number of tokens",
        gt=0,
        # Trainer.train sets both sizes, so only `build` reports a size that is not used.
        only_with=Needs("max_tokens_per_mb", None, so="micro-batches have a size in tokens", in_build=True),
        flag=Flag("--mini-bs", help="Number of rows per micro-batch"),
    )
    max_tokens_per_mb: int | None = setting(
        None,
        help="Largest number of tokens per micro-batch on one device; rows are packed by first-fit-decreasing. null: "
        "mini_bs rows or, if that is null too, a number that suits models and memory",
        gt=0,
    )

    @property
    def is_automatic(self) -> bool:
        """Whether no size is set, so that the engine chooses one."""
        return self.mini_bs is None and self.max_tokens_per_mb is None

    @property
    def with_fixed_size(self) -> MicroBatchSpec:
        """The sizes to use with gradient_accumulation_steps: those that are set, or else ROWS_COUNTED rows.

        The engine must not choose a size then, because the size decides the number of updates.
        """
        return MicroBatchSpec(mini_bs=ROWS_COUNTED) if self.is_automatic else self


@dataclass(kw_only=True)
class UpdatedModelConfig(Section):
    """Settings of a trained model and of its updates, except the settings of adapters."""

    heading = "Train"
    path: str = setting(
        help="Hugging Face model folder or hub id",
        flag=Flag("--ckpt", heading="Basic"),
        on_resume=SAME_CONTENT,
        read_by_rollout=True,
    )
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto",
        help="Data type of weights and activations. auto: bfloat16 on GPUs of compute capability 8.0 or more, else "
        "float32. Master weights are always fp32",
        read_by_rollout=True,
    )
    init_from_scratch: bool = setting(
        False,
        help="Start this model from random weights (by seed) with the architecture and the initializer_range in "
        "config.json of path; with experts, some are larger or smaller. Other models still load theirs",
        on_resume=NEVER,
        read_by_rollout=True,
    )
    max_skipped_steps: int | None = setting(
        10,
        help="Steps in a row without an update (loss or gradient not finite, or no sample with a reward) that end "
        "the run with an error. null: no limit",
        gt=0,
        on_resume=FROM_HERE,
    )
    gradient_checkpointing: bool = setting(
        True,
        help="Recompute activations in the backward pass to save memory. On CUDA, only in as many layers as needed",
        flag="--activation-checkpointing",
        on_resume=SPEED,
    )
    share_prefixes: Literal["auto", "on", "off"] = setting(
        "auto",
        help="Compute tokens with which several rows begin, such as a group's prompt, once in training and scoring. "
        "auto: if it saves a tenth of the tokens and a twentieth of the time. Never with recurrent states",
        renamed_from="enable_tree_training",
        on_resume=SPEED,
    )
    offload: bool = setting(
        False,
        help="Keep masters and moments in pinned host memory, and gradients on the GPU only in training. Each update "
        "copies masters and moments. Results stay the same (CUDA)",
        on_resume=SPEED,
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        help="Micro-batches whose gradients are summed for one optimizer step. null: one optimizer step per batch",
        gt=0,
        flag="--gradient-accumulation-steps",
    )
    router_aux_loss_coef: float = setting(
        0.0,
        help="Coefficient of the loss that balances experts (Switch Transformer, arXiv 2101.03961). Above 0, it "
        "costs a forward pass per optimizer step",
        ge=0,
    )
    mb_spec: MicroBatchSpec = setting(factory=MicroBatchSpec, help="Size of micro-batches", on_resume=SPEED)
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, help="Optimizer and learning-rate schedule")

    @require(
        "optimizer.lr_decay_steps",
        "is null, but with gradient_accumulation_steps and mb_spec.max_tokens_per_mb the number of updates depends on "
        "the rows; set it",
    )
    def decay_length_is_known(self) -> bool:
        unknown = self.gradient_accumulation_steps is not None and self.mb_spec.max_tokens_per_mb is not None
        decays = self.optimizer.lr_scheduler_type != "constant"
        return not unknown or not decays or self.optimizer.lr_decay_steps is not None


@dataclass(kw_only=True)
class ModelConfig(LoraConfig, FP8ModelConfig, UpdatedModelConfig):
    """Settings of the trained model, its adapters and its updates. Supervised fine-tuning needs no more."""

    @require(
        "use_lora",
        "is true, and so is init_from_scratch. Adapters are saved without the model that they are on, and that would "
        "be lost; train the model whole",
    )
    def adapters_have_saved_base(self) -> bool:
        return not self.use_lora or not self.init_from_scratch

    @require(
        "fp8_config.mode",
        "is int8, which is for frozen weights, but use_lora is false, so the weights are trained; set use_lora=true, "
        "or mode=e4m3",
    )
    def int8_is_for_frozen_weights(self) -> bool:
        return self.use_lora or self.fp8 is None or self.fp8.rounds_inputs


_OVERLONG = Needs("overlong_reward_penalty", so="no reward is reduced")


@dataclass(kw_only=True)
class PolicyConfig(ModelConfig):
    """Settings of the actor in a policy algorithm: how a batch is updated, and how rewards become advantages.

    An algorithm of your own inherits from this class. If its loss uses an importance ratio, it also inherits from
    `ratio.RatioConfig`. If it uses a KL penalty, it also inherits from `KLConfig`.
    """

    ppo_n_minibatches: int = setting(
        1,
        help="Optimizer steps per rollout batch. The importance ratios of all compare with the policy before the first",
        gt=0,
    )
    routing_replay: bool = setting(
        False,
        help="Mixture of experts: train each token with the experts chosen in the rollout. Takes one byte per token, "
        "layer and chosen expert, or two with 256 experts or more",
        read_by_rollout=True,
    )
    reward_bias: float = setting(0.0, help="Added to each reward, before the reward is multiplied by reward_scaling")
    reward_scaling: float = setting(1.0, help="Each reward is multiplied by this number, after reward_bias is added")
    reward_clip: float | None = setting(
        None, help="Clip each reward to [-reward_clip, reward_clip], after reward_scaling. null: no clipping", gt=0
    )
    overlong_reward_penalty: bool = setting(
        False, help="Reduce the rewards of completions near gconfig.max_new_tokens (DAPO, arXiv 2503.14476, eq. 13)"
    )
    overlong_tokens: int | None = setting(
        None,
        help="Length of the zone before gconfig.max_new_tokens in which the penalty grows linearly",
        gt=0,
        only_with=_OVERLONG,
    )
    overlong_penalty_factor: float | None = setting(
        None, help="Largest penalty, at gconfig.max_new_tokens tokens", gt=0, only_with=_OVERLONG
    )
    mask_no_eos_with_zero: bool = setting(
        False,
        help="Do not train on completions that were cut off. Their rewards still count in mean and standard "
        "deviation of the group",
    )
    reward_norm: NormConfig | None = setting(
        None, help="Normalisation of rewards before advantages are computed. null: rewards are not normalised"
    )
    adv_norm: NormConfig | None = setting(
        factory=NormConfig,
        help="Normalisation that turns rewards into advantages. null: the advantage of a sample is its reward",
    )

    @require(
        "ppo_n_minibatches",
        "is {self.ppo_n_minibatches}, and gradient_accumulation_steps is {self.gradient_accumulation_steps}. Both cut "
        "the batch into optimizer steps; set only one of them",
    )
    def one_setting_divides_batch(self) -> bool:
        return self.ppo_n_minibatches <= 1 or self.gradient_accumulation_steps is None

    @property
    def n_recorded_tokens(self) -> int:
        """How many of the most likely tokens the rollout records beside each token."""
        return 0

    @property
    def mask_divergence(self) -> Any:
        """Kind of the divergence from the policy that sampled, for the mask. None: training passes compute none."""
        return None

    @property
    def chosen_token_selection(self) -> Any:
        """Which tokens of a batch the loss treats apart, see `areno.loss_fns.token_selection`. None: none."""
        return None

    @property
    def uses_teacher_logprobs(self) -> bool:
        """Whether the policy loss reads a teacher's log-probabilities, besides the loss of distillation."""
        return False

    @property
    def differentiates_entropy(self) -> bool:
        """Whether training passes compute the gradient of the policy's entropy."""
        return False

    def adapted_entropy_coef(self, entropies: Sequence[float]) -> float | None:
        """Return the coefficient of the next step, from the entropies of all so far. None if it does not change."""
        return None

    @property
    def chosen_adv_estimator(self) -> Any:
        """What computes the advantages in place of adv_norm, see `areno.loss_fns.adv_estimators`. None: adv_norm."""
        return None

    @property
    def needs_logit_gradients(self) -> bool:
        """Whether a forward pass computes `TrainSequence.logit_gradients`."""
        return self.chosen_adv_estimator is not None and self.chosen_adv_estimator.needs_logit_gradients

    @property
    def is_scored_before_update(self) -> bool:
        """Whether a forward pass of the actor precedes its first update, for advantages or chosen tokens."""
        selection = self.chosen_token_selection
        return self.needs_logit_gradients or (selection is not None and selection.needs_entropy)

    @property
    def passes_before_later_updates(self) -> int:
        """Number of forward passes over the rows of an update after the first."""
        return 2 if self.chosen_adv_estimator is not None and self.chosen_adv_estimator.follows_policy else 1

    @property
    def group_norm_keys(self) -> list[str]:
        """The settings that compare the samples of a prompt."""
        norms = {"adv_norm": self.adv_norm, "reward_norm": self.reward_norm}
        if (estimator := self.chosen_adv_estimator) is not None:
            norms["adv_norm"] = None
        found = [name for name, norm in norms.items() if norm and "group" in (norm.mean_level, norm.std_level)]
        return [*found, "adv_estimator"] if estimator is not None and estimator.needs_group else found

    @property
    def old_logprobs(self) -> Literal["recompute", "loglinear", "rollout"]:
        """The argument `old_logprobs` of Trainer.train, always "recompute" in this class.

        If the loss has importance ratios, they divide by probabilities that a training pass computes before the
        update.
        """
        return "recompute"

    @property
    def kl_reward_coef(self) -> float:
        """Coefficient of the KL that is subtracted from the rewards. 0 subtracts none."""
        return 0.0

    @check
    def check_overlong_penalty(self) -> Iterator[Problem]:
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

    kl_ctl: float = setting(
        0.0,
        help="Coefficient of the KL divergence to the reference model (ref). 0: no KL term",
        ge=0,
        flag="--kl-loss-coef",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        help="Estimator of the KL divergence, with r = p_ref / p. k1: -log r. k2: (log r)^2 / 2. k3: r - log r - 1",
        only_with=_KL,
        flag="--kl-loss-type",
    )
    use_kl_in_reward: bool = setting(
        False,
        help="Subtract kl_ctl times the KL of each token from its reward. false: add kl_ctl times the KL to the loss",
        only_with=_KL,
    )

    @property
    def kl_loss_coef(self) -> float:
        """Coefficient of the KL term in the loss. 0 if the KL is subtracted from the rewards instead."""
        return 0.0 if self.use_kl_in_reward else self.kl_ctl

    @property
    def kl_reward_coef(self) -> float:
        """Coefficient of the KL that is subtracted from the rewards. 0 if the KL is a term of the loss instead."""
        return self.kl_ctl if self.use_kl_in_reward else 0.0

    @require(
        "adv_norm.mean_leave1out",
        "needs one advantage per sample. With use_kl_in_reward, only group advantages are per sample; set "
        "adv_norm.mean_level=group",
    )
    def leave_one_out_is_over_samples(self) -> bool:
        norm = self.adv_norm
        return norm is None or not norm.mean_leave1out or not self.use_kl_in_reward or norm.mean_level == "group"


@dataclass(kw_only=True)
class RefConfig(Section):
    """The frozen reference model of a policy algorithm."""

    heading = "Train"
    path: str | None = setting(
        None,
        help="Model folder or hub id of the reference model. null: the initial weights of the actor, loaded once for "
        "both",
        flag=_REF_CKPT,
    )
    offload: bool = setting(False, help="Keep the reference model in host memory while unused (CUDA)", on_resume=SPEED)


@dataclass(kw_only=True)
class ScoringRefConfig(Section):
    """A reference model that computes the log-probabilities of all rows before training, and is then released."""

    heading = "Train"
    path: str | None = setting(
        None, help="Model folder or hub id of the reference model. null: the actor before training", flag=_REF_CKPT
    )


@dataclass(kw_only=True)
class CriticConfig(Section):
    """The value function of PPO: a transformer body whose head computes one value per token."""

    heading = "Train"
    path: str | None = setting(
        None,
        help="Model folder or hub id of the critic. null: the body of the actor, with a new value head",
        flag="--critic-ckpt",
        on_resume=FROM_STATE,
    )
    init_from_scratch: bool = setting(
        False,
        help="Start the critic from random weights (by seed) with the architecture in config.json of path",
        on_resume=FROM_STATE,
    )
    offload: bool = setting(
        False, help="As actor.offload, and unused weights are in host memory, too (CUDA)", on_resume=SPEED
    )
    mask_no_eos_with_zero: bool = setting(
        False,
        help="Do not train the critic on completions that were cut off. With actor.mask_no_eos_with_zero, neither "
        "model trains on them",
    )
    warmup_steps: int = setting(
        20, help="Steps at the start of the run that train only the critic", ge=0, flag="--critic-warmup-steps"
    )
    eps_clip: float = setting(
        0.5,
        help="Clip range of the value loss: how far a value may move from that before the update",
        gt=0,
        flag="--value-clip-eps",
    )
    value_loss_coef: float = setting(
        0.5, help="The value loss is multiplied by this number", gt=0, flag="--value-loss-coef"
    )
    ppo_n_minibatches: int = setting(1, help="Optimizer steps of the critic in each pass over the rollout batch", gt=0)
    epochs: int = setting(1, help="Passes of the critic over the rollout batch. Targets and value clip stay", gt=0)
    freeze_attention: bool = setting(
        False, help="Do not train the attention layers of the critic, as in SAO (arXiv 2607.07508)", on_resume=NEVER
    )
    gradient_checkpointing: bool = setting(
        True,
        help="Recompute the activations of the critic in the backward pass to save memory",
        flag="--activation-checkpointing",
        on_resume=SPEED,
    )
    mb_spec: MicroBatchSpec = setting(
        factory=MicroBatchSpec, help="Size of the critic's micro-batches", on_resume=SPEED
    )
    optimizer: OptimizerConfig = setting(
        factory=lambda: OptimizerConfig(lr=1e-5),
        help="Optimizer and learning-rate schedule of the critic",
        flags={
            "lr": Flag("--critic-lr", help="Peak learning rate of the critic. 0: its weights do not change"),
            "type": ADAM_8BIT,
        },
    )
