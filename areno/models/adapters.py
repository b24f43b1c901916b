"""The LoRA adapters of a model: adding, initialising and disabling them, and reading and writing peft folders.

A peft folder has adapter_config.json and adapter_model.safetensors. Its tensors are named as peft names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from areno.errors import CheckpointError
from areno.layers.adapter import Adapter
from areno.layers.config import AdapterSpec
from areno.layers.experts import ExpertAdapter, ExpertMatrices
from areno.layers.linear import Linear
from areno.layers.mlp import Router
from areno.layers.parallel import ParallelGroup
from areno.layers.rotary import head_order
from areno.models.adapter_shapes import EXPERTS, linear_shapes, parameters_in_peft, target_groups
from areno.models.config import TransformerConfig
from areno.models.families import FAMILIES, module_names, stored_names
from areno.models.folder import (
    ADAPTER_CONFIG,
    TOKENIZER,
    RawConfig,
    copy_tokenizer_files,
    join_first_names,
    open_safetensors,
    read_json,
    resolve_model_folder,
    write_json,
)
from areno.models.saving import (
    gather_tensors,
    record_copies_event,
    sync_written,
    write_tensors,
)
from areno.models.transformer import Transformer
from areno.models.weights import (
    CheckpointEntry,
    StoredTensor,
    load_shard,
    module_head_order,
)

PREFIX = "base_model.model."  # the prefix of every tensor name in a peft folder


def add_adapters(model: Transformer, adapters: AdapterSpec) -> None:
    """Add adapters with uninitialised weights to a model, and freeze all other parameters."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, ExpertMatrices):
            if EXPERTS[name.split(".", 2)[2]] in adapters.targets:
                module.add_adapter(adapters)
        elif isinstance(module, Linear) and not isinstance(module, Router):
            named = target_groups(name.split(".", 2)[2], model.config)
            if chosen := [group for each, group in named.items() if each in adapters.targets]:
                module.add_adapter(chosen, adapters)


def init_adapters(model: Transformer, seed: int) -> None:
    """Initialise the adapters so that they do not change the results yet. The values depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in _adapted_modules(model):
        adapter.init_weights(generator)


def stack_adapters(model: Transformer) -> None:
    """Move the weight of each adapted layer into a larger tensor with room for a copy of A (`Adapter.stack`)."""
    for module in model.modules():
        if isinstance(module, Linear) and module.adapter is not None:
            module.adapter.stack(module.weight, module.bias)


def refresh_adapters(model: Transformer) -> None:
    """Copy each A below its layer's weight. Call this before sampling, because training changes A."""
    for module in model.modules():
        if isinstance(module, Adapter):
            module.refresh_stacked()


def adapter_weights(model: Transformer) -> list[torch.Tensor]:
    """Return copies of this rank's adapter matrices, for `set_adapter_weights`."""
    return [matrix.detach().clone() for matrix in _matrices(model)]


@torch.no_grad()
def set_adapter_weights(model: Transformer, weights: Sequence[torch.Tensor]) -> None:
    for matrix, values in zip(_matrices(model), weights, strict=True):
        matrix.copy_(values)
    refresh_adapters(model)


def adapter_table(model: Transformer) -> list[CheckpointEntry]:
    """Return all adapter tensors with their names in peft, in a fixed order. Empty without adapters.

    Projections that the checkpoint stores as one matrix share one A, which has the name of the first projection. Each
    projection has its own B in this list, although a peft folder stores the B matrices of such projections as one
    tensor. Each expert has its own A and B, too.
    """
    found = []
    for name, adapter in _adapted_modules(model):
        if isinstance(adapter, ExpertAdapter):
            _, layer, inner = name.split(".", 2)
            within = f"{PREFIX}model.layers.{layer}.mlp.{EXPERTS[inner]}"
            for kind, parameter in (("A", adapter.a), ("B", adapter.b)):
                for expert, part in enumerate(adapter.layout[kind.lower()]):
                    found.append(CheckpointEntry(f"{within}.{expert}.lora_{kind}.weight", parameter, part))
            continue
        names = [f"{PREFIX}{name_in_peft(each, model.config)}" for each in module_names(name, model.config)]
        of_a = [f"{names[first]}.lora_A.weight" for first, *_ in adapter.groups]
        of_b = [f"{names[index]}.lora_B.weight" for group in adapter.groups for index in group]
        found += map(CheckpointEntry, of_a, [adapter.a] * len(of_a), adapter.layout["a"])
        found += map(CheckpointEntry, of_b, [adapter.b] * len(of_b), adapter.layout["b"])
    return found


