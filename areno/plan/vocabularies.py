"""Compares the vocabularies of other models with that of the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from areno.config.teacher import is_teacher
from areno.engine.decoder.grammar import to_ranges
from areno.errors import ConfigError, Problem, all_of
from areno.files.paths import name_model_setting_in_errors
from areno.models.registry import load_config
from areno.plan.folders import load_tokenizer
from areno.plan.plan import TrainerPlan
from areno.specs.role import RoleSpec
from areno.specs.shared_models import have_same_folder


def complete_roles(roles: Mapping[str, RoleSpec], plan: TrainerPlan) -> dict[str, RoleSpec]:
    """Fill the fields of roles that depend on the actor, and return the roles.

    A role without a folder gets that of the actor. A teacher with another vocabulary gets `common_ids`.
    """
    roles = {name: replace(role, path=role.path or plan.spec.actor.path) for name, role in roles.items()}
    teachers = {name: partial(_with_common_ids, role, plan) for name, role in roles.items() if is_teacher(name)}
    return {**roles, **dict(zip(teachers, all_of(*teachers.values()), strict=True))}


def _with_common_ids(role: RoleSpec, plan: TrainerPlan) -> RoleSpec:
    """Return a teacher with its `common_ids`. Raises ConfigError if it lacks ids of the actor, or ids differ."""
    if have_same_folder(role, plan.spec.actor):
        return role
    with name_model_setting_in_errors(role.key):
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
    return replace(role, common_ids=to_ranges([number for token, number in own.items() if token in other]))
