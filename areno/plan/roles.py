"""The specifications of the models beside the actor, as a configuration or a script asks for them.

`script_roles` is for models that a script requests by Trainer.ensure_roles: it chooses the head, the optimizer and the
folder of each model. `with_common_ids` compares the vocabularies of teachers with that of the actor.
"""

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
from areno.engine.decoder.grammar import ranges_of
from areno.errors import CheckpointError, ConfigError, Problem, all_of
from areno.files.paths import model_setting
from areno.models.registry import head_of, load_config
from areno.plan.lora import teacher_adapters
from areno.plan.plan import TrainerPlan, check_copies, load_tokenizer, whole_model
from areno.specs.role import RoleSpec
from areno.specs.shared_models import same_folder
from areno.types import ModelRole


def experiment_roles(
    config: ExperimentConfig, folder_of: Callable[[str, str], str] = whole_model
) -> dict[str, RoleSpec]:
    """Return role -> specification of the models beside the actor that a configuration asks for.

    `folder_of` returns a model's folder from (path or hub id, name of the setting). In a specification, the path ""
    stands for the folder of the actor.
    """
    if isinstance(config, ReferencedExperimentConfig) and config.ref.path not in (None, config.actor.path):
        return {"ref": RoleSpec(path=folder_of(str(config.ref.path), "ref.path"), head="lm", key="ref.path")}
    if not isinstance(config, PolicyExperimentConfig):
        return {}

    def role(section_key: str, section: Any, head: HeadName, **more: Any) -> RoleSpec:
        key = f"{section_key}.path"
        path = folder_of(section.path, key) if section.path else ""
        if section_key == "reward" and _head_of(path) == "step":
            head = "step"
        return RoleSpec(path=path, head=head, key=key, offload=config.offloads(section), **more)

    roles: dict[str, Callable[[], RoleSpec]] = {}
    if config.ref is not None:
        roles["ref"] = partial(role, "ref", config.ref, "lm")
    if config.teacher is not None and not config.teacher.follows_actor:
        for name in config.teacher.paths:
            roles[name] = partial(_teacher_role, config, name, folder_of)
    if config.reward.path is not None:
        roles["reward"] = partial(role, "reward", config.reward, "value", needs_head=True)
    if config.reward.judge.path is not None:
        roles["judge"] = partial(role, "reward.judge", config.reward.judge, "lm", own_tokenizer=True)
    if isinstance(config, CriticExperimentConfig):
        critic = config.critic
        names = ("optimizer", "gradient_checkpointing")
        trained = {name: vars(critic)[name] for name in names} | {"random_init": critic.init_from_scratch}
        roles["critic"] = partial(role, "critic", critic, "value", **trained)
    return dict(zip(roles, all_of(*roles.values()), strict=True))


def _teacher_role(config: PolicyExperimentConfig, name: str, folder_of: Callable[[str, str], str]) -> RoleSpec:
    teacher = config.teacher
    assert teacher is not None
    path, key = teacher.paths[name], teacher.key_of(name)
    lora = teacher_adapters(config.actor, path, key) if path else None
    return RoleSpec(
        path=folder_of(path, key) if path and lora is None else "",  # adapters: on a copy of the actor's base
        key=key,
        offload=config.offloads(teacher),
        lora=lora,
        in_training=teacher.divergence is not None,
    )


def check_plan(config: ExperimentConfig, plan: TrainerPlan, roles: Mapping[str, RoleSpec]) -> dict[str, RoleSpec]:
    """Check a plan together with the models beside the actor, and return these `with_common_ids`."""
    check_copies(config, plan.spec)
    return with_common_ids(roles, plan)


def with_common_ids(roles: Mapping[str, RoleSpec], plan: TrainerPlan) -> dict[str, RoleSpec]:
    """Return the roles, with `common_ids` for teachers whose vocabulary differs from the actor's."""
    teachers = {name: partial(_with_common_ids, role, plan) for name, role in roles.items() if is_teacher(name)}
    return {**roles, **dict(zip(teachers, all_of(*teachers.values()), strict=True))}


