"""The most memory that a worker takes while a model of 320 MiB (fp32) is loaded and saved, and its state, too.

The kernel keeps count of that, and of what a process has in memory of files. On a CPU a rank's share of the weights is
in host memory as well. So what a rank does with its share may take as much again, but no more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.engine.engine import Engine
from areno.models.registry import build_model, load_config
from areno.models.weights import MAPPED_BYTES
from areno.specs.role import RoleSpec
from tests.helpers.processes import worker_pids
from tests.helpers.saving import save_weights
from tests.helpers.tiny_engine import folder_with, spec, wait_saved

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
VOCAB = 8000
SLACK = 2**25  # for pieces on their way, and what malloc keeps of those that were freed
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc"),
]


@dataclass
class Watched:
    """One worker. start: bytes that it had before there was anything large. before, mapped: at the last `begin`."""

    pid: int
    start: int = 0
    before: int = 0
    mapped: int = 0

    def of(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def begin(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # VmHWM starts again
        self.before, self.mapped = self.of("VmRSS"), self.of("RssFile")

    @property
    def most(self) -> int:
        """At once since `begin`, beside what was there."""
        return self.of("VmHWM") - self.before

    @property
    def now(self) -> int:
        return self.of("VmRSS") - self.start


@contextlib.contextmanager
def at_most(workers: list[Watched], n_bytes: float, what: str, mapped: int = SLACK) -> Iterator[None]:
    """No worker takes more at once than so many bytes beside what it has, nor maps more of files."""
    done, most_mapped = threading.Event(), [0] * len(workers)

    def sample() -> None:
        while not done.is_set():
            for index, worker in enumerate(workers):
                most_mapped[index] = max(most_mapped[index], worker.of("RssFile") - worker.mapped)
            time.sleep(0.002)

    for worker in workers:
        worker.begin()
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    for worker, of_files in zip(workers, most_mapped, strict=True):
        print(f"{what}: {worker.most >> 20} of {int(n_bytes) >> 20} MiB, {of_files >> 20} of {mapped >> 20} of files")
        assert worker.most <= n_bytes, what
        assert of_files <= mapped, what


def written(folder: Path, dtype: torch.dtype) -> int:
    """Random weights in several files. Bytes of the parameters."""
    model = build_model(load_config(folder_with(folder, VOCAB, **LARGE)), dtype=dtype, device="cpu")
    model.init_weights(1)
    save_weights(model, folder, max_shard_bytes=2**26)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layout", "dtype"), [({"tp_size": 2}, "float32"), ({"zero_stage": 1}, "float32"), ({"zero_stage": 1}, "bfloat16")]
)
def test_no_phase_takes_twice_a_share(tmp_path: Path, layout: dict[str, Any], dtype: str) -> None:
    whole = written(tmp_path / "large", getattr(torch, dtype))
    tp_size, ranks = layout.get("tp_size", 1), 2
    share, to_write = whole // tp_size, whole // ranks
    n_params = whole // getattr(torch, dtype).itemsize
    state = 12 * n_params // ranks  # masters and two moments
    # In fp32 the masters are the parameters themselves, unless they are divided.
    held = share + 4 * n_params // tp_size + state - (to_write if tp_size > 1 else 0)
    large = str(tmp_path / "large")
    with Engine(spec(folder_with(tmp_path / "small", VOCAB), devices=ranks, dtype=dtype, **layout)) as engine:
        workers = [Watched(pid) for pid in worker_pids(engine)]
        for worker in workers:
            worker.start = worker.of("VmRSS")

        # What is mapped is given back after MAPPED_BYTES and a tensor.
        reading = MAPPED_BYTES + SLACK
        assert share + reading < 2 * share
        with at_most(workers, share + reading, "loading", reading):
            engine.ensure_roles({"ref": RoleSpec(path=large, head="lm", key="ref.path")})
        assert all(share <= worker.now <= share + SLACK for worker in workers)
        engine.release_role("ref")
        assert all(worker.now <= SLACK for worker in workers)

        trained = RoleSpec(path=large, head="lm", key="critic.path", optimizer=engine.spec.actor.optimizer)
        with at_most(workers, held + SLACK, "loading what is trained", reading):
            engine.ensure_roles({"critic": trained})
        with at_most(workers, 0.9 * to_write, "saving"):  # one file after another
            engine.save(str(tmp_path / "one"), "critic")
        with at_most(workers, to_write + SLACK, "saving in the background"):
            engine.save(str(tmp_path / "two"), "critic", background=True)
            wait_saved(engine)
        with at_most(workers, state + 1.5 * SLACK, "writing a state"):
            engine.save_state(tmp_path / "state")
            assert engine.is_state_written(wait=True)
        with at_most(workers, share, "loading a state"):
            engine.load_state(tmp_path / "state")
        # The copy of the state is kept for the next one.
        assert all(worker.now <= held + state + share for worker in workers)
