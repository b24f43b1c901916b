"""Worker groups: what travels to a spawned worker, what comes back when something fails, and who is left afterwards."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.dummy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.processes.local import start_local_processes
from areno.engine.processes.messages import Command, pack_command
from areno.engine.processes.spawned import SpawnedGroup
from areno.engine.processes.worker_main import _read_commands
from areno.engine.processes.workers import InlineGroup, WorkerGroup, start_workers
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps
from areno.errors import CheckpointError, EngineError
from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, TrainSequence
from tests.helpers.tiny_engine import MIXED, ROLLOUT, VOCAB, engine_spec, model_folder, request, spec

WHOLE = MicroBatchSpec(mini_bs=16)
ROWS = [TrainSequence([True, False, False], [3, 4, 5])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[SpawnedGroup]:
    with contextlib.closing(SpawnedGroup(spec(folder))) as group:
        yield group


def train(group: WorkerGroup, loss_fn: Any) -> dict[str, float]:
    update = UpdateSpec(WHOLE)
    (steps,) = divide_steps(read_rows(ROWS, VOCAB), update)
    return group.call("train", "actor", steps, loss_fn, update)[0].stats


def poll(group: WorkerGroup, n: int) -> list[GenerationOutput]:
    outputs: list[GenerationOutput] = []
    while len(outputs) < n:
        outputs += group.poll(10.0)
    return outputs


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_rank_that_fails_alone_while_loading_leaves_one_message(tmp_path: Path, capfd: Any) -> None:
    """Half of a damaged tensor is the other rank's, which loads well and then misses its peer."""
    from safetensors.torch import load_file, save_file

    with contextlib.closing(InlineGroup(spec(model_folder(tmp_path)))) as group:
        group.call("save", str(tmp_path / "saved"), "actor")
    weights = tmp_path / "saved/model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match="numbers that are nan"):
        SpawnedGroup(spec(tmp_path / "saved", devices=2, tp_size=2, random_init=False))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_worker_starts_and_ends_as_it_does_for_users(cold_workers: None, folder: Path) -> None:
    with contextlib.closing(SpawnedGroup(spec(folder))) as group:
        [process] = group._live_processes.processes.values()  # type: ignore[attr-defined]
        assert b"spawn_main" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert train(group, sft_loss_fn)["skipped_steps"] == 0
        pid = process.pid
    assert not alive(pid)


def test_a_worker_that_nobody_waits_for_any_more_ends_without_a_traceback(folder: Path) -> None:
    """The driver was interrupted while its workers came up. Python reports an exception with exit code 1."""
    with contextlib.closing(start_local_processes(spec(folder))) as processes:
        processes._pipes[0].close()
        assert processes.exit_codes(0, timeout=60) == {0: 0}