def _with_common_ids(role: RoleSpec, plan: TrainerPlan) -> RoleSpec:
    """Return one teacher. Raises ConfigError if tokens have different ids, or the teacher lacks ids of the actor."""
    if not role.path or same_folder(role, plan.spec.actor):
        return role
    with model_setting(role.key):
        theirs, ours = (load_config(path).vocab_size for path in (role.path, plan.spec.actor.path))
    own = other = plan.tokenizer.get_vocab()
    if any((Path(role.path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        other = load_tokenizer(role.path).get_vocab()
    if theirs == ours and own == other:
        return role
    names = {number: token for token, number in other.items()}
    hint = "; token by token, only models with the same tokens can be compared, so choose a teacher of the same family"
    for token, number in own.items():
        if other.get(token, number) != number or names.get(number, token) != token:
            text = "has another tokenizer than the actor: {!r} is token {} of the actor and {} of the teacher" + hint
            raise ConfigError(Problem(role.key, text, token, number, other.get(token, "none")))
    if (most := max(own.values())) >= theirs:
        text = "has {} rows in its vocabulary (vocab_size), and the tokenizer of the actor has the token id {}" + hint
        raise ConfigError(Problem(role.key, text, theirs, most))
    return replace(role, common_ids=ranges_of([number for token, number in own.items() if token in other]))


def script_roles(roles: Any, actor: RoleSpec) -> dict[str, RoleSpec]:
    """Return role -> specification of the models that a script requests by ModelRole. A RoleSpec is kept.

    A trainable role gets the optimizer settings of the policy, with its own learning rate if it has one. If the policy
    is offloaded, so are the roles.
    """
    if not isinstance(roles, Mapping):
        found = f"is a {type(roles).__name__}; a dictionary of role names to areno.ModelRole is expected"
        raise ConfigError([Problem("roles", found)])
    problems = [problem for name, role in roles.items() for problem in _problems(name, role)]
    if problems:
        raise ConfigError(problems)
    return {name: role if isinstance(role, RoleSpec) else _spec(role, actor) for name, role in roles.items()}


_SCORED: dict[str, HeadName] = {"ref": "lm", ROLE: "lm", "judge": "lm", "reward": "value"}
"""Roles that are never trained -> the head of their model."""


def _problems(name: Any, role: Any) -> Iterator[Problem]:
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
    if role.trainable and (name in _SCORED or is_teacher(name)):
        yield Problem(f"{key}.trainable", f"is True, but a role named {name!r} is only scored; set it to False")


def _spec(role: ModelRole, actor: RoleSpec) -> RoleSpec:
    """Make the specification of a role from a script's ModelRole.

    The model gets a value head if the role is "critic" or "reward". A reward model may also be a process reward model.
    Any other role except those of `_SCORED` gets the head of its folder, or a value head if it is trainable.
    """
    key = f"roles[{role.name!r}].path"
    folder = whole_model(str(role.path), key)
    teaches = is_teacher(role.name)
    own, by_name = _head_of(folder), "lm" if teaches else _SCORED.get(role.name)
    if role.name == "critic" or (by_name is None and role.trainable and own == "lm"):
        by_name = "value"
    if by_name is None or (role.name == "reward" and own == "step"):
        by_name = own
    optimizer = None
    if role.trainable:
        optimizer = actor.optimizer
        assert optimizer is not None  # every engine that a script starts has one
        optimizer = replace(optimizer, lr=optimizer.lr if role.optimizer_lr is None else role.optimizer_lr)
    return RoleSpec(
        path=folder,
        head=by_name,
        key=key,
        optimizer=optimizer,
        gradient_checkpointing=actor.gradient_checkpointing,
        offload=actor.offload,
        needs_head=role.name == "reward",
        in_training=teaches,
        own_tokenizer=role.name == "judge",
    )


def _head_of(folder: str) -> HeadName:
    """Return the kind of head in a folder. For an unsupported model "lm": `load_config` raises the error later."""
    try:
        return head_of(Path(folder))
    except CheckpointError:
        return "lm"
