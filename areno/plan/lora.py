"""Makes the engine's specification of LoRA adapters from settings, and finds the base model of an adapter folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from areno.config.lora import ALL_LINEAR, FROM_FOLDER, LoraConfig
from areno.config.models import ModelConfig
from areno.errors import CheckpointError, ConfigError, Key, Problem, did_you_mean, keys_renamed, suggestion
from areno.files.paths import existing_path, name_model_setting_in_errors
from areno.layers.config import AdapterSpec
from areno.models.adapter_shapes import EXPERTS, fused_names, linear_shapes
from areno.models.config import TransformerConfig
from areno.models.folder import HUB_ID, TOKENIZER, resolve_model_folder
from areno.schema.values import format_value
from areno.specs.role import LoraSpec

KEY = "actor.init_lora_from"
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
Actor = TypeVar("Actor", bound=ModelConfig)


def lora_spec(actor: ModelConfig, model: TransformerConfig) -> LoraSpec | None:
    """Return the specification of the LoRA adapters that the settings ask for. None if actor.use_lora is false.

    Raises ConfigError if they do not fit the base model, or if they differ from the adapters in actor.init_lora_from.
    """
    if not actor.use_lora:
        return None
    local = existing_path(actor.path)
    base = actor.path if local is None else str(local)
    if actor.init_lora_from is None:
        if problems := [*_target_problems(actor, model), *_rank_problems(actor, model)]:
            raise ConfigError(problems)
        targets = tuple(_adapted_shapes(actor, model))
        adapters = AdapterSpec(actor.lora_rank, float(actor.lora_alpha), targets, actor.use_rslora)
        return LoraSpec(adapters=adapters, base=base)
    from areno.models.adapters import read_adapter_config  # imports torch

    with name_model_setting_in_errors(KEY):
        folder = str(resolve_model_folder(existing_path(actor.init_lora_from) or actor.init_lora_from, "adapter"))
        adapters, trained_on = read_adapter_config(folder, model)
    if problems := list(_contradiction_problems(adapters, actor)):
        raise ConfigError(problems)
    return LoraSpec(adapters=adapters, init_from=folder, base=base, trained_on=trained_on)


def teacher_adapters(actor: ModelConfig, path: str, key: str) -> LoraSpec | None:
    """Return the adapters of a teacher that is the actor's base model with trained adapters.

    None if `path` holds a whole model, or does not exist. Errors name the setting `key`.
    """
    from areno.models.registry import load_config

    with keys_renamed({"actor.path": key, KEY: key}.get):
        folder = adapter_folder(path)
        if folder is None:
            return None
        of_actor = ModelConfig(path=actor.path, use_lora=True, init_lora_from=str(folder))
        return lora_spec(of_actor, load_config(resolve_model_folder(existing_path(actor.path) or actor.path)))


def _adapted_shapes(actor: LoraConfig, model: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return name -> (output features, input features) of the linear layers that actor.target_modules selects."""
    chosen = actor.target_modules
    return {name: shape for name, shape in linear_shapes(model).items() if name in chosen or chosen == [ALL_LINEAR]}


def _target_problems(actor: LoraConfig, model: TransformerConfig) -> Iterator[Problem]:
    known, within = list(linear_shapes(model)), fused_names(model)
    for name in actor.target_modules:
        if name not in (*known, ALL_LINEAR):
            there = f"there are {', '.join(known)}, or {ALL_LINEAR} for all of them"
            layer = name.rpartition(".")[2]  # of a name in the files, such as mlp.shared_expert.gate_proj
            guess = suggestion([layer]) if layer in known else did_you_mean(name, known)
            what = f"is no linear layer of the model{guess}"
            if model.experts is not None and name in _OF_EXPERTS:
                what = f"is no layer with an adapter of its own: experts have {' and '.join(EXPERTS.values())}"
            elif name in within:
                what = f"is a part of {within[name]} in the model's files, and that has one adapter for all its parts"
            yield Problem("actor.target_modules", f"has {name}, which {what}; {there}")


def _rank_problems(actor: LoraConfig, model: TransformerConfig) -> Iterator[Problem]:
    """Yield a problem if lora_rank exceeds the smaller dimension of every layer that gets adapters."""
    widths = [min(shape) for shape in _adapted_shapes(actor, model).values()]
    if widths and actor.lora_rank > (most := max(widths)):
        text = "is {}, but none of the layers with adapters is wider than {}, so a higher rank adds nothing"
        yield Problem("actor.lora_rank", text, actor.lora_rank, most)


def _contradiction_problems(adapters: AdapterSpec, actor: LoraConfig) -> Iterator[Problem]:
    """Yield a problem for each adapter setting that the user has changed and that contradicts `adapters`."""
    theirs = dict(
        zip(FROM_FOLDER, (adapters.rank, adapters.alpha, list(adapters.targets), adapters.use_rslora), strict=True)
    )
    for name, value in theirs.items():
        given = vars(actor)[name]
        same = sorted(given) == sorted(value) if isinstance(value, list) else given == value
        if not same and not actor.is_default(name):
            text = "is {}, but the adapters of {} have {}; leave it out"
            yield Problem(f"actor.{name}", text, format_value(given), Key(KEY), format_value(value))


def adapter_folder(path: str) -> Path | None:
    """Return the local folder of adapters. A hub id is downloaded. None if `path` is a whole model."""
    from areno.models.adapters import is_adapter_folder

    folder = existing_path(path)
    if folder is None and HUB_ID.fullmatch(path):
        with name_model_setting_in_errors("actor.path"):
            folder = resolve_model_folder(path)
    return folder if folder is not None and is_adapter_folder(folder) else None


def with_model(actor: Actor, path: str) -> Actor:
    """Return a copy of the actor's settings with another model.

    If `path` holds adapters, the copy has their base model as its path, and LoRA starts from these adapters.
    """
    no_lora = vars(LoraConfig())
    folder = adapter_folder(path)
    if folder is None:
        return replace(actor, **no_lora, path=path, init_from_scratch=False)
    from areno.models.adapters import base_model_of

    base = base_model_of(folder)
    if existing_path(base) is None and not HUB_ID.fullmatch(base):
        text = "{} belongs to the model {}, which is not there; correct base_model_name_or_path in its "
        raise CheckpointError(text + "adapter_config.json", folder, base)
    lora = {**no_lora, "use_lora": True, "init_lora_from": str(folder)}
    return replace(actor, **lora, path=base, init_from_scratch=False)


def folder_with_tokenizer(path: str) -> str | None:
    """Return the local folder of adapters if it also has tokenizer files, else None."""
    folder = adapter_folder(path)
    return str(folder) if folder is not None and any((folder / name).is_file() for name in TOKENIZER) else None
