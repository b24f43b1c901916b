"""areno: reinforcement-learning post-training of language models. Public names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areno.files import interrupts
from areno.version import __version__ as __version__

interrupts.exit_on_interrupt()  # a command imports this module first

__all__ = [
    "Areno",
    "ArenoConfig",
    "DPOTrainer",
    "DistillTrainer",
    "KTOTrainer",
    "ModelRole",
    "OnlineDPOTrainer",
    "PPOTrainer",
    "PolicyOnlyTrainer",
    "ProcessRewardTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "SamplingParams",
    "TrainSequence",
    "Trainer",
]

if TYPE_CHECKING:
    from areno.api.trainer import Trainer
    from areno.plan.sdk_arguments import Areno, ArenoConfig
    from areno.trainers.distill import DistillTrainer
    from areno.trainers.dpo import DPOTrainer
    from areno.trainers.kto import KTOTrainer
    from areno.trainers.online_dpo import OnlineDPOTrainer
    from areno.trainers.policy_only import PolicyOnlyTrainer
    from areno.trainers.ppo import PPOTrainer
    from areno.trainers.process_reward import ProcessRewardTrainer
    from areno.trainers.reward_model import RewardModelTrainer
    from areno.trainers.sft import SFTTrainer
    from areno.types import ModelRole, SamplingParams, TrainSequence

_NAMES = {
    "areno.plan.sdk_arguments": ("Areno", "ArenoConfig"),
    "areno.api.trainer": ("Trainer",),
    "areno.trainers.distill": ("DistillTrainer",),
    "areno.trainers.dpo": ("DPOTrainer",),
    "areno.trainers.kto": ("KTOTrainer",),
    "areno.trainers.online_dpo": ("OnlineDPOTrainer",),
    "areno.trainers.policy_only": ("PolicyOnlyTrainer",),
    "areno.trainers.ppo": ("PPOTrainer",),
    "areno.trainers.process_reward": ("ProcessRewardTrainer",),
    "areno.trainers.reward_model": ("RewardModelTrainer",),
    "areno.trainers.sft": ("SFTTrainer",),
    "areno.types": ("ModelRole", "SamplingParams", "TrainSequence"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'areno' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
