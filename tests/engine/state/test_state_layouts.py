"""Run states that other ranks read than wrote them, and ranks that fail alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.engine.engine import Engine
from areno.errors import CheckpointError, EngineError
from areno.kernels.adam.reference import dequantise
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from tests.helpers.critics import OPTIMIZER, ROWS, critic, critic_rows
from tests.helpers.processes import worker_pids
from tests.helpers.states import content, same, saved
from tests.helpers.tiny_engine import model_folder, saved_tensors, scored, spec, values

# The vocabulary of 65 is padded to 66 rows over two ranks.
LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "dp": {"devices": 2}, "tp": {"devices": 2, "tp_size": 2}}
DIVIDED: dict[str, dict[str, int]] = {
    "whole optimizer": {"devices": 2, "zero_stage": 0},
    "divided gradients": {"devices": 2, "zero_stage": 2},
    "three": {"devices": 3},
}
FOUR: dict[str, dict[str, int]] = {"four": {"devices": 4}, "dp and tp": {"devices": 4, "tp_size": 2}}


def built(folder: Path, layout: dict[str, int], kind: Any = "adam") -> Engine:
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    engine = Engine(spec(folder, optimizer=optimizer, dtype="bfloat16", **layout))
    engine.ensure_roles({"critic": critic(folder, optimizer=optimizer)})
    return engine


def train(engine: Engine) -> list[float]:
    """A step of actor and critic: gradient norms."""
    rows = critic_rows()
    stats = [engine.train(rows, sft_loss_fn), engine.train(rows, value_loss_fn, role="critic")]
    return [of["grad_norm"] for of in stats]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), vocab_size=65)


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    built_engines = {name: built(folder, layout) for name, layout in LAYOUTS.items()}
    yield built_engines
    for engine in built_engines.values():
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "adam_bf16", "adam_8bit", "muon", "sgd"])
def test_any_layout_takes_over_the_state_of_any_other(folder: Path, kind: Any, tmp_path: Path) -> None:
    """Masters, moments and counters to the bit, and the weights are the rounded masters; training goes on alike."""
    layouts = LAYOUTS | DIVIDED | FOUR
    if kind in ("adam_8bit", "sgd"):  # the 8-bit moments of tensor-parallel ranks are quantised anew: see below
        layouts = {name: layout for name, layout in (LAYOUTS | DIVIDED).items() if "tp_size" not in layout}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(built(folder, layout, kind)) for name, layout in layouts.items()}
        for writer in engines.keys() & {*LAYOUTS, "whole optimizer", "divided gradients"}:
            engine = engines[writer]
            norms = [train(engine) for _ in range(2)]
            assert norms[0] != norms[1]
            state = saved(engine, tmp_path / writer)
            expected, version = content(state), engine.weights_version
            size = sum(file.stat().st_size for file in state.glob("*.bin"))
            for reader, other in engines.items():
                path = tmp_path / f"{writer} {reader}"
                other.load_state(state)
                assert other.weights_version == version
                again = saved(other, path)
                assert same(content(again), expected), (writer, reader)
                # Ranks write each number once. Parameters start at multiples of 16.
                written = sum(file.stat().st_size for file in again.glob("*.bin"))
                assert written == pytest.approx(size, rel=0.01 if kind == "adam" else 0.02)
                if other.spec.engine.zero_stage or other.spec.layout.is_sharded:
                    assert len({file.name.split(".")[-2] for file in again.glob("*.bin")}) == len(other.spec.devices)
                other.save(str(path / "model"))
                for name, weight in saved_tensors(path / "model").items():
                    assert torch.equal(weight, expected[f"actor.master.{name}"].bfloat16()), (writer, reader, name)
            after = {reader: train(other) for reader, other in engines.items()}
            for found in after.values():
                assert found == pytest.approx(after["one"], rel=0.02)


@pytest.mark.slow
def test_8_bit_moments_are_read_by_other_ranks(folder: Path, tmp_path: Path) -> None:
    """To the bit on as many tensor-parallel ranks; else they are quantised anew, to what they were or close to it."""
    with built(folder, {}, "adam_8bit") as one, built(folder, LAYOUTS["tp"], "adam_8bit") as tp:
        for _ in range(2):
            train(one)
        first = content(saved(one, tmp_path / "one"))
        tp.load_state(tmp_path / "one")
        state = saved(tp, tmp_path / "tp")
        tp.load_state(state)
        assert same(content(saved(tp, tmp_path / "tp again")), content(state))
        one.load_state(state)
        back = content(saved(one, tmp_path / "back"))
        assert all(value > 0 for value in train(tp) + train(one))
    assert first.keys() == back.keys()
    for name, tensor in first.items():
        kind = name.split(".")[1]
        if kind in ("master", "counters"):
            assert torch.equal(back[name], tensor), name
        elif kind in ("exp_avg", "exp_avg_sq"):
            scale = name.replace(f".{kind}.", f".{kind}_scale.")
            before, after = (dequantise(of[name], of[scale], signed=kind == "exp_avg") for of in (first, back))
            # Two roundings, each by at most half a spacing of the codes: 0.007 of the largest number in a block.
            assert (after - before).abs().max() <= 0.015 * before.abs().max(), name
            assert (after - before).norm() <= 0.02 * before.norm(), name


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_told_by_all(engines: dict[str, Engine], tmp_path: Path) -> None:
    for layout in ("dp", "tp"):
        engine, path = engines[layout], tmp_path / layout
        path.mkdir()
        (path / "critic.exp_avg.1.bin").symlink_to("/dev/full")
        for _ in range(2):
            engine.save_state(path)
            with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
                engine.is_state_written(wait=True)
        assert not (path / "index.json").exists()
        (path / "critic.exp_avg.1.bin").unlink()
        train(engine)
        expected = content(saved(engine, path))
        train(engine)
        engine.load_state(path)
        assert same(content(saved(engine, tmp_path / f"{layout} again")), expected)


@pytest.mark.slow
def test_a_file_that_one_rank_finds_damaged(engines: dict[str, Engine], tmp_path: Path) -> None:
    """No rank takes anything over, whichever of them found it."""
    engine = engines["dp"]
    state = saved(engine, tmp_path / "state")
    train(engine)
    expected = content(saved(engine, tmp_path / "now"))
    scores = scored(engine, "actor", ROWS), values(engine, "critic", ROWS)
    for file in sorted(state.glob("*.bin")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
            engine.load_state(state)
        file.write_bytes(whole)
    assert (scored(engine, "actor", ROWS), values(engine, "critic", ROWS)) == scores
    assert same(content(saved(engine, tmp_path / "still")), expected)


def test_a_worker_that_is_killed_while_it_writes(folder: Path, tmp_path: Path) -> None:
    """It trains on while it writes. Its end is told, and the folder has no index."""
    state = tmp_path / "state"
    state.mkdir()
    os.mkfifo(state / "actor.master.0.bin")  # to open it takes a reader, and there is none
    with Engine(spec(folder), "spawn") as engine:
        engine.save_state(state)
        engine.train(critic_rows(), sft_loss_fn)
        assert not engine.is_state_written()
        os.kill(worker_pids(engine)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            engine.is_state_written(wait=True)
    assert not (state / "index.json").exists()
