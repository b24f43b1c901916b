"""The files of a model folder beside weights and config.json: tokenizer, chat template, generation settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
GENERATION = ("generation_config.json",)


def copy_companions(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Copy them to `folder`. A set is taken from the first source that has any file of it, never mixed from several.

    Returns the copies: files and folders in `folder`.
    """
    copies = []
    for names in (TOKENIZER, GENERATION):
        for source in sources:
            found = [source / name for name in names if (source / name).exists()]
            for path in found:
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                else:
                    # Content only: a read-only source or a link into a download cache must not make the copy so.
                    shutil.copyfile(path, folder / path.name)
                copies.append(folder / path.name)
            if found:
                break
    return copies


def is_replaceable(folder: Path) -> bool:
    """Whether what stands there is an empty folder, or a model's files and nothing else that could be of value."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    others = {name for name in names - {"config.json", *TOKENIZER, *GENERATION} if ".safetensors" not in name}
    return not names or ("config.json" in names and not others)
