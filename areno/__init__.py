"""areno: reinforcement-learning post-training of language models. The public names, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Areno",
    "ArenoConfig",
    "DPOTrainer",
    "ModelRole",
    "PPOTrainer",
    "PolicyOnlyTrainer",
    "SFTTrainer",
    "SamplingParams",
    "TrainSequence",
    "Trainer",
]

if TYPE_CHECKING:
    from areno.api.inputs.backend import Areno, ArenoConfig
    from areno.api.trainer import Trainer
    from areno.api.trainers.dpo import DPOTrainer
    from areno.api.trainers.policy_only import PolicyOnlyTrainer
    from areno.api.trainers.ppo import PPOTrainer
    from areno.api.trainers.sft import SFTTrainer
    from areno.types import ModelRole, SamplingParams, TrainSequence

_HOME = {
    "Areno": "areno.api.inputs.backend",
    "ArenoConfig": "areno.api.inputs.backend",
    "DPOTrainer": "areno.api.trainers.dpo",
    "ModelRole": "areno.types",
    "PPOTrainer": "areno.api.trainers.ppo",
    "PolicyOnlyTrainer": "areno.api.trainers.policy_only",
    "SFTTrainer": "areno.api.trainers.sft",
    "SamplingParams": "areno.types",
    "TrainSequence": "areno.types",
    "Trainer": "areno.api.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'areno' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