def test_functions_that_exist_only_here_travel(group: SpawnedGroup) -> None:
    scale = 3.0

    def local(pack: DataPack, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _ = sft_loss_fn(pack, logprobs_N)
        return loss * scale, {"scaled": loss.detach() * scale}

    class Doubled:
        def __init__(self, inner: Callable[..., Any]):
            self.inner = inner

        def __call__(self, pack: DataPack, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.inner(pack, logprobs_N * 2)

    stats = train(group, local)
    assert stats["loss"] == pytest.approx(stats["scaled"])
    assert stats["loss"] == pytest.approx(-3 * stats["train_logprobs_mean"], rel=1e-5)
    stats = train(group, lambda pack, logprobs_N: sft_loss_fn(pack, logprobs_N * 0.5))
    assert stats["loss"] == pytest.approx(-0.5 * stats["train_logprobs_mean"], rel=1e-5)
    stats = train(group, Doubled(sft_loss_fn))
    assert stats["loss"] == pytest.approx(-2 * stats["train_logprobs_mean"], rel=1e-5)


def test_what_cannot_travel_is_named(group: SpawnedGroup) -> None:
    rows = (row for row in ROWS)
    for loss_fn in (lambda *_: next(rows), rows, functools.partial(sft_loss_fn, rows)):
        with pytest.raises(EngineError, match=r"an argument of train cannot be sent to a worker process .*generator"):
            train(group, loss_fn)
    assert train(group, sft_loss_fn)["skipped_steps"] == 0


class _Stubborn:
    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


def test_errors_in_user_code_come_with_their_traceback(group: SpawnedGroup) -> None:
    def too_bad(*_: Any) -> Any:
        raise KeyError("too bad")

    with pytest.raises(EngineError, match=r"worker 0 failed: KeyError: 'too bad'(.|\n)*raise KeyError\(\"too bad\"\)"):
        train(group, too_bad)
    with pytest.raises(EngineError, match="worker 0 failed: ValueError: invalid literal"):
        train(group, _Stubborn())
    with pytest.raises(EngineError, match="worker 0 failed: AttributeError"):
        group.call("no_such_method")
    assert train(group, sft_loss_fn)["skipped_steps"] == 0


def test_an_error_about_files_names_the_machine_where_there_are_several(
    group: SpawnedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = RoleSpec(path="/no/{where}", head="lm", key="ref.path")
    with pytest.raises(CheckpointError) as alone:
        group.call("load_role", "ref", role)
    monkeypatch.setattr(group, "spec", replace(group.spec, n_nodes=2, hosts=("10.0.0.2",)))
    with pytest.raises(CheckpointError) as found:
        group.call("load_role", "ref", role)
    assert str(found.value) == f"{alone.value} (on node 10.0.0.2)"
    assert "/no/{where} does not exist" in str(alone.value)


def test_an_error_nobody_waits_for_comes_with_the_next_poll(group: SpawnedGroup) -> None:
    group.call("begin_rollout", ROLLOUT)
    group.call_nowait(0, "submit", [request(0), request(1, n_samples=0)])
    with pytest.raises(EngineError, match="request 1 cannot be served: n_samples is 0"):
        poll(group, 2)
    assert [output.request_id for output in poll(group, 1)] == [0]
    group.call("end_rollout")
    assert group.poll(0.0) == []


def test_late_answers_to_a_failed_command_are_dropped(group: SpawnedGroup) -> None:
    group._send_command(
        0, Command("no_such_method", pack_command("", ()), group._last_id)
    )  # answered under the next id
    assert group.call("info")[0].vocab_size == VOCAB
    assert group.poll(0.0) == []


def test_inline_and_spawned_groups_have_one_face(group: SpawnedGroup, folder: Path) -> None:
    inline = InlineGroup(spec(folder))
    outputs = []
    for each in (inline, group):
        each.call("begin_rollout", ROLLOUT)
        each.call_nowait(0, "submit", MIXED)
        finished = poll(each, 10)
        outputs.append({(output.request_id, output.sample) for output in finished})
        (stats,) = each.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.generated_tokens == sum(len(output.tokens) for output in finished)
        each.call("end_rollout")
        given = ("actor", "logprobs", [np.array([3, 4])], {"mb_spec": WHOLE, "sampling": SamplingConfig()})
        assert each.call_each("score", [given])[0][0][0][0] == 0.0
    assert outputs[0] == outputs[1]
    inline.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        inline.call("synchronize")


def test_commands_never_wait_for_a_worker_that_is_busy() -> None:
    mine, theirs = multiprocessing.Pipe()
    inbox: Any = multiprocessing.dummy.Queue()
    thread = threading.Thread(target=_read_commands, args=(theirs, inbox), daemon=True)
    thread.start()
    for _ in range(3):
        mine.send(Command("submit", bytes(1_000_000), None))  # more than a pipe holds
    mine.close()
    thread.join(60)
    assert [len(inbox.get().arguments) for _ in range(3)] == [1_000_000] * 3
    assert inbox.get() is None


@pytest.mark.parametrize("form", [InlineGroup, SpawnedGroup])
def test_a_worker_that_cannot_start_says_why(folder: Path, form: type[WorkerGroup]) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        form(spec(folder, random_init=False))


def test_which_form() -> None:
    two = engine_spec(devices=["cpu", "cpu"])
    with pytest.raises(EngineError, match=r"engine\.workers=inline holds one device, not cpu, cpu; use spawn"):
        start_workers(two, "inline")


@pytest.mark.slow
def test_long_commands_of_two_threads_arrive_whole(folder: Path) -> None:
    """Agents send requests while the driver sends rows to train on. A long message is written in two pieces."""
    unknown, n_sent = list(range(1 << 20, (1 << 20) + 6_000)), 20
    with contextlib.closing(SpawnedGroup(spec(folder))) as group:
        group.call("begin_rollout", ROLLOUT)
        counted = list(group.heartbeats._sent)

        def casts() -> None:
            for _ in range(n_sent):
                group.call_nowait(0, "abort", unknown)

        thread = threading.Thread(target=casts)
        thread.start()
        casts()
        thread.join()
        group.call("synchronize")
        assert group.heartbeats._sent[0] == counted[0] + 2 * n_sent + 1


@pytest.mark.parametrize("busy", ["decoding", "training", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_group_with_the_signal_named(folder: Path, busy: str) -> None:
    def sleepy(*_: Any) -> Any:
        import time

        time.sleep(1000)

    group = SpawnedGroup(spec(folder))
    pid = group.processes.processes[0].pid  # type: ignore[union-attr]
    started = time.monotonic()
    message = r"worker 0 \(cpu\) was killed by SIGKILL"
    if busy == "training":
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(EngineError, match=message):
            train(group, sleepy)
    elif busy == "decoding":
        group.call("begin_rollout", ROLLOUT)
        group.call_nowait(0, "submit", [request(i, max_new_tokens=400, ignore_eos=True) for i in range(16)])
        group.poll(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=message):
            poll(group, 17)
    else:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=message):
            group.call("synchronize")
    with pytest.raises(EngineError, match=message):
        group.poll(1.0)
    group.close()
    group.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        group.call("synchronize")
    assert time.monotonic() - started < 500, "no 1000 s, which the loss takes"
    assert not alive(pid)
