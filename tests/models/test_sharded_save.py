"""Four ranks (two copies of a model, each on two ranks, gloo) write a checkpoint together: as one rank alone does."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open

from areno.engine.engine import Engine
from areno.engine.model_saver import ModelSaver
from areno.engine.processes.process_groups import ParallelContext
from areno.errors import CheckpointError
from areno.layers import shard
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.sft import sft_loss_fn
from areno.models import saving
from areno.models.registry import build_model, load_config
from areno.types import TrainSequence
from tests.helpers import warm
from tests.helpers.processes import worker_pids
from tests.helpers.saving import save_weights
from tests.helpers.states import same
from tests.helpers.tiny_engine import model_folder, saved_tensors, scored, spec, wait_saved

ROW = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), vocab_size=65)  # which two ranks do not divide


@pytest.fixture(scope="module")
def four(folder: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "MIN_SHARD_BYTES", 1)  # as if the model were large
            engine = stack.enter_context(Engine(spec(folder, devices=4, tp_size=2)))
        yield engine


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with Engine(spec(folder), "inline") as one:
        path = tmp_path_factory.mktemp("one")
        one.save(str(path))
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    return saved_tensors(path)


@pytest.mark.slow
def test_four_ranks_save_what_one_does(four: Engine, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    four.save(str(tmp_path))
    assert same(saved_tensors(tmp_path), expected)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) >= 4, "every rank has one to write"
    total = sum(tensor.nbytes for tensor in expected.values())
    for file in files:
        with safe_open(file, "pt") as tensors:
            sizes = [tensors.get_tensor(name).nbytes for name in tensors.keys()]  # noqa: SIM118
        assert sum(sizes) <= -(-total // 4) or len(sizes) == 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == expected.keys()
    assert set(index["weight_map"].values()) == {file.name for file in files}


@pytest.mark.slow
def test_ranks_share_only_what_is_large(folder: Path, expected: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with Engine(spec(folder, devices=2, tp_size=2)) as two:
        two.save(str(tmp_path))
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(saved_tensors(tmp_path), expected)


@pytest.mark.slow
def test_it_is_read_back_by_transformers_and_by_us(four: Engine, tmp_path: Path) -> None:
    four.save(str(tmp_path))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        table = model(torch.tensor([ROW])).logits[0].log_softmax(-1)
    theirs = [table[t - 1, ROW[t]].item() for t in range(1, len(ROW))]
    with Engine(spec(tmp_path, random_init=False), "inline") as one:
        for engine in (four, one):
            assert scored(engine, "actor", [ROW])[0][1:] == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
def test_an_update_behind_the_save_does_not_change_what_is_written(
    four: Engine, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for name in ("first", "second"):  # one after the other, as the models of a checkpoint
        four.save(str(tmp_path / name), background=True)
    four.train([TrainSequence([True, False, False], [3, 4, 5])] * 4, sft_loss_fn)
    four.save(str(tmp_path / "after"))
    wait_saved(four)
    for name in ("first", "second"):
        assert same(saved_tensors(tmp_path / name), expected)
    assert not same(saved_tensors(tmp_path / "after"), expected)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.slow
def test_one_rank_whose_disk_is_full_is_told_and_no_rank_waits(four: Engine, tmp_path: Path, background: bool) -> None:
    pid = worker_pids(four)[3]
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, limits[1]))  # in the place of a full disk
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the model to .*full: .*saver\.path"):
            four.save(str(tmp_path / "full"), background=background) or wait_saved(four)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    four.save(str(tmp_path / "whole"), background=background)
    wait_saved(four)
    assert saved_tensors(tmp_path / "whole")


def _rank_main(rank: int, rendezvous: str, source: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tp = ParallelGroup(rank=rank, size=2, group=dist.group.WORLD)
    model = build_model(load_config(source), dtype=torch.float32, device="cpu", tp=tp)
    model.init_weights(0)
    shard.GATHERED_ON_CPU = 500  # a few rows of a matrix
    gather_to, largest = ParallelGroup.gather_to, 0

    def counted(self: ParallelGroup, x: torch.Tensor, to: int) -> Any:
        nonlocal largest
        largest = max(largest, x.nbytes)
        return gather_to(self, x, to)

    ParallelGroup.gather_to = counted  # type: ignore[method-assign]
    save_weights(model, out, max_shard_bytes=9000)
    assert 0 < largest <= 500
    _agree_on_the_end(tp)
    dist.barrier()
    os._exit(0)  # as workers end: gloo's threads may abort a regular exit


def _agree_on_the_end(tp: ParallelGroup) -> None:
    """Rank 0 has written its files when rank 1 has not; that one fails."""
    future: Future[None] = Future()
    context = ParallelContext(tp.rank, torch.device("cpu"), tp, *[ParallelGroup()] * 3)
    saver: Any = SimpleNamespace(unfinished=[future], context=context)
    if tp.rank == 0:
        future.set_result(None)
    assert not ModelSaver.is_saved(saver)
    if tp.rank == 0:
        assert ModelSaver.is_saved(saver)
    else:
        future.set_exception(CheckpointError("full"))
        with pytest.raises(CheckpointError, match="full"):
            ModelSaver.is_saved(saver)
    assert ModelSaver.is_saved(saver)


def test_tensors_travel_in_pieces_into_files_of_bounded_size(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no rank says that a checkpoint is written before all of them have written."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    warm.on_ranks(_rank_main, (str(tmp_path / "rendezvous"), folder, tmp_path / "two"), 2)
    one = build_model(load_config(folder), dtype=torch.float32, device="cpu")
    one.init_weights(0)
    save_weights(one, tmp_path / "one", max_shard_bytes=9000)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 4
