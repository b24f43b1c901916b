"""Nodes of a cluster without Ray: what a layout takes, what nodes must have in common, what is refused at the door."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import yaml

from areno.api import get_algorithm
from areno.api.trainer import Trainer
from areno.config.run import ClusterConfig, EngineConfig, SchedulerConfig
from areno.engine.processes import ray_cluster as cluster
from areno.engine.processes import ray_workers
from areno.engine.processes.ray_cluster import Node, describe_nodes, has_room, n_device_sets, too_few_devices_problem
from areno.engine.processes.ray_host import NodeReport, create_probe_file, interface_of, versions
from areno.engine.processes.ray_workers import check_folders, check_versions
from areno.errors import CheckpointError, ConfigError, EngineError, WorkerLost
from areno.launch.compose import load
from areno.plan import devices
from areno.run.setup import Setup
from areno.specs.role import RoleSpec
from tests.helpers.pages import blocks, run_here
from tests.helpers.ray_cluster import ENVIRONMENT, needs_ray
from tests.helpers.tiny_engine import engine_spec

BIG, SMALL, HEAD = Node("a", "10.0.0.1", 8, 64), Node("b", "10.0.0.2", 4, 32), Node("c", "10.0.0.3", 0, 16)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("gspo").config, "quickstart", list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("cluster.n_nodes=2", "cluster.n_nodes: is 2, but scheduler.type=local runs on this machine alone; set"),
        ("scheduler.setup_timeout=5", "scheduler.setup_timeout: is 5, but scheduler.type is local, so no nodes"),
        ("scheduler.type=ray engine.workers=inline", "engine.workers: is inline, which runs in this process, but"),
        (
            "scheduler.type=ray cluster.n_nodes=2 cluster.n_gpus_per_node=4 engine.world_size=4",
            "engine.world_size: is 4, but cluster.n_nodes=2 and cluster.n_gpus_per_node=4 make 8; leave one of",
        ),
        (
            "scheduler.type=ray cluster.n_nodes=2 engine.world_size=3",
            "engine.world_size: is 3, which cluster.n_nodes=2 nodes cannot share evenly",
        ),
        (
            "scheduler.type=ray cluster.n_nodes=2 engine.world_size=4 engine.tp_size=4",
            "engine.tp_size: is 4, but a node has 2 devices of the run; tensor parallel stays inside a node",
        ),
        (
            "cluster.n_gpus_per_node=3 engine.tp_size=2",
            "engine.tp_size: is 2, but a node has 3 devices of the run; tensor parallel stays inside a node",
        ),
        ("cluster.n_nodes=0", "cluster.n_nodes: is 0; it must be more than 0"),
    ],
)
def test_settings_that_do_not_fit_together(overrides: str, message: str) -> None:
    assert problem(*overrides.split()).startswith(message)


def settings(engine: EngineConfig, cluster: ClusterConfig, scheduler: SchedulerConfig) -> Any:
    """The sections that the devices of a run depend on."""
    return SimpleNamespace(engine=engine, cluster=cluster, scheduler=scheduler)


def on_nodes(monkeypatch: pytest.MonkeyPatch, nodes: list[Node], n_nodes: int, **engine: Any) -> list[str]:
    """The devices of a run on a cluster of these nodes."""
    monkeypatch.setattr(cluster, "connect", lambda *_: None)
    monkeypatch.setattr(cluster, "nodes", lambda: nodes)
    of_cluster = {name: engine.pop(name) for name in ("n_gpus_per_node",) if name in engine}
    scheduler = SchedulerConfig(type="ray", setup_timeout=engine.pop("setup_timeout", 0))
    return devices.devices_of(settings(EngineConfig(**engine), ClusterConfig(n_nodes=n_nodes, **of_cluster), scheduler))


def test_the_devices_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [BIG, SMALL, HEAD]
    four = [f"cuda:{index}" for index in range(4)]
    assert on_nodes(monkeypatch, nodes, 1) == [*four, *(f"cuda:{index}" for index in range(4, 8))]
    assert on_nodes(monkeypatch, nodes, 2) == four * 2, "as many as the smaller one has"
    assert on_nodes(monkeypatch, nodes, 2, world_size=4) == ["cuda:0", "cuda:1"] * 2
    assert on_nodes(monkeypatch, nodes, 2, n_gpus_per_node=3) == four[:3] * 2
    assert on_nodes(monkeypatch, nodes, 3, device="cpu", tp_size=2) == ["cpu"] * 6
    assert on_nodes(monkeypatch, [HEAD], 1) == ["cpu"]
    with pytest.raises(
        ConfigError, match=r"n_nodes: is 3, and the run takes 3 nodes with 1 GPU each, but the Ray clus"
    ):
        on_nodes(monkeypatch, nodes, 3)
    with pytest.raises(ConfigError, match=r"n_gpus_per_node: is 9, and the run takes 1 node with 9 GPUs, but"):
        on_nodes(monkeypatch, nodes, 1, n_gpus_per_node=9)
    six = [Node(name, name, 6, 8) for name in "ab"]
    with pytest.raises(
        ConfigError, match=r"engine\.tp_size: is 4, but a node has 6 devices of the run; tensor parallel"
    ):
        on_nodes(monkeypatch, six, 2, tp_size=4)  # of 12 devices, 4 would be on both


def test_the_cpu_of_a_cluster_is_taken_with_a_word_and_not_beside_gpus_that_ray_was_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert on_nodes(monkeypatch, [HEAD], 1, device="cpu") == ["cpu"]
    assert caplog.messages == []
    assert on_nodes(monkeypatch, [HEAD], 1) == ["cpu"]
    assert caplog.messages == [
        "engine.device=auto takes the CPU, since Ray sees no GPU: the Ray cluster has 1 node: "
        "10.0.0.3 (0 GPUs, 16 CPUs)"
    ]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    refused = r"^engine\.device: is auto, and Ray sees no GPU, but this machine has 2: .*; start Ray with --num-gpus=N"
    with pytest.raises(ConfigError, match=refused):
        on_nodes(monkeypatch, [HEAD], 1)
    assert on_nodes(monkeypatch, [HEAD], 1, device="cpu") == ["cpu"]


def test_nodes_with_gpus_may_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a cluster has often none, and is there first."""
    found = [HEAD]
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: found.extend([BIG, SMALL]))
    four = [f"cuda:{index}" for index in range(4)]
    assert on_nodes(monkeypatch, found, 2, setup_timeout=30) == four * 2