def name_in_peft(name: str, config: TransformerConfig) -> str:
    """Return the name of a module as peft has it, given its name in a text model."""
    if not config.within:
        return name
    beginnings = FAMILIES[config.family].beginnings
    return next(within for within, own in beginnings.items() if own == "model.") + name.removeprefix("model.")


def stored_adapters(model: Transformer) -> dict[str, StoredTensor]:
    """Return the tensors of a peft folder by name. Each lists the adapter tensors that are stacked in it.

    Of experts, peft stacks the A matrices by rows and puts the columns of the B matrices in turn. Its wrappers of a
    layer's gate_up_proj and down_proj are nested, so that the former is the base_layer of the latter.
    """
    config = model.config
    of_experts = {name.split(".", 2)[2] for name, each in _adapted_modules(model) if isinstance(each, ExpertAdapter)}
    order, whole = head_order(config.rope, config.head_dim), stored_names(config)
    found: dict[str, StoredTensor] = {}
    for entry in adapter_table(model):
        module, kind = entry.name.rsplit(".lora_", 1)
        if ".mlp.experts." in module:
            wrapper, parameter, _ = module.rsplit(".", 2)
            inside = ".base_layer" if parameter == "gate_up_proj" and len(of_experts) == 2 else ""
            name, head_rows = f"{wrapper}{inside}.lora_{kind}", None
        else:
            inner = ".".join(module.split(".")[-2:])
            name = entry.name.replace(inner, whole.get(inner, inner))
            head_rows = module_head_order(inner, order, config) if kind == "B.weight" else None
        by_column = ".mlp.experts." in module and kind == "B.weight"
        stored = found.setdefault(name, StoredTensor([], [], by_column))
        stored.entries.append(entry)
        stored.orders.append(head_rows)
    return found


@contextmanager
def without_adapters(model: Transformer) -> Iterator[None]:
    """Disable all adapters inside the `with` block. CUDA graphs captured before the block still use them."""
    adapters = [adapter for _, adapter in _adapted_modules(model)]
    try:
        for adapter in adapters:
            adapter.on = False
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def _matrices(model: Transformer) -> Iterator[torch.Tensor]:
    for _, adapter in _adapted_modules(model):
        yield from (adapter.a, adapter.b)


def _adapted_modules(model: Transformer) -> Iterator[tuple[str, Adapter | ExpertAdapter]]:
    for name, module in model.named_modules():
        if isinstance(module, (Linear, ExpertMatrices)) and module.adapter is not None:
            yield name, module.adapter


WEIGHTS = "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Fields that do not change the computation, or only describe how the adapters were trained.
_HARMLESS = frozenset(
    [
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "megatron_config",
        "qalora_group_size",
        "task_type",
        "loftq_config",
        "eva_config",
        "target_modules",
        "base_model_name_or_path",
        "exclude_modules",
        "runtime_config",
        "init_lora_weights",
    ]
)
_UNSUPPORTED = [
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "trainable_token_indices",
]
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # initialisations that change the base model


class PeftFolder(NamedTuple):
    adapters: AdapterSpec
    base: str  # folder or hub id of the model that the adapters were trained on, "" if not recorded


def is_adapter_folder(folder: str | Path) -> bool:
    """Return whether a folder holds adapters and no model. False if the folder does not exist."""
    folder = Path(folder).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_model_of(folder: str | Path) -> str:
    """Return the folder or hub id of the model that a peft folder's adapters were trained on."""
    file = Path(folder).expanduser() / ADAPTER_CONFIG
    raw = RawConfig(read_json(file), str(file))
    base = raw.get("base_model_name_or_path", str, "")
    if not base and not raw.problems:
        raw.add_problem("base_model_name_or_path is missing; expected the folder or hub id of the model it belongs to")
    if raw.problems:
        raise raw.error()
    return base


