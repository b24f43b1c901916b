"""Runs on the nodes of a Ray cluster: as on one machine, and as if nothing had happened when a node is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areno.engine.engine import Engine
from areno.engine.processes import ray_cluster as of_ray
from areno.engine.processes import ray_workers
from areno.errors import CheckpointError, ConfigError, EngineError, WorkerLost
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.engine import EngineSpec
from tests import kill_runs
from tests.helpers.processes import reads_proc, started, until_ended
from tests.helpers.ray_cluster import TwoNodes, needs_ray, two_nodes
from tests.helpers.resumed import folder_of, go, log, whole
from tests.helpers.tiny_engine import (
    MIXED,
    ROLLOUT,
    finish,
    logprobs_of,
    model_folder,
    rollout,
    scored,
    spec,
    train_rows,
)
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, needs_ray, reads_proc]

ROOT = Path(__file__).parents[3]
ON_TWO = ["scheduler.type=ray", "cluster.n_nodes=2", "cluster.n_gpus_per_node=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: TwoNodes) -> TwoNodes:
    cluster.complete()
    return cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("gspo", tmp_path)
    return tmp_path


def differences(expected: dict[str, Any]) -> list[str]:
    """What differs in the run of the working directory, but for the samples of evaluations, whose metrics count.

    What shares a forward pass with a row depends on when commands arrive, and the last bits of its log-probabilities on
    that. In the files of evaluations a rounded one may differ by 0.0001.
    """
    found = kill_runs.differences(expected, kill_runs.left_by(folder_of("gspo")))
    return [name for name in found if not name.startswith("eval/")]


def all_lines() -> str:
    """The log of the run, with what it dropped when it went on, such as the words of a restart after an older state."""
    dropped = folder_of("gspo") / "logs/dropped.log"
    return log() + (dropped.read_text() if dropped.exists() else "")


def on_two(folder: Path, **settings: Any) -> EngineSpec:
    return spec(folder, devices=2, n_nodes=2, **settings)


def test_a_run_on_two_nodes_is_that_on_two_devices(
    nodes: TwoNodes, folder: Path, tmp_path_factory: pytest.TempPathFactory, capfd: Any
) -> None:
    expected = whole("gspo", tmp_path_factory, "engine.world_size=2")
    capfd.readouterr()
    assert go("gspo", *ON_TWO) == 0
    said = capfd.readouterr()
    assert said.out == ""
    ours = re.compile(r"\d\d:\d\d:\d\d ")
    assert [line for line in said.err.splitlines() if not ours.match(line)] == [], "Ray is silent"
    assert differences(expected) == []
    nodes.wait_without_workers()


def test_a_run_that_loses_a_node_in_a_step_ends_with_the_same_weights(
    nodes: TwoNodes,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    expected = whole("gspo", tmp_path_factory, "engine.world_size=2")
    capfd.readouterr()
    train, calls, lost_at, noticed = Engine.train, [], [], []
    restart = Engine.restart

    def losing(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            nodes.lose_node()
            lost_at.append(time.monotonic())
        return train(engine, *args, **kwargs)

    def restarting(engine: Engine) -> None:
        noticed.append(time.monotonic() - lost_at[0])
        nodes.complete()
        restart(engine)

    monkeypatch.setattr(Engine, "train", losing)
    monkeypatch.setattr(Engine, "restart", restarting)
    assert go("gspo", *ON_TWO, "recover.freq_steps=1") == 0
    assert noticed[0] < 10
    lines = all_lines()
    assert re.search(r"node 127\.0\.0\.1 with worker \d was lost: ", lines)
    assert "starting the workers again (1 of recover.retries=3)" in lines
    assert "(raylet)" not in "".join(capfd.readouterr())
    assert differences(expected) == []


def test_a_node_that_is_lost_while_models_load_is_waited_for(
    nodes: TwoNodes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, start, calls = ray_workers.RayProcesses._reserve_nodes, ray_workers.RayProcesses._start, []

    def placing(group: Any, again: bool) -> None:
        nodes.complete()
        place(group, again)

    def losing(group: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            nodes.lose_node()
        start(group)

    monkeypatch.setattr(ray_workers.RayProcesses, "_reserve_nodes", placing)
    monkeypatch.setattr(ray_workers.RayProcesses, "_start", losing)
    assert go("gspo", *ON_TWO, "total_train_steps=1") == 0
    lines = all_lines()
    assert "was lost" in lines
    assert "starting the workers again (1 of recover.retries=3)" in lines


def test_the_report_of_a_lost_node_is_not_waited_for_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the call until there is a node for its actor again."""
    import ray.exceptions

    def get(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.GetTimeoutError("no answer")

    group = object.__new__(ray_workers.RayProcesses)
    group._ray = SimpleNamespace(wait=lambda asked, timeout: ([], asked), get=get, exceptions=ray.exceptions)
    monkeypatch.setattr(of_ray, "nodes", list)
    monkeypatch.setattr(ray_workers, "_MOVE_S", 0.1)
    begun = time.monotonic()
    with pytest.raises(ray.exceptions.GetTimeoutError):
        group._wait_for_report(ray_workers._WorkerNode("gone", "host", None, range(1)), None)
    assert time.monotonic() - begun < ray_workers._START_S / 2


def test_a_run_ends_on_the_node_that_is_left(nodes: TwoNodes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = Engine.train, []

    def losing(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            nodes.lose_node()
        return train(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "train", losing)
    assert go("gspo", *ON_TWO, "recover.freq_steps=1", "scheduler.setup_timeout=0") == 0
    assert "going on with 1 of 2 copies of the model, on what is left" in all_lines()
    found = kill_runs.left_by(folder_of("gspo"))
    assert found["latest"] == found["state"], "it has come to its end"


def test_what_is_left_of_a_cluster_goes_on(nodes: TwoNodes, tmp_path: Path, caplog: Any) -> None:
    folder = model_folder(tmp_path)
    with Engine(on_two(folder), "ray") as engine, Engine(spec(folder, devices=2), "spawn") as local:
        outputs = rollout(engine)
        assert logprobs_of(outputs) == logprobs_of(rollout(local))
        rows = train_rows(outputs)
        assert engine.train(rows, sft_loss_fn)["loss"] == local.train(rows, sft_loss_fn)["loss"]
        assert scored(engine, "actor", [[3, 4, 5]]) == scored(local, "actor", [[3, 4, 5]])
        engine.begin_rollout(ROLLOUT)
        engine.submit(MIXED)
        nodes.lose_node()
        with pytest.raises(WorkerLost, match="was lost"):
            finish(engine, 99)
        with pytest.raises(WorkerLost, match="was lost"):
            engine.synchronize()
        engine.restart()
        assert (engine.spec.layout.dp_size, engine.spec.n_nodes) == (1, 1)
        assert "going on with 1 of 2 copies of the model, on what is left: the Ray cluster has 1 node" in caplog.text
        assert logprobs_of(rollout(engine)) == pytest.approx(logprobs_of(outputs))


def test_a_worker_that_fails_or_dies_is_told_as_on_one_machine(nodes: TwoNodes, tmp_path: Path) -> None:
    def dies(*_: Any) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        raise KeyError("on the other rank")

    def sleeps(*_: Any) -> Any:
        time.sleep(60)

    folder = model_folder(tmp_path)
    rows = [*train_rows_of_one()] * 2
    with Engine(on_two(folder), "ray") as engine:
        with pytest.raises(EngineError, match=r"worker \d failed: TypeError"):
            engine.train(rows, lambda pack: None)
        with pytest.raises(WorkerLost, match=r"worker 1 \(cpu\) was killed by SIGKILL"):
            engine.train(rows, dies)
        engine.restart()
        assert engine.spec.n_nodes == 2, "the node is there"
        engine.workers.watchdog.limit_s = 3.0
        with pytest.raises(WorkerLost, match=r"worker 0 \(cpu\), worker 1 \(cpu\) made no progress for \d s in train"):
            engine.train(rows, sleeps)
    nodes.wait_without_workers()


def train_rows_of_one() -> list[Any]:
    from areno.types import TrainSequence

    return [TrainSequence([True, False, False], [3, 4, 5])]


def test_what_cannot_be_placed_is_one_line(
    nodes: TwoNodes, folder: Path, capfd: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = ["scheduler.type=ray", "cluster.n_nodes=3", "scheduler.setup_timeout=0", "engine.device=cpu"]
    assert go("gspo", *three) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == (
        "error: cluster.n_nodes: is 3, and the run takes 3 nodes with 1 CPU each, but the Ray cluster has 2 nodes: "
        "127.0.0.1 (0 GPUs, 1 CPU), 127.0.0.1 (0 GPUs, 1 CPU); areno waited 0 s for more (scheduler.setup_timeout "
        "changes that)"
    )
    with pytest.raises(CheckpointError, match=r"actor\.path: node 127\.0\.0\.1 has no /nowhere/model; each node reads"):
        Engine(on_two(Path("/nowhere/model")), "ray")
    monkeypatch.setattr(ray_workers, "RESERVE_S", 0.5)
    caplog.set_level("INFO", "areno")
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"CPU": 1.0}])
    ray.get(others.ready())
    try:
        with pytest.raises(EngineError, match=r"but others use them: 2 nodes with 1 CPU each wanted, 1 .*; raise sch"):
            Engine(on_two(model_folder(folder)), "ray")
        assert "for 2 nodes with 1 CPU each, which others use; of the Ray cluster 1 CPUs are free in all" in caplog.text
    finally:
        remove_placement_group(others)


# A driver that trains until it is interrupted. Each step takes longer than the test.
DRIVER = """
import signal, sys, time
from areno.engine.engine import Engine
from areno.types import TrainSequence
from tests.helpers.processes import started
from tests.helpers.tiny_engine import spec
from dataclasses import replace

def sleepy(*_):
    import time
    time.sleep(60)

before = signal.getsignal(signal.SIGTERM)
n_nodes = int(sys.argv[2])
engine = Engine(replace(spec(sys.argv[1], devices=n_nodes), n_nodes=n_nodes), "ray")
assert signal.getsignal(signal.SIGTERM) is before
print("trains", flush=True)
try:
    engine.train([TrainSequence([True, False, False], [3, 4, 5])] * 2, sleepy)
except KeyboardInterrupt:
    began = time.monotonic()
    engine.close()
    print("closed" if time.monotonic() - began < 8 else "too late", flush=True)
"""


@contextlib.contextmanager
def driver(folder: Path, n_nodes: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    path = folder / "script.py"
    path.write_text(DRIVER)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    command = [sys.executable, str(path), str(model_folder(folder / "model")), str(n_nodes)]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n", process.communicate()[1]
        time.sleep(0.5)
        yield process


def test_a_killed_driver_leaves_no_actor(nodes: TwoNodes, tmp_path: Path) -> None:
    with driver(tmp_path, 2) as process:
        workers = nodes.workers()
        assert len(workers) == 4, "an actor and a worker for each node"
        process.kill()
        until_ended(workers, 15)
    of_ray.connect(2)
    import ray

    until(lambda: ray.available_resources().get("CPU") == 2, 15, pause_s=0.2, found=lambda: "the devices are taken")


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_with_a_cluster_of_its_own_which_nobody_else_can_reach(twice: bool, tmp_path: Path) -> None:
    """The second one comes while Ray leaves its cluster."""
    address = "local" if twice else ""
    with driver(tmp_path, 1, RAY_ADDRESS=address, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1") as process:
        below = children_of(process.pid)
        assert set(listening(below)) == {"127.0.0.1"}
        os.killpg(process.pid, signal.SIGINT)
        if twice:
            assert process.stdout is not None
            assert process.stdout.readline() == "closed\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "" if twice else "closed\n", "")
        until_ended(below, 10)


def children_of(pid: int) -> list[int]:
    from tests.helpers.processes import children

    return [pid, *children(pid)]


def listening(pids: list[int]) -> list[str]:
    """The IPv4 addresses that processes listen at."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address = words[1].partition(":")[0][-8:]  # the end of an IPv6 one: IPv4, or zeros for any
                found.append(".".join(str(byte) for byte in reversed(bytes.fromhex(address))))
    return found


def test_a_cluster_that_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
    for address, message in {
        "127.0.0.1:9": r"scheduler\.type: is ray, but the Ray cluster at 127\.0\.0\.1:9 cannot be joined: nothing",
        "ray://127.0.0.1:9": "RAY_ADDRESS=ray://127.0.0.1:9 is that of a Ray client server",
        "": "no Ray cluster runs on this machine and RAY_ADDRESS is not set; start one with `ray start`",
    }.items():
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=message):
            of_ray.connect(2)


def test_a_cluster_that_asks_for_a_token_is_told_at_once(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import AuthenticationError

    def refuses(address: str) -> None:
        assert address == nodes.cluster.address
        raise AuthenticationError("InvalidAuthToken")

    if ray.is_initialized():
        ray.shutdown()
    monkeypatch.setattr("ray._raylet.GcsClient", refuses)
    with pytest.raises(ConfigError, match=r"cannot be joined: it asks for a token: set RAY_AUTH_MODE=token, and put"):
        of_ray.connect(2)
