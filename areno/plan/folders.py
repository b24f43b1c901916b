"""The local folders of models that settings name, and the tokenizers in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areno.errors import CheckpointError, ConfigError, Key, Problem, printable
from areno.files.paths import existing_path, name_model_setting_in_errors
from areno.models.folder import resolve_model_folder


def model_folder(path: str, key: str) -> str:
    """Return the local folder of a model. A hub id is downloaded. Errors name the setting `key`."""
    with name_model_setting_in_errors(key):
        return str(resolve_model_folder(existing_path(path) or path))


def full_model_folder(path: str, key: str) -> str:
    """Return the `model_folder` of a model such as a reference model. Raises ConfigError if it holds adapters."""
    from areno.models.adapters import is_adapter_folder

    folder = model_folder(path, key)
    if is_adapter_folder(folder):
        text = "{} holds adapters and no model; expected a whole model, as {}=true saves it"
        raise ConfigError(Problem(key, text, folder, Key("saver.merge_adapters")))
    return folder


def load_tokenizer(folder: str) -> Any:
    """Load a tokenizer with the transformers library. It accepts texts of any length without a warning."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if len(tokenizer) < 2:  # for some models, transformers makes an empty tokenizer if files are missing
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers passes on any error of its parsers
        said = printable(" ".join(str(error).split()))[:300] or type(error).__name__
        if (Path(folder) / "config.json").is_file():  # transformers reads config.json to find the tokenizer class
            try:
                AutoConfig.from_pretrained(folder)
            except Exception:
                raise CheckpointError(f"{folder}/config.json is refused by transformers: {said}") from error
        message = f"no tokenizer can be loaded from {folder}: {said}; set it to a folder that has one"
        raise ConfigError([Problem("tokenizer_path", message)]) from error
    tokenizer.model_max_length = 10**9  # areno checks lengths itself; without this, transformers would warn too
    return tokenizer