def read_adapter_config(path: str | Path, model: TransformerConfig) -> PeftFolder:
    """Read adapter_config.json for a model. The adapted modules are found by the tensor names in the weight file.

    Raises CheckpointError, which lists all fields that ask for something unsupported.
    """
    folder = resolve_model_folder(path)
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise CheckpointError("{} has no {}; expected a folder of peft", folder, ADAPTER_CONFIG)
    raw = RawConfig(read_json(file), str(file))
    kind = raw.get("peft_type", str)
    if kind.upper() != "LORA" and not raw.problems:
        raw.add_unsupported("peft_type", "'LORA'")
    if raw.values.get("task_type") not in (None, "CAUSAL_LM"):
        raw.add_unsupported("task_type", "'CAUSAL_LM'")
    rank, alpha = raw.get("r", int, ge=1), raw.get("lora_alpha", float, gt=0)
    use_rslora = raw.get("use_rslora", bool, False)
    if raw.get("bias", str, "none") != "none":
        raw.add_unsupported("bias", "'none'")
    init = raw.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
        raw.add_unsupported("init_lora_weights", "adapters whose base is the model as it was published")
    for name in _UNSUPPORTED:
        if raw.values.get(name):
            raw.add_unsupported(name, "none, since adapters of one rank on whole linear layers are all that there is")
    parameters = raw.get("target_parameters", list, [])
    if parameters and raw.get("lora_dropout", float, 0.0):
        raw.add_unsupported("lora_dropout", "0, since adapters of target_parameters have no dropout")
    raw.add_unknown_fields({*_HARMLESS, *_UNSUPPORTED})
    if raw.problems:
        raise raw.error()
    targets = _target_modules(folder, model, raw.values.get("target_modules"), parameters)
    return PeftFolder(AdapterSpec(rank, alpha, targets, use_rslora), raw.values.get("base_model_name_or_path") or "")


def _target_modules(folder: Path, model: TransformerConfig, given: object, parameters: list[str]) -> tuple[str, ...]:
    """Find the adapted modules, such as q_proj, by the names of the tensors.

    Raises CheckpointError unless the fields target_modules (`given`), a list of names or a regex, and
    target_parameters match all of them.
    """
    with open_safetensors(_weights_file(folder)) as tensors:
        names = list(tensors.keys())
    known = linear_shapes(model)
    of_module = {name: name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B) for name in names}
    targets = {module: _target_of(module, parameters) for module in of_module.values()}
    unknown = [
        name
        for name, module in of_module.items()
        if not name.startswith(PREFIX)
        or not name.endswith((_A, _B))
        or (targets[module] not in known and not _is_of_experts(module, model))
    ]
    if unknown:
        raise CheckpointError(
            f"{folder}: the weights hold {join_first_names(unknown)}; expected adapters of {', '.join(known)} only"
        )
    unnamed = [
        name
        for name, module in of_module.items()
        if (targets[module] not in known)
        or not (
            _is_of_experts(module, model)
            or _is_target_parameter(f"{module}.weight", parameters)
            or _is_target_module(module, given)
        )
    ]
    if unnamed:
        field = (
            "target_parameters" if any(_is_of_experts(of_module[name], model) for name in unnamed) else "target_modules"
        )
        text = "{}: the weights hold {}, which " + field + " of {} does not name and peft would leave out"
        raise CheckpointError(text, folder, join_first_names(unnamed), ADAPTER_CONFIG)
    found = set(targets.values())
    return tuple(name for name in known if name in found)


def _is_of_experts(module: str, model: TransformerConfig) -> bool:
    return model.experts is not None and module.removesuffix(".base_layer").endswith(".mlp.experts")


def _target_of(module: str, parameters: list[str]) -> str:
    """Return the name of a target, given a module such as "model.layers.0.self_attn.q_proj" or "....mlp.experts".

    `parameters` is target_parameters. Of two parameters of experts, peft's wrapper of gate_up_proj is the base_layer of
    the other's.
    """
    experts = module.removesuffix(".base_layer")
    if not experts.endswith(".mlp.experts"):
        return module.rsplit(".", 1)[-1]
    within = experts.removesuffix("experts")
    named = [name for name in EXPERTS.values() if _is_target_parameter(within + name, parameters)]
    if len(named) == 2:
        return named[experts == module]
    return named[0] if named and experts == module else module


