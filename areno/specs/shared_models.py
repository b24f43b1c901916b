"""Which roles share one loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areno.specs.role import RoleSpec


def have_same_folder(one: RoleSpec, other: RoleSpec) -> bool:
    return one.path == other.path or Path(one.path).resolve() == Path(other.path).resolve()


def is_base_of_actor(role: RoleSpec, actor: RoleSpec) -> bool:
    """Return whether a role is the frozen base model of an actor with adapters. It then shares its weights."""
    is_plain = role.optimizer is None and role.lora is None and role.head == "lm"
    return actor.lora is not None and is_plain and have_same_folder(role, actor)


def have_same_base(one: RoleSpec, other: RoleSpec) -> bool:
    """Return whether two frozen roles differ only in the weights of their adapters."""
    if one.lora is None or other.lora is None or one.optimizer is not None or other.optimizer is not None:
        return False
    same = one.lora.adapters == other.lora.adapters and one.offload == other.offload
    same = same and (one.fp8, one.fp8_kv) == (other.fp8, other.fp8_kv)
    return same and (one.path, one.head) == (other.path, other.head)


def roles_to_load(roles: Mapping[str, RoleSpec], actor: RoleSpec) -> dict[str, RoleSpec]:
    """Return the roles that load a model of their own. Each other role uses the model of an earlier one."""
    found: dict[str, RoleSpec] = {}
    for name, role in roles.items():
        if not is_base_of_actor(role, actor) and not any(have_same_base(role, own) for own in found.values()):
            found[name] = role
    return found
