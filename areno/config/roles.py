"""Settings of the models beside the actor: the reference and the critic. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.schema.fields import Section, setting


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