def _is_target_parameter(parameter: str, given: list[str]) -> bool:
    return any(f".{parameter}".endswith(f".{name}") for name in given)


def _is_target_module(module: str, given: object) -> bool:
    """Return whether the field target_modules (`given`) matches a module such as "model.layers.0.self_attn.q_proj"."""
    if isinstance(given, str) and given != "all-linear":
        try:
            return re.fullmatch(given, module) is not None
        except re.error:
            return False
    return not isinstance(given, list) or any(f".{module}".endswith(f".{name}") for name in given)


def load_adapters(model: Transformer, path: str | Path) -> None:
    """Load the model's adapters from a peft folder. Each rank reads only its own shards.

    Raises CheckpointError if tensors are missing, unexpected, not finite, or have another shape.
    """
    folder = resolve_model_folder(path)
    file, table = _weights_file(folder), stored_adapters(model)
    with open_safetensors(file) as tensors:
        names = list(tensors.keys())
        if missing := [name for name in table if name not in names]:
            text = "every layer of the model has the same adapters; it may be of another model, or of some layers only"
            raise CheckpointError(f"{folder}: the weights lack {join_first_names(missing)}; {text}")
        if extra := [name for name in names if name not in table]:
            raise CheckpointError(
                f"{folder}: the weights hold {join_first_names(extra)}, which the model has no place for"
            )
        source = f"the shape of the model and r of {ADAPTER_CONFIG}"
        damaged = [name for name in names if not load_shard(name, table[name], tensors.get_slice(name), file, source)]
    if damaged:
        wrong = f"{folder}: {join_first_names(damaged)}: numbers that are nan or infinite; "
        raise CheckpointError(wrong + "expected finite weights: download or save the adapters again")


def _weights_file(folder: Path) -> Path:
    if not (folder / WEIGHTS).is_file():
        advice = "; save it again with safe_serialization" if (folder / "adapter_model.bin").is_file() else ""
        raise CheckpointError(f"{folder} has no {WEIGHTS}{advice}")
    return folder / WEIGHTS


def adapter_writers(
    model: Transformer,
    folder: str | Path,
    *,
    adapters: AdapterSpec,
    base: str,
    source: Sequence[str | Path] = (),
    dp: ParallelGroup | None = None,
    pin_memory: bool = False,
) -> Iterator[Callable[[], None]]:
    """Yield the functions that write this rank's files of a peft folder, for `saving.write_all`.

    Taking a function from the iterator is a collective call over the tensor-parallel ranks of a model replica. Only the
    first of the replicas in `dp` is written. `base` is recorded in adapter_config.json. The tokenizer files come from
    the first folder or hub id in `source` that has any.
    """
    if dp is not None and dp.rank > 0:
        return
    folder = Path(folder)
    table = stored_adapters(model)
    tensors = gather_tensors(table, model, 0, pin_memory)
    if model.tp.rank == 0:
        yield partial(_write_other_files, folder, source, _peft_config(adapters, base, model.config))
        yield partial(write_tensors, tensors, table, folder / WEIGHTS, record_copies_event(model.device))


def _peft_config(adapters: AdapterSpec, base: str, config: TransformerConfig) -> dict[str, Any]:
    modules, parameters = parameters_in_peft(config, adapters.targets)
    if config.within:  # the image encoder has modules of the same names
        text = name_in_peft("model.", config).removesuffix(".").replace(".", r"\.")
        modules = rf"{text}\..*\.({'|'.join(modules)})"
    alpha = int(adapters.alpha) if math.floor(adapters.alpha) == adapters.alpha else adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        "use_rslora": adapters.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _write_other_files(folder: Path, source: Sequence[str | Path], config: dict[str, Any]) -> None:
    """Write adapter_config.json and the tokenizer files, and sync them to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    written = copy_tokenizer_files([resolve_model_folder(path) for path in source], folder, (TOKENIZER,))
    written.append(write_json(folder / ADAPTER_CONFIG, config))
    sync_written(folder, written)
