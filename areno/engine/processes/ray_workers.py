"""The driver's view of worker processes on the nodes of a Ray cluster.

One actor on each node holds the worker processes there (NodeHost). For each node, a thread of the driver fetches
messages and progress counters, about once a second if there is no message. So the driver notices a node that stops
answering, even while the driver's main thread is busy.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from areno import heartbeat
from areno.engine.processes import ray_cluster
from areno.engine.processes.local import Arrived
from areno.engine.processes.messages import Command
from areno.engine.processes.ray_host import NodeReport, create_probe_file, start_actor, versions
from areno.engine.processes.watchdog import FIELDS
from areno.errors import CheckpointError, ConfigError, EngineError, Key, Problem, WorkerLost
from areno.specs.engine import EngineSpec

logger = logging.getLogger("areno")

_ASK_S = 1.0  # after which a node answers although it has no messages
_SILENT_S = 20.0  # without an answer, after which a node counts as lost: its actor does nothing but answer
_SUSPECT_S = 4.0  # the same after a worker has failed, perhaps because another worker was lost
_ANSWER_S = 10.0  # for other calls of an actor
_KILL_S = 2.0
_CLOSE_S = 6.0  # longer than a worker has to end by itself
_START_S = 120.0  # for Ray to start an actor, whose node may still load Python from a slow disk
_MOVE_S = 10.0  # for Ray to move the actor of a lost node to another node
RESERVE_S = 30.0  # for Ray to hand out devices that should be free
_FORGET_S = 60.0  # for Ray to notice a lost node: it asks 5 times, for 10 seconds each
# Environment variables of the driver that workers inherit, unless their node sets them.
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "HF_HUB_OFFLINE", "TOKENIZERS_")

lost_nodes: set[str] = set()  # ids of nodes that this process knows or suspects to be lost


@dataclass
class _WorkerNode:
    id: str
    host: str
    actor: Any
    ranks: range


class RayProcesses:
    """Worker processes on the nodes of a Ray cluster.

    `again` means a restart after workers were lost. Fewer data-parallel replicas may then start, and a node may hold
    more ranks than before. `spec` describes the workers that were started.

    Raises ConfigError if the cluster is too small or a node does not see the shared folders, CheckpointError if a node
    lacks the model's folder, EngineError if the workers cannot be started, and WorkerLost if a node was lost meanwhile.
    """

    death_grace_s = _SUSPECT_S + 2 * _ASK_S

    def __init__(self, spec: EngineSpec, again: bool = False):
        ray_cluster.connect(spec.n_nodes, spec.world_size)
        import ray  # after `connect` has made it quiet

        self._ray: Any = ray
        self._nodes: list[_WorkerNode] = []
        self._group: Any = None  # the placement group
        self._inbox: SimpleQueue[Arrived] = SimpleQueue()
        self._lost: WorkerLost | None = None
        self._suspects_loss = False
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.spec = spec
        try:
            self._reserve_nodes(again)
            self._start()
        except self._ray.exceptions.RayTaskError as error:  # the node is alive and reports the cause
            self.close()
            raise EngineError(
                "the workers cannot be started on their node: {}", ray_cluster.ray_error_text(error)
            ) from error
        except self._ray.exceptions.RayError as error:
            lost_nodes.update(node.id for node in self._nodes)  # one of them; the others are free in a moment
            self.close()
            raise WorkerLost(
                "a node was lost while its workers started: {}", ray_cluster.ray_error_text(error)
            ) from error
        except BaseException:
            self.close()
            raise

    # -- start -----------------------------------------------------------------------------------------------------

    def _reserve_nodes(self, again: bool) -> None:
        """Choose the number of nodes, wait until the cluster has them, and reserve their devices."""
        spec = self.spec
        kind, n_nodes, n_each = spec.devices[0].partition(":")[0], spec.n_nodes, spec.world_size // spec.n_nodes
        what = ray_cluster.describe_request(kind, n_nodes, n_each)
        if lost_nodes:
            ray_cluster.wait_for_nodes(
                partial(has_noticed_lost_nodes, kind, n_each), _FORGET_S, "Ray to see which node is gone", None
            )
        found = ray_cluster.wait_for_nodes(
            lambda found: ray_cluster.has_room(found, kind, n_nodes, n_each), spec.setup_timeout, what
        )
        spread = ray_cluster.has_room(found, kind, n_nodes, n_each)
        if not spread:
            n_shares = ray_cluster.n_device_sets(found, kind, n_nodes, n_each) if again else 0
            while list(spec.engine.layout(n_shares * n_each).problems()):
                n_shares -= 1
            if not n_shares:
                raise ConfigError(ray_cluster.too_few_devices_problem(kind, n_nodes, n_each, found, spec.setup_timeout))
            if n_shares < n_nodes:
                n_copies, there_is = spec.engine.layout(n_shares * n_each).dp_size, ray_cluster.describe_nodes(found)
                text = "going on with %d of %d copies of the model, on what is left: the Ray cluster has %s, "
                text += "and no more came within %g s (%s)"
                logger.warning(text, n_copies, spec.layout.dp_size, there_is, spec.setup_timeout, ray_cluster.TIMEOUT)
            self.spec = spec = replace(spec, devices=spec.devices[: n_shares * n_each], n_nodes=n_shares)
        self._reserve_devices(kind, n_each, "STRICT_SPREAD" if spread else "SPREAD", found)

    def _reserve_devices(self, kind: str, n_each: int, strategy: str, found: Sequence[ray_cluster.Node]) -> None:
        """Reserve devices with a Ray placement group ("SPREAD": actors may share nodes), and start actors."""
        from ray.util.placement_group import placement_group, placement_group_table

        bundle = {ray_cluster.resource_name(kind): float(n_each)}
        self._group = placement_group([bundle] * self.spec.n_nodes, strategy=strategy)
        seconds, told = max(RESERVE_S, self.spec.setup_timeout), False
        limit = f"{seconds:g} s ({ray_cluster.TIMEOUT}, but at least {RESERVE_S:g} s)"
        deadline = time.monotonic() + seconds
        while not self._group.wait(1):
            heartbeat.beat()
            what = ray_cluster.describe_request(kind, self.spec.n_nodes, n_each)
            free = sum(ray_cluster.free_devices(kind).values())
            if not told:
                text = "waiting up to %s for %s, which others use; of the Ray cluster %d %ss are free in all"
                logger.info(text, limit, what, free, ray_cluster.resource_name(kind))
                told = True
            if time.monotonic() > deadline:
                message = (
                    "the Ray cluster has {}, but others use them: {} wanted, {} {}s are free in all after {:g} s; "
                )
                message += "raise {} to wait longer, or lower {}"
                there_is, unit = ray_cluster.describe_nodes(found), ray_cluster.resource_name(kind)
                n_nodes = Key("cluster.n_nodes")
                raise EngineError(message, there_is, what, free, unit, seconds, ray_cluster.TIMEOUT, n_nodes)
        ids = placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {node.id: node.host for node in ray_cluster.nodes()}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        for index in range(self.spec.n_nodes):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"scheduling_strategy": where, "num_cpus": n_each if kind == "cpu" else 0}
            if kind == "cuda":
                options["num_gpus"] = n_each
            actor = start_actor(self._ray, options, environment)
            ranks = range(index * n_each, (index + 1) * n_each)
            self._nodes.append(_WorkerNode(ids[index], hosts.get(ids[index], "?"), actor, ranks))

    def _start(self) -> None:
        """Check versions, devices and folders on the nodes, and start the workers and threads for messages."""
        probe_files = {key: create_probe_file(folder) for key, folder in self.spec.shared}
        try:
            paths = [*input_folders(self.spec).values(), *map(str, probe_files.values())]
            asked = [_call_actor(node.actor.report, paths) for node in self._nodes]
            reports = [self._wait_for_report(node, one) for node, one in zip(self._nodes, asked, strict=True)]
        finally:
            for probe_file in probe_files.values():
                probe_file.unlink(missing_ok=True)
        check_versions(reports)
        check_devices(self.spec, reports)
        check_folders(self.spec, reports, probe_files)
        for node, report in zip(self._nodes, reports, strict=True):  # Ray may have moved the actor of a lost node
            node.id, node.host = report.id, report.host
            lost_nodes.discard(node.id)
        hosts = [node.host for node in self._nodes for _ in node.ranks]
        self.spec = spec = replace(self.spec, hosts=tuple(hosts))
        self.counters = [0] * (FIELDS * spec.world_size)
        port = self._ray.get(_call_actor(self._nodes[0].actor.listen, hosts[0]), timeout=_START_S)
        self._ray.get([_call_actor(node.actor.start, spec, node.ranks, port) for node in self._nodes], timeout=_START_S)
        for node in self._nodes:
            thread = threading.Thread(
                target=self._fetch_messages, args=(node,), daemon=True, name=f"areno-node-{node.host}"
            )
            thread.start()
            self._threads.append(thread)

    def _wait_for_report(self, node: _WorkerNode, asked: Any) -> NodeReport:
        """Wait for the requested report of a node. Raises EngineError, or Ray's error if the node has ended."""
        try:
            deadline, is_lost = time.monotonic() + _START_S, False
            while not self._ray.wait([asked], timeout=1.0)[0] and time.monotonic() < deadline:
                heartbeat.beat()
                if not is_lost and node.id not in {alive.id for alive in ray_cluster.nodes()}:
                    deadline, is_lost = min(deadline, time.monotonic() + _MOVE_S), True
            return self._ray.get(asked, timeout=1.0)
        except self._ray.exceptions.RayError as error:
            is_there = node.id in {alive.id for alive in ray_cluster.nodes()}
            if not is_there or isinstance(error, self._ray.exceptions.OutOfMemoryError):
                raise
            text = "areno {} cannot be started on node {}: {}"
            if getattr(error, "actor_init_failed", False):  # a Python error, such as a missing module
                text += "; install the same version of areno on all nodes"
            raise EngineError(text, versions()["areno"], node.host, ray_cluster.ray_error_text(error)) from error

    # -- work ------------------------------------------------------------------------------------------------------

    def _fetch_messages(self, node: _WorkerNode) -> None:
        """Fetch messages and counters from a node until it is lost or `close` is called. Runs in a thread."""
        first, last = FIELDS * node.ranks.start, FIELDS * node.ranks.stop
        while not self._closed.is_set():
            try:
                asked, since = _call_actor(node.actor.receive, _ASK_S, group="messages"), time.monotonic()
                while not self._ray.wait([asked], timeout=0.5)[0]:
                    silent = time.monotonic() - since - _ASK_S
                    if self._closed.is_set():
                        return
                    if silent > (_SUSPECT_S if self._suspects_loss else _SILENT_S):
                        return self._mark_lost(node, f"it has not answered for {silent:.0f} s")
                arrived, counters = self._ray.get(asked)
            except self._ray.exceptions.ActorUnavailableError:
                return self._mark_lost(node, "its connection has ended")
            except Exception as error:  # Ray raises various exceptions when an actor, its node or Ray itself has ended
                return self._mark_lost(node, ray_cluster.ray_error_text(error))
            self.counters[first:last] = counters[first:last] or self.counters[first:last]
            if arrived != ([], []):
                self._inbox.put(arrived)
        return None

    def _mark_lost(self, node: _WorkerNode, why: str) -> None:
        """Record that a node is lost because of `why`, and wake a thread that waits in `receive`."""
        if self._closed.is_set():
            return
        lost_nodes.add(node.id)
        workers = f"worker {node.ranks[0]}" if len(node.ranks) == 1 else f"workers {node.ranks[0]} to {node.ranks[-1]}"
        self._lost = self._lost or WorkerLost("node {} with {} was lost: {}", node.host, workers, why)
        self._inbox.put(([], []))  # wakes a thread that waits in `receive`

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def send(self, rank: int, command: Command) -> None:
        self._raise_if_lost()
        [node] = [node for node in self._nodes if rank in node.ranks]
        packed = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        _call_actor(node.actor.send, rank, packed, group="commands")

    def receive(self, timeout: float | None) -> Arrived:
        self._raise_if_lost()
        messages: list[tuple[int, bytes]] = []
        gone: list[int] = []
        with suppress(Empty):
            more = self._inbox.get(timeout=timeout)
            while True:
                messages += more[0]
                gone += more[1]
                more = self._inbox.get_nowait()
        self._raise_if_lost()
        return messages, gone

    def exit_codes(self, rank: int | None = None, timeout: float = 0.0) -> dict[int, int | None]:
        self.expect_lost_node()
        self._raise_if_lost()
        asked = [
            _call_actor(node.actor.exit_codes, *((rank, timeout) if rank in node.ranks else (None, 0.0)))
            for node in self._nodes
        ]
        codes: dict[int, int | None] = dict.fromkeys(range(self.spec.world_size))
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=timeout + _SUSPECT_S)
        for one in ready:
            with suppress(self._ray.exceptions.RayError):  # the node is lost, which its thread notices, too
                codes |= self._ray.get(one)
        self._raise_if_lost()
        return codes

    def expect_lost_node(self) -> None:
        self._suspects_loss = True

    def stack_traces(self) -> dict[int, tuple[str, str]]:
        shown = {rank: ("", "(its node does not answer)") for node in self._nodes for rank in node.ranks}
        for one in self._wait_for_results([_call_actor(node.actor.stack_traces) for node in self._nodes], _ANSWER_S):
            with suppress(self._ray.exceptions.RayError):
                shown |= self._ray.get(one)
        return shown

    def _wait_for_results(self, asked: list[Any], timeout: float) -> list[Any]:
        return self._ray.wait(asked, num_returns=len(asked), timeout=timeout)[0] if asked else []

    def kill(self) -> None:
        self._closed.set()  # the end of the workers is not a loss
        self._inbox.put(([], list(range(self.spec.world_size))))
        self._wait_for_results(
            [_call_actor(node.actor.kill) for node in self._nodes], _KILL_S
        )  # a worker that hangs would not see the end of its actor
        for node in self._nodes:
            self._ray.kill(node.actor)

    def close(self) -> None:
        """Let all workers end by themselves, kill their actors, and release the reserved devices."""
        self._closed.set()
        if not self._ray.is_initialized():
            return  # the script has left the cluster, which has ended the actors
        from ray.util.placement_group import remove_placement_group

        with suppress(self._ray.exceptions.RayError):
            asked = [_call_actor(node.actor.close) for node in self._nodes]
            self._wait_for_results(asked, _SUSPECT_S if self._lost else _CLOSE_S)
            for node in self._nodes:
                self._ray.kill(node.actor)
        if self._group is not None:
            remove_placement_group(self._group)
        for thread in self._threads:
            thread.join(2 * _ASK_S)
        self._nodes, self._group, self._threads = [], None, []


