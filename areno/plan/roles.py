"""What a script asks of Trainer.ensure_roles, as the engine wants it: which head, which optimizer, which folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areno.engine.spec import EngineSpec, RoleSpec
from areno.errors import ConfigError, Problem
from areno.plan.plan import whole_model
from areno.types import ModelRole


def script_roles(roles: Any, engine: EngineSpec) -> dict[str, RoleSpec]:
    """The models that `roles` describe, a mapping of names to ModelRole; a RoleSpec in it stays what it is.

    A trainable role has the optimizer settings of the policy with its own learning rate. Raises one ConfigError with
    all that is wrong with them, CheckpointError for a path that is no model.
    """
    if not isinstance(roles, Mapping):
        found = f"is a {type(roles).__name__}; a dictionary of role names to areno.ModelRole is expected"
        raise ConfigError([Problem("roles", found)])
    problems = [problem for name, role in roles.items() for problem in _problems(name, role)]
    if problems:
        raise ConfigError(problems)
    return {name: role if isinstance(role, RoleSpec) else _spec(role, engine) for name, role in roles.items()}


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
    if role.trainable and name in ("ref", "reward"):
        yield Problem(f"{key}.trainable", f"is True, but a role named {name!r} is only scored; set it to False")


def _spec(role: ModelRole, engine: EngineSpec) -> RoleSpec:
    key = f"roles[{role.name!r}].path"
    folder = whole_model(str(role.path), key)
    valued = role.name in ("critic", "reward") or (role.name != "ref" and (role.trainable or _has_value_head(folder)))
    optimizer = None
    if role.trainable:
        assert engine.optimizer is not None  # every engine that a script starts has one
        lr = engine.optimizer.lr if role.optimizer_lr is None else role.optimizer_lr
        optimizer = dataclasses.replace(engine.optimizer, lr=lr)
    return RoleSpec(
        path=folder,
        head="value" if valued else "lm",
        key=key,
        optimizer=optimizer,
        gradient_checkpointing=engine.gradient_checkpointing,
        needs_head=role.name == "reward",
    )


def _has_value_head(folder: str) -> bool:
    """Whether config.json says so. What is wrong with the folder is for the engine to tell."""
    try:
        names = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in names)
