"""What is right, wrong or missing in a model folder, without its weights being read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from areno.errors import ArenoError, CheckpointError, Key
from areno.files.companions import TOKENIZER
from areno.models.adapters.folder import base_of, is_adapter
from areno.models.config import TransformerConfig
from areno.models.cost.memory import parameters, state_bytes
from areno.models.folder.weight_files import tensor_files
from areno.models.registry import build_model, has_value_head, load_config
from areno.models.weights import check_weights
from areno.plan.plan import load_tokenizer


class Finding(NamedTuple):
    """One line about a part of a folder."""

    part: str
    text: str
    is_wrong: bool = False


def findings(path: Path) -> Iterator[Finding]:
    """Yield what there is to say of a model folder, or of its config.json alone if `path` is this file."""
    folder = path.parent if path.name == "config.json" else path
    if not folder.is_dir():
        yield Finding("model", f"{folder} is no folder; expected a model folder in the Hugging Face format", True)
        return
    config: list[TransformerConfig] = []
    yield from _look("model", lambda: _model(folder, config))
    for read in config:
        yield from _special_layers(read)
    if path is folder and not is_adapter(folder):
        yield from _look("weights", lambda: _weights(folder, config))
        yield from _look("tokenizer", lambda: _tokenizer(folder))


def _look(part: str, work: Callable[[], str]) -> Iterator[Finding]:
    """Yield the text that `work` returns, or each problem that it raises."""
    try:
        yield Finding(part, work())
    except ArenoError as error:
        for problem in error.renamed({"actor.path": "FOLDER"}.get).problems:
            yield Finding(part, str(problem), True)


def _model(folder: Path, config: list[TransformerConfig]) -> str:
    """Read config.json, add it to `config`, and describe it."""
    if is_adapter(folder):
        base = base_of(folder)
        raise CheckpointError("{} holds adapters and no model; check the one they are for: {}", folder, base)
    read = load_config(folder, "value" if has_value_head(folder) else "lm")
    config.append(read)
    about = f"{read.family}, {read.num_layers} layers, {parameters(read) / 1e6:.1f}M parameters"
    return f"{about}, {read.max_position_embeddings} tokens of context"


def _special_layers(config: TransformerConfig) -> Iterator[Finding]:
    """Yield a line for each kind of layer that is not plain attention."""
    windows = sorted({kind.window for kind in config.kinds if kind.window is not None})
    if windows:
        sliding = [kind.window is not None for kind in config.kinds]
        text = f"of {windows[0]} tokens in {sum(sliding)} of {config.num_layers} layers"
        yield Finding("sliding window", f"{text}, which free the KV cache behind it")
    if config.delta is not None:
        text = f"in {len(config.delta.layers)} of {config.num_layers} layers"
        size = f"{state_bytes(config, 2) / 2**20:.1f} MiB of a sequence in bfloat16, whatever its length"
        yield Finding("recurrent state", f"{text}; {size}")


def _weights(folder: Path, config: list[TransformerConfig]) -> str:
    """Compare the headers of the weight files with the model, if its config.json can be read."""
    if not config:
        return f"{len(tensor_files(folder))} tensors, which were not compared with config.json"
    return check_weights(build_model(config[0], dtype=torch.float32, device="meta"), folder)


def _tokenizer(folder: Path) -> str:
    if not any((folder / name).is_file() for name in TOKENIZER):
        text = "{} has no tokenizer; download the model again, or set {} to a folder that has one"
        raise CheckpointError(text, folder, Key("tokenizer_path"))
    found = load_tokenizer(str(folder))
    return f"{len(found)} tokens, with{'' if found.chat_template else 'out'} a chat template"