def _call_actor(method: Any, *args: Any, group: str = "watch") -> Any:
    """Call a method in a concurrency group of NodeHost, and return the reference to the pending result."""
    return method.options(concurrency_group=group).remote(*args)


def has_noticed_lost_nodes(kind: str, n_each: int, found: Sequence[ray_cluster.Node]) -> bool:
    """Return whether Ray offers no devices of a lost node any more.

    A node that was lost is alive again if it accepts connections and has `n_each` free devices. A hung node may accept
    connections, but its devices stay in use.
    """
    lost = [node for node in found if node.id in lost_nodes]
    free = ray_cluster.free_devices(kind) if lost else {}
    return all(node.accepts_connections() and free.get(node.id, 0) >= n_each for node in lost)


def check_versions(reports: Sequence[NodeReport]) -> None:
    for report in reports:
        pairs = [(name, report.versions.get(name), own) for name, own in versions().items()]
        if other := [f"{name} {theirs} (here {own})" for name, theirs, own in pairs if theirs != own]:
            text = "node {} has {}; install the same versions on all nodes"
            raise EngineError(text, report.host, ", ".join(other))


def check_devices(spec: EngineSpec, reports: Sequence[NodeReport]) -> None:
    n_each = spec.world_size // spec.n_nodes if spec.devices[0].startswith("cuda") else 0
    for report in reports:
        if report.n_cuda < n_each:
            text = (
                "torch sees {} CUDA devices on node {}, where Ray gives the run {}; look at the driver and the torch "
            )
            text += "there, or set {}=cpu"
            raise EngineError(text, report.n_cuda, report.host, n_each, Key("engine.device"))


def input_folders(spec: EngineSpec) -> dict[str, str]:
    """Return the folders that every node reads directly, such as the model's, by the setting that names them."""
    lora = spec.actor.lora
    adapters = {"actor.init_lora_from": lora.init_from} if lora is not None and lora.init_from else {}
    return {"actor.path": spec.actor.path, **adapters, **{role.key: role.path for role in spec.planned.values()}}


def check_folders(spec: EngineSpec, reports: Sequence[NodeReport], probe_files: dict[str, Any]) -> None:
    """Raise an error if a node lacks a model folder, or a probe file that was written to a shared folder."""
    for report in reports:
        for key, folder in input_folders(spec).items():
            if folder in report.missing:
                text = "node {} has no {}; each node reads the model itself, so it must be there on all of them"
                raise CheckpointError(Problem(key, text, report.host, folder))
        for key, probe_file in probe_files.items():
            if str(probe_file) in report.missing:
                text = "node {} does not see what is written to {}; set a folder of a file system that all nodes share"
                raise ConfigError(Problem(key, text, report.host, probe_file.parent))
