"""A small random model that knows chat, tools and thinking, and what tests of agents ask of it."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from areno import ArenoConfig, Trainer
from tests.helpers import tiny_engine

TOKENIZER = Path(__file__).parents[1] / "tokenizers" / "tiny"
VOCAB, EOS, CONTEXT = 389, 384, 2048
_folder = tempfile.TemporaryDirectory()


@functools.cache
def model_folder(tokenizer: Path = TOKENIZER, vocab_size: int = VOCAB, eos: int = EOS) -> str:
    """A folder with a tokenizer and no weights, for dummy_load."""
    folder = tiny_engine.model_folder(Path(_folder.name) / tokenizer.name, vocab_size)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "eos_token_id": eos, "max_position_embeddings": CONTEXT}
    path.write_text(json.dumps(config))
    for file in tokenizer.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return str(folder)


def made(world_size: int = 1, folder: str | None = None, **config: Any) -> Trainer:
    """An initialised Trainer of the model, on the CPU, with a learning rate that shows after one step."""
    optimizer = {"lr": 1e-2, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0}
    config["runtime"] = {"device": "cpu", "gradient_checkpointing": False, **config.get("runtime", {})}
    settings = ArenoConfig(**{"optimizer": optimizer, "dummy_load": True, **config})
    trainer = Trainer(world_size, folder or model_folder(), custom_config=settings)
    trainer.init()
    return trainer