def test_the_devices_of_this_machine() -> None:
    engine, local = EngineConfig(device="cpu"), SchedulerConfig()
    assert devices.devices_of(settings(engine, ClusterConfig(n_gpus_per_node=3), local)) == ["cpu"] * 3
    assert devices.devices_of(settings(engine, ClusterConfig(), local)) == ["cpu"]
    with pytest.raises(ConfigError, match=r"^cluster\.n_gpus_per_node: is 5000; on the CPU of this machine"):
        devices.devices_of(settings(engine, ClusterConfig(n_gpus_per_node=5000), local))
    with pytest.raises(
        ConfigError, match=r"^engine\.tp_size: is 5000 with engine\.cp_size=1; on the CPU of this machine"
    ):
        devices.devices_of(settings(EngineConfig(device="cpu", tp_size=5000), ClusterConfig(), local))


def test_the_workers_beside_the_reward_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other nodes take none of this machine's cores."""
    local, ray = SchedulerConfig(), SchedulerConfig(type="ray")

    def here(engine: EngineConfig, scheduler: SchedulerConfig = ray, **cluster: int) -> int:
        return devices.n_local_workers(settings(engine, ClusterConfig(**cluster), scheduler))

    on_cpu = EngineConfig(device="cpu")
    assert here(on_cpu, local, n_gpus_per_node=3) == 3
    assert here(on_cpu, n_nodes=2, n_gpus_per_node=3) == 3
    assert here(EngineConfig(device="cpu", world_size=16), n_nodes=4) == 4
    for visible, expected in ((8, 8), (2, 2), (0, 0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda n=visible: n)
        assert here(EngineConfig(device="cuda"), n_nodes=2) == expected
        assert here(EngineConfig(device="cuda", world_size=16), n_nodes=2) == expected


def test_what_is_left_of_a_layout() -> None:
    assert has_room([BIG, SMALL, HEAD], "cuda", 2, 4)
    assert not has_room([BIG, SMALL, HEAD], "cuda", 2, 8)
    assert n_device_sets([BIG, HEAD], "cuda", 2, 4) == 2, "one node takes both"
    assert n_device_sets([SMALL, HEAD], "cuda", 2, 4) == 1
    assert n_device_sets([SMALL, HEAD], "cuda", 2, 8) == 0
    assert n_device_sets([BIG], "cpu", 2, 8) == 2, "no more than there were"
    assert str(too_few_devices_problem("cuda", 2, 8, [BIG, HEAD], 30.0)) == (
        "cluster.n_nodes: is 2, and the run takes 2 nodes with 8 GPUs each, but the Ray cluster has 2 nodes: "
        "10.0.0.1 (8 GPUs, 64 CPUs), 10.0.0.3 (0 GPUs, 16 CPUs); areno waited 30 s for more (scheduler.setup_timeout "
        "changes that)"
    )
    assert describe_nodes([]) == "no node"


def test_a_node_that_hangs_is_seen_as_lost_until_its_devices_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may accept connections still, and Ray gives it up after a minute only."""
    free = {"a": 8, "b": 0}
    monkeypatch.setattr(Node, "accepts_connections", lambda node: node.id != "c")
    monkeypatch.setattr(cluster, "free_devices", lambda kind: free)
    monkeypatch.setattr(ray_workers, "lost_nodes", {"b"})
    assert not ray_workers.has_noticed_lost_nodes("cuda", 4, [BIG, SMALL])
    assert ray_workers.has_noticed_lost_nodes("cuda", 4, [BIG])
    free["b"] = 4
    assert ray_workers.has_noticed_lost_nodes("cuda", 4, [BIG, SMALL, HEAD])
    monkeypatch.setattr(ray_workers, "lost_nodes", {"b", "c"})
    assert not ray_workers.has_noticed_lost_nodes("cuda", 4, [BIG, SMALL, HEAD])


@pytest.mark.parametrize(("scheduler", "retries", "tries"), [("ray", 1, 2), ("ray", 0, 1), ("local", 1, 1)])
def test_a_node_that_is_lost_while_models_load_counts_for_the_retries(
    monkeypatch: pytest.MonkeyPatch, scheduler: Any, retries: int, tries: int
) -> None:
    trainers: list[Any] = []

    def from_plan(*_: Any) -> Any:
        trainer = MagicMock()
        trainer.__exit__.return_value = False
        if not trainers:
            trainer.__enter__.return_value.init.side_effect = WorkerLost("node b was lost")
        trainers.append(trainer)
        return trainer

    monkeypatch.setattr(Trainer, "from_plan", from_plan)
    config = SimpleNamespace(scheduler=SchedulerConfig(type=scheduler))
    run = MagicMock()
    run.recovery.may_restart = bool(retries)
    run.recovery.give_up.side_effect = WorkerLost("given up")
    with ExitStack() as stack:
        with pytest.raises(WorkerLost) if tries == 1 else nullcontext():
            trainer = Setup._load_models(cast(Any, SimpleNamespace(config=config, run=run)), stack, cast(Any, None), {})
            assert trainer is trainers[1].__enter__.return_value
            assert not trainers[1].__exit__.called, "it stays open"
        assert len(trainers) == tries
        assert trainers[0].__exit__.called, "nothing of the first is left"
        assert run.recovery.count_restart.call_count == tries - 1


def report(host: str = "10.0.0.2", missing: tuple[str, ...] = (), **other: str) -> NodeReport:
    return NodeReport("a", host, {**versions(), **other}, list(missing))


def test_versions_that_differ_are_named() -> None:
    own = versions()
    check_versions([report()])
    other = rf"python 3\.1 \(here {own['python']}\), torch 1\.0 \(here {own['torch']}\)"
    with pytest.raises(EngineError, match=rf"^node 10\.0\.0\.2 has {other}; install the same versions on all nodes$"):
        check_versions([report(), report(torch="1.0", python="3.1")])
    assert "+" not in own["torch"], "a build for another accelerator is the same version"


def test_gpus_that_torch_does_not_see_are_told() -> None:
    reports = [NodeReport("a", "10.0.0.1", versions(), [], n_cuda=2), NodeReport("b", "10.0.0.2", versions(), [])]
    ray_workers.check_devices(engine_spec(devices=["cpu"] * 4, n_nodes=2), reports)
    on_gpus = engine_spec(devices=["cuda:0", "cuda:1"] * 2, n_nodes=2)
    with pytest.raises(
        EngineError, match=r"^torch sees 0 CUDA devices on node 10\.0\.0\.2, where Ray gives the run 2; look"
    ):
        ray_workers.check_devices(on_gpus, reports)


def test_folders_that_a_node_does_not_see(tmp_path: Path) -> None:
    spec = engine_spec("/models/m", devices=["cpu"] * 2, n_nodes=2)
    probe_file = create_probe_file(str(tmp_path / "outputs"))
    check_folders(spec, [report()], {"cluster.fileroot": probe_file})
    with pytest.raises(CheckpointError, match=r"^actor\.path: node 10\.0\.0\.2 has no /models/m; each node reads"):
        check_folders(spec, [report(missing=("/models/m",))], {})
    spec.planned = {"ref": RoleSpec(path="/models/ref", head="lm", key="ref.path")}
    with pytest.raises(CheckpointError, match=r"^ref\.path: node 10\.0\.0\.2 has no /models/ref; each node reads"):
        check_folders(spec, [report(missing=("/models/ref",))], {})
    with pytest.raises(
        ConfigError, match=rf"^cluster\.fileroot: node 10\.0\.0\.2 does not see what is .* {probe_file.parent};"
    ):
        check_folders(spec, [report(), report(missing=(str(probe_file),))], {"cluster.fileroot": probe_file})


def test_ranks_know_their_machines() -> None:
    spec = engine_spec(devices=["cuda:0", "cuda:1"] * 2, tp_size=2, n_nodes=2)
    assert [str(address) for address in spec.addresses][-1] == "cuda:1"
    assert spec.n_ranks_on_machine(0) == 4, "until the nodes are known, all run here"
    spec.hosts = ("a", "a", "b", "b")
    assert [str(address) for address in spec.addresses][2:] == ["cuda:0 of b", "cuda:1 of b"]
    assert spec.n_ranks_on_machine(3) == 2


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("local", "RAY_ADDRESS=local starts Ray on this machine alone, and cluster.n_nodes is 2; start the run with"),
        ("foo", "RAY_ADDRESS=foo is no address; start the run with RAY_ADDRESS=HOST:PORT as `ray start`"),
        ("a:1,b:2", "RAY_ADDRESS=a:1,b:2 is no address; start"),
        ("ray://127.0.0.1:9", "RAY_ADDRESS=ray://127.0.0.1:9 is that of a Ray client server; start the run"),
    ],
)
def test_an_address_that_a_run_cannot_use(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as caught:
        cluster.given_address(2)
    assert str(caught.value).startswith(f"scheduler.type: is ray, but {message}")


def test_addresses_that_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("auto", "10.0.0.1:6379", "[::1]:6379", "head:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert cluster.given_address(2) == address
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert cluster.given_address(1) == "local"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster.given_address(2) is None


def test_auto_without_a_cluster_is_told_in_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")

    def finds_none(*_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify `--address` flag")

    monkeypatch.setattr(services, "get_ray_address_from_environment", finds_none)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError) as caught:
        cluster.connect(1)
    assert str(caught.value) == (
        "scheduler.type: is ray, but no Ray cluster runs on this machine, which RAY_ADDRESS=auto expects; start one "
        "with `ray start --head`, set RAY_ADDRESS=HOST:PORT, or unset it for a run with cluster.n_nodes=1"
    )


DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: NodeHost
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            DEAD,
            "the process of Ray that held its workers has ended, perhaps killed for lack of memory: "
            "Worker unexpectedly exits with a connection error code 2. End of file",
        ),
        ("ray::NodeHost.listen() (pid=1)\n  File x\nOSError: no port\n\n", "OSError: no port"),
        ("", "RuntimeError"),
        ("word " * 100, ("word " * 50)[:246] + " ..."),
    ],
)
def test_what_ray_says_is_one_line(words: str, line: str) -> None:
    assert cluster.ray_error_text(RuntimeError(words)) == line


def test_a_process_that_ray_killed_for_lack_of_memory() -> None:
    """The last line of that error is where to read about it."""
    error = type("OutOfMemoryError", (RuntimeError,), {})
    words = "1 worker(s) were killed: the memory of the node is 31 of 32 GB.\n\nRefer to https://docs.ray.io/"
    assert cluster.ray_error_text(error(words)) == (
        "killed by Ray for lack of memory: 1 worker(s) were killed: the memory of the node is 31 of 32 GB"
    )


def test_ray_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^scheduler\.type: is ray, which is not installed: pip install 'areno\[ray\]'$"
    ):
        cluster.connect(2)


def test_a_ray_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('libray.so is missing')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    for name in cluster.QUIET:
        monkeypatch.setenv(name, "")
    with pytest.raises(
        ConfigError, match=r"is ray, which cannot be imported: libray\.so is missing; install it again$"
    ):
        cluster.connect(2)


@needs_ray
def test_ray_that_was_imported_before_prints_nothing_of_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import ray_logging

    printer = ray_logging.stdout_deduplicator
    monkeypatch.setattr(printer, "skip_re", None)  # as without RAY_DEDUP_LOGS_SKIP_REGEX
    batch = {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}
    assert [found["lines"] for found in printer.deduplicate(batch)] == [["Raylet is terminated."]]
    monkeypatch.setattr(cluster, "given_address", Mock(side_effect=ZeroDivisionError))  # before it joins a cluster
    with pytest.raises(ZeroDivisionError):
        cluster.connect(1)
    assert [found["lines"] for found in printer.deduplicate(batch)] == [[]]


@needs_ray
def test_a_ray_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes its sockets in TMPDIR, which is a long path in many a job of a cluster."""

    def init(**settings: Any) -> None:
        raise OSError("validate_socket_filename failed:\n path length cannot exceed 107 bytes")

    said = (
        r"^scheduler\.type: is ray, but Ray cannot be started .*: validate.* failed: path .* bytes; set RAY_TMPDIR to a"
    )
    with pytest.raises(ConfigError, match=said):
        cluster._start_local_cluster(SimpleNamespace(init=init), 1, {})


@pytest.mark.slow
@needs_ray
def test_a_token_that_is_missing_is_one_line(tmp_path: Path) -> None:
    """A client of Ray that is to use a token and has none ends its process, with a stack of C++."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.1:{server.getsockname()[1]}"}
        variables |= {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ""}
        command = [sys.executable, "-c", "from areno.engine.processes import ray_cluster; ray_cluster.connect(1)"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.endswith(
        "cannot be joined: it asks for a token: set RAY_AUTH_MODE=token, and put the token of its first node into "
        "~/.ray/auth_token"
    ), done.stderr


PAGE = Path(__file__).parents[3] / "docs/many_machines.md"


def test_the_job_of_the_page_is_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """Its YAML, with a node of GPUs for each that the run takes, and the command in it. The Slurm script is one."""
    [script] = [text for info, text in blocks(PAGE) if text.startswith("#!/bin/bash")]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    [text] = [text for info, text in blocks(PAGE) if info == "yaml"]
    job = yaml.safe_load(text)["spec"]
    assert run_here(job["entrypoint"], "--cfg", "job") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    [workers] = job["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert config["cluster"]["n_nodes"] == workers["replicas"]
    assert config["cluster"]["n_gpus_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = container["volumeMounts"][0]["mountPath"]
    assert config["cluster"]["fileroot"].startswith(f"{mounted}/")
