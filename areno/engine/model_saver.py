"""Writes models as Hugging Face folders, in the background if asked."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from areno.engine.processes.process_groups import ParallelContext
from areno.engine.roles import Roles
from areno.models.adapters import adapter_writers
from areno.models.saving import file_writers, write_all
from areno.specs.engine import EngineSpec


class ModelSaver:
    """Writes this rank's part of models."""

    def __init__(self, roles: Roles, spec: EngineSpec, context: ParallelContext):
        self.roles, self.spec, self.context = roles, spec, context
        self._writer = ThreadPoolExecutor(1, "areno-writer")
        self.unfinished: list[Future[None]] = []

    def save(self, folder: str, role: str, background: bool = False, merge: bool = False) -> None:
        """Write this rank's part of a role's model as a Hugging Face folder. All ranks must call this.

        With `background`, a thread writes the files after the weights were copied to host memory. Without `merge`,
        adapters are saved alone, as a folder of peft.
        """
        lora = self.roles[role].spec.lora
        paths = (self.spec.tokenizer_path, self.roles[role].spec.path, self.spec.actor.path)
        how: dict[str, Any] = {"source": [path for path in paths if path], "dp": self.context.dp}
        how["pin_memory"] = background and self.context.device.type == "cuda"
        with self.roles[role].on_device() as backend:
            if lora is None or merge:
                writes = file_writers(backend.model, folder, ends=self.spec.turn_end_ids_of(role), **how)
            else:
                writes = adapter_writers(backend.model, folder, adapters=lora.adapters, base=lora.base, **how)
            if background:
                self.unfinished.append(self._writer.submit(write_all, folder, list(writes)))
            else:
                write_all(folder, writes)

    def is_saved(self) -> bool:
        """Return whether every rank has written the files of `save`. All ranks must call this.

        If this rank could not write its files, raises CheckpointError once, after all ranks have stopped writing.
        """
        unfinished = any(not future.done() for future in self.unfinished)
        n_unfinished = torch.tensor(float(unfinished), device=self.context.device)
        if self.context.dp.all_reduce(self.context.tp.all_reduce(n_unfinished)).item():
            return False
        futures, self.unfinished = self.unfinished, []
        for future in futures:
            future.result()
        return True

    def close(self) -> None:
        """Complete the model that is being written. Models that wait for it are not written."""
        self._writer.shutdown(cancel_futures=True)
