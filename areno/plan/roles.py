"""The specifications of the models for which a configuration asks, or a script that calls Trainer.ensure_roles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig, HeadName, ReferencedExperimentConfig
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.teacher import ROLE, is_teacher
from areno.errors import CheckpointError, ConfigError, Problem, all_of
from areno.models.config import TransformerConfig
from areno.models.registry import head_of
from areno.plan.folders import full_model_folder
from areno.plan.lora import lora_spec, teacher_adapters
from areno.schema.fields import Section
from areno.specs.role import LoraSpec, RoleSpec
from areno.types import ModelRole

_HEADS: dict[str, HeadName] = {
    "actor": "lm",  # unless the algorithm trains another one
    "ref": "lm",
    ROLE: "lm",
    "judge": "lm",
    "reward": "value",
    "critic": "value",
}
_COPIED = (
    "optimizer",
    "gradient_checkpointing",
    "freeze_attention",
    "router_aux_loss_coef",
)  # settings that sections and RoleSpec share


def actor_role(config: ExperimentConfig, path: str, model: TransformerConfig) -> RoleSpec:
    """Return the specification of the trained model. Fields from its tokenizer are still unset."""
    return replace(_role_spec(config, "actor", path, lora_spec(config.actor, model)), head=config.head)


def experiment_roles(
    config: ExperimentConfig, folder_of: Callable[[str, str], str] = full_model_folder
) -> dict[str, RoleSpec]:
    """Return the specifications of the models other than the actor, by role, that a configuration asks for.

    `folder_of` returns a model's folder for (path or hub id, name of the setting). A path "" in a specification stands
    for the folder of the actor.
    """

    def role_spec(name: str) -> RoleSpec:
        key, path, _ = _role_sections(config)[name]
        lora = teacher_adapters(config.actor, path, key) if path and is_teacher(name) else None
        # Adapters are on a copy of the actor's base.
        return _role_spec(config, name, folder_of(path, key) if path and lora is None else "", lora)

    roles = {name: partial(role_spec, name) for name in _role_sections(config) if name != "actor"}
    return dict(zip(roles, all_of(*roles.values()), strict=True))


def _role_sections(config: ExperimentConfig) -> dict[str, tuple[str, str | None, Section]]:
    """Return role -> (name of its path setting, path, section), the actor first."""
    found: dict[str, tuple[str, str | None, Section]] = {"actor": ("actor.path", config.actor.path, config.actor)}
    if isinstance(config, ReferencedExperimentConfig) and config.ref.path not in (None, config.actor.path):
        found["ref"] = ("ref.path", config.ref.path, config.ref)
    if not isinstance(config, PolicyExperimentConfig):
        return found
    teacher, reward = config.teacher, config.reward
    if config.ref is not None:
        found["ref"] = ("ref.path", config.ref.path, config.ref)
    if teacher is not None:
        found |= {name: (teacher.path_key(name), path, teacher) for name, path in teacher.paths.items()}
    if reward.path is not None:
        found["reward"] = ("reward.path", reward.path, reward)
    if reward.judge.path is not None:
        found["judge"] = ("reward.judge.path", reward.judge.path, reward.judge)
    if isinstance(config, CriticExperimentConfig):
        found["critic"] = ("critic.path", config.critic.path, config.critic)
    return found


def _role_spec(config: ExperimentConfig, name: str, folder: str, lora: LoraSpec | None) -> RoleSpec:
    key, _, section = _role_sections(config)[name]
    given, in_training, fp8_kv = vars(section), False, False
    if isinstance(config, PolicyExperimentConfig):
        fp8_kv = config.rollout.fp8_kv and name in ("actor", "ref")
        in_training = (
            config.uses_actor_as_teacher if name == "actor" else is_teacher(name) and config.divergence is not None
        )
    return replace(
        _named_role(name, folder, key),
        **{setting: given[setting] for setting in _COPIED if setting in given},
        fp8_kv=fp8_kv,
        offload="offload" in given and config.offloads(section),
        random_init=given.get("init_from_scratch", False),
        lora=lora,
        fp8=config.actor.fp8 if name in ("actor", "ref") else None,
        in_training=in_training,
    )


def _named_role(name: str, folder: str, key: str, trainable: bool = False) -> RoleSpec:
    """Return a specification with the fields that follow from a role's name and folder.

    `key` is the setting of the path. A reward model may be a process reward model. A role that `_HEADS` does not name
    gets the head of its folder, or a value head if it is trainable and its folder has none.
    """
    head = _HEADS.get(ROLE if is_teacher(name) else name)
    if head is None or name == "reward":
        own = _head_of(folder)
        if head is None:
            head = "value" if trainable and own == "lm" else own
        elif own == "step":
            head = own
    return RoleSpec(path=folder, head=head, key=key, needs_head=name == "reward", own_tokenizer=name == "judge")


def script_roles(roles: Any, actor: RoleSpec) -> dict[str, RoleSpec]:
    """Return the specifications, by role, of the models that a script requests by ModelRole or RoleSpec.

    A RoleSpec is not changed. A trainable role gets the policy's optimizer settings, with its own learning rate if it
    has one. Roles are offloaded if the policy is.
    """
    if not isinstance(roles, Mapping):
        found = f"is a {type(roles).__name__}; a dictionary of role names to areno.ModelRole is expected"
        raise ConfigError([Problem("roles", found)])
    problems = [problem for name, role in roles.items() for problem in _role_problems(name, role)]
    if problems:
        raise ConfigError(problems)
    return {name: role if isinstance(role, RoleSpec) else _script_role(role, actor) for name, role in roles.items()}


def _role_problems(name: Any, role: Any) -> Iterator[Problem]:
    key = f"roles[{name!r}]"
    if not isinstance(name, str):
        yield Problem(key, "is named by no string; role names are strings, such as 'critic'")
        return
    if name == "actor":
        yield Problem(key, "the actor is the policy that init() loads; use another name")
    if isinstance(role, RoleSpec):
        return
    if not isinstance(role, ModelRole):
        yield Problem(key, f"is a {type(role).__name__}; an areno.ModelRole is expected")
        return
    if role.name != name:
        yield Problem(f"{key}.name", f"is {role.name!r}; it must be the key, {name!r}")
    if not isinstance(role.path, (str, Path)) or not str(role.path).strip():
        yield Problem(f"{key}.path", f"is {role.path!r}; a model folder or hub id is expected")
    if not isinstance(role.trainable, bool):
        yield Problem(f"{key}.trainable", f"is {role.trainable!r}; True or False is expected")
        return
    lr = role.optimizer_lr
    if lr is not None and (isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 <= lr < math.inf):
        yield Problem(f"{key}.optimizer_lr", f"is {lr!r}; a number of at least 0 is expected")
    elif lr is not None and not role.trainable:
        found = f"is {lr}, but the role is not trainable; set trainable=True or leave it out"
        yield Problem(f"{key}.optimizer_lr", found)
    if role.trainable and (name in ("ref", "judge", "reward") or is_teacher(name)):
        yield Problem(f"{key}.trainable", f"is True, but a role named {name!r} is only scored; set it to False")


def _script_role(role: ModelRole, actor: RoleSpec) -> RoleSpec:
    key = f"roles[{role.name!r}].path"
    optimizer = None
    if role.trainable:
        optimizer = actor.optimizer
        assert optimizer is not None  # every engine that a script starts has one
        optimizer = replace(optimizer, lr=optimizer.lr if role.optimizer_lr is None else role.optimizer_lr)
    return replace(
        _named_role(role.name, full_model_folder(str(role.path), key), key, role.trainable),
        optimizer=optimizer,
        gradient_checkpointing=actor.gradient_checkpointing,
        fp8_kv=actor.fp8_kv and role.name == "ref",
        fp8=actor.fp8 if role.name == "ref" else None,
        offload=actor.offload,
        in_training=is_teacher(role.name),
    )


def _head_of(folder: str) -> HeadName:
    """Return the kind of head in a folder. "lm" if the model is unsupported; `load_config` then raises the error."""
    try:
        return head_of(Path(folder))
    except CheckpointError:
        return "lm"
