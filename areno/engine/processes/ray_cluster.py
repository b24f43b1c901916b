"""Joins or starts a Ray cluster, and finds the nodes that it can give to a run."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from areno import heartbeat
from areno.errors import ConfigError, EngineError, Key, Problem

logger = logging.getLogger("areno")

_KEY = "scheduler.type"
TIMEOUT = Key("scheduler.setup_timeout")
_CHECK_EVERY_S = 0.5
_ANSWER_S = 5.0
_LOCAL_HOST = "127.0.0.1"
_AUTO, _LOCAL = "auto", "local"  # values of RAY_ADDRESS besides HOST:PORT
_GPU, _CPU = "GPU", "CPU"
_GUESSES = ("Some common causes include", "There are some potential root causes")
# These switch off Ray's usage reports, its warning about a future change on nodes without GPUs, and the end of its log,
# which Ray prints when a node is lost.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}


@dataclass(frozen=True)
class Node:
    """A live node of the Ray cluster. `gpus` and `cpus` count the devices that Ray manages, free or in use."""

    id: str
    host: str
    gpus: int
    cpus: int
    port: int = 0  # of Ray's process on the node

    def accepts_connections(self) -> bool:
        """Return whether Ray's process accepts connections. Ray itself notices a lost node after half a minute."""
        return _is_listening(self.host, self.port)

    def n_devices(self, kind: str) -> int:
        return self.gpus if kind == "cuda" else self.cpus


def resource_name(kind: str) -> str:
    return _GPU if kind == "cuda" else _CPU


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(Problem(_KEY, "is ray, which is not installed: pip install 'areno[ray]'"))
    try:
        importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(Problem(_KEY, "is ray, which cannot be imported: {}; install it again", error)) from error


def connect(n_nodes: int, n_devices: int | None = None) -> None:
    """Connect this process to a Ray cluster, unless it is connected.

    The environment variable RAY_ADDRESS names the cluster. Without this variable, a cluster that runs on this machine
    is used. A run on one node starts a cluster on this machine if none runs here and RAY_ADDRESS is not set, or if
    RAY_ADDRESS=local. The started cluster ends with the process.

    Raises ConfigError if no cluster can be joined or started, and EngineError if a started cluster would be reachable
    from other machines.
    """
    for name, value in QUIET.items():  # before Ray is imported
        os.environ.setdefault(name, value)
    check_installed()
    import ray

    if ray.is_initialized():
        return
    _drop_log_lines()
    given = given_address(n_nodes)
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what matters in it comes as an exception, too
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    with _sigterm_restored():
        if given == _LOCAL:
            _start_local_cluster(ray, max(os.cpu_count() or 1, n_devices or 1), quiet)
            return
        try:
            address = _address_to_join(given)
            is_there = address is not None and _accepts_connections(address)
            if given and not is_there:  # Ray would try for minutes
                raise ConnectionError("nothing answers there")
            if is_there:
                if given or "RAY_AUTH_MODE" in os.environ:  # without both, Ray finds the token of the cluster it finds
                    _check_token(str(address))
                ray.init(address=given, **quiet)
                # Ray takes about a second to leave when Python ends. Ctrl-C would interrupt that with a traceback.
                atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
                return
        except ConfigError:
            raise
        except Exception as error:  # Ray raises exceptions of its transport
            where = "the Ray cluster of this machine" if given in (None, _AUTO) else f"the Ray cluster at {given}"
            raise ConfigError(
                Problem(_KEY, "is ray, but {} cannot be joined: {}", where, shortened_to_one_line(str(error)))
            ) from error
        if n_nodes > 1:
            text = (
                "is ray, but no Ray cluster runs on this machine and RAY_ADDRESS is not set; start one with `ray start`"
            )
            raise ConfigError(Problem(_KEY, text))
        _start_local_cluster(ray, max(os.cpu_count() or 1, n_devices or 1), quiet)


def given_address(n_nodes: int) -> str | None:
    """Return RAY_ADDRESS. Raises ConfigError if a run on `n_nodes` nodes cannot use it."""
    given = os.environ.get("RAY_ADDRESS") or None
    host, _, port = (given or "").rpartition(":")
    if given is None or given == _AUTO or (host and port.isdecimal() and not set(host) & set("/, ")):
        return given
    expected = "RAY_ADDRESS=HOST:PORT as `ray start` prints it, or without"
    if given == _LOCAL:
        if n_nodes == 1:
            return given
        text = "is ray, but RAY_ADDRESS=local starts Ray on this machine alone, and {} is {}; start the run with {}"
        raise ConfigError(Problem(_KEY, text, Key("cluster.n_nodes"), n_nodes, expected))
    if given.startswith("ray://"):
        text = "is ray, but RAY_ADDRESS={} is that of a Ray client server; start the run on a node of the cluster, {}"
        raise ConfigError(Problem(_KEY, text, given, f"with {expected}"))
    raise ConfigError(Problem(_KEY, "is ray, but RAY_ADDRESS={} is no address; start the run with {}", given, expected))


def _address_to_join(given: str | None) -> str | None:
    """Return HOST:PORT of the cluster. None if no address is given and no cluster runs on this machine."""
    from ray._private import services

    try:
        return services.canonicalize_bootstrap_address(cast(str, None))  # None: read RAY_ADDRESS, then look for one
    except ConnectionError as error:
        if given != _AUTO:
            raise
        text = "is ray, but no Ray cluster runs on this machine, which RAY_ADDRESS=auto expects; start one with "
        text += "`ray start --head`, set RAY_ADDRESS=HOST:PORT, or unset it for a run with {}=1"
        raise ConfigError(Problem(_KEY, text, Key("cluster.n_nodes"))) from error


def ray_error_text(error: BaseException) -> str:
    """Return one line that says why an actor or its node has ended, from Ray's long message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines and type(error).__name__ == "OutOfMemoryError":  # its last line says where to read more
        return f"killed by Ray for lack of memory: {shortened_to_one_line(lines[0])}"
    last = lines[-1] if lines else type(error).__name__
    _, found, detail = last.partition("Worker exit detail: ")
    if not found:
        return shortened_to_one_line(last)
    guess = ", perhaps killed for lack of memory" if any(guesses in detail for guesses in _GUESSES) else ""
    return f"the process of Ray that held its workers has ended{guess}: {shortened_to_one_line(detail)}"


def shortened_to_one_line(words: str) -> str:
    """Shorten a message from Ray to one line of at most 250 characters, without Ray's guesses at the cause."""
    for guesses in _GUESSES:
        words = words.partition(guesses)[0]
    words = " ".join(words.strip(" .").split())
    return words if len(words) <= 250 else f"{words[:246]} ..."


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return _is_listening(host.strip("[]"), int(port))


def _check_token(address: str) -> None:
    """Raise ConnectionError if the cluster rejects our token. Ray itself would retry for long without a message."""
    try:
        from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
        from ray.exceptions import AuthenticationError
    except ImportError:  # other releases of Ray have another layout, and report the error themselves
        return
    raylet: Any = importlib.import_module("ray._raylet")  # without type hints
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # a client without a token would abort the process
        raylet.GcsClient(address=address)
    except AuthenticationError as error:
        raise ConnectionError(
            "it asks for a token: set RAY_AUTH_MODE=token, and put the token of its first node into ~/.ray/auth_token"
        ) from error


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _drop_log_lines() -> None:
    """Make Ray print no log lines in this process, even if Ray was imported before areno.

    The environment variable RAY_DEDUP_LOGS_SKIP_REGEX, which QUIET sets, has this effect only if it is set before Ray
    is imported. If the user has set the variable to another value, do nothing.
    """
    name = "RAY_DEDUP_LOGS_SKIP_REGEX"
    if os.environ.get(name) != QUIET[name]:
        return
    with contextlib.suppress(ImportError, AttributeError):  # another release of Ray
        from ray._private import ray_logging

        for printer in (ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator):
            printer.skip_re = cast(Any, SimpleNamespace(search=lambda line: True))


def _start_local_cluster(ray: Any, n_cpus: int, quiet: dict[str, Any]) -> None:
    """Start a Ray cluster on this machine that other machines cannot reach."""
    from ray._private import ray_constants

    # Ray listens at an address that other machines can reach, whatever address it is given. Only if clusters are
    # disabled, as Ray does on some systems, it does not.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(address="local", num_cpus=n_cpus, include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises exceptions of its processes and their files
        text = "is ray, but Ray cannot be started on this machine: {}"
        if isinstance(error, OSError):  # most often its sockets, whose paths may have 107 bytes
            text += "; set RAY_TMPDIR to a folder with a short path that can be written"
        raise ConfigError(Problem(_KEY, text, shortened_to_one_line(str(error)))) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # so that Ray ends all of its processes
    if {node["NodeManagerAddress"] for node in ray.nodes()} != {_LOCAL_HOST}:
        ray.shutdown()
        raise EngineError(
            "this version of Ray cannot be started on {} alone; start a cluster with `ray start`", _LOCAL_HOST
        )


@contextlib.contextmanager
def _sigterm_restored() -> Iterator[None]:
    """Restore the handler of SIGTERM when a `with` block ends. Ray's handler would end the process at once."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if in_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def nodes() -> list[Node]:
    """Return the nodes that Ray considers alive, those with the most GPUs (then CPUs) first."""
    import ray

    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get(_GPU, 0)),
            int(node["Resources"].get(_CPU, 0)),
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (-node.gpus, -node.cpus, node.host, node.id))


def free_devices(kind: str) -> dict[str, int]:
    """Return the number of free devices of a kind, "cuda" or "cpu", by Ray's node id."""
    from ray._private import state

    return {node: int(held.get(resource_name(kind), 0)) for node, held in state.available_resources_per_node().items()}


def wait_for_nodes(
    enough: Callable[[list[Node]], bool], timeout: float, what: str, key: Key | None = TIMEOUT
) -> list[Node]:
    """Wait until `enough` accepts the nodes or the timeout passes. The caller must check the result again.

    The log calls the awaited nodes `what`, and names `key` as the setting of the timeout.
    """
    deadline, told = time.monotonic() + timeout, False
    while not enough(found := nodes()) and time.monotonic() < deadline:
        if not told:
            limit = f"{timeout:g} s ({key})" if key else f"{timeout:g} s"
            logger.info("waiting up to %s for %s; the Ray cluster has %s", limit, what, describe_nodes(found))
            told = True
        heartbeat.beat()
        time.sleep(_CHECK_EVERY_S)
    return found


def has_room(found: Sequence[Node], kind: str, n_nodes: int, n_each: int) -> bool:
    """Return whether at least `n_nodes` of the nodes have `n_each` or more devices each, free or in use."""
    return sum(node.n_devices(kind) >= n_each for node in found) >= n_nodes


def n_device_sets(found: Sequence[Node], kind: str, n_nodes: int, n_each: int) -> int:
    """Return how many sets of `n_each` devices the nodes can hold, at most `n_nodes`. A node may hold several."""
    return min(n_nodes, sum(node.n_devices(kind) // n_each for node in found))


def too_few_devices_problem(kind: str, n_nodes: int, n_each: int, found: Sequence[Node], waited: float) -> Problem:
    key = "cluster.n_nodes" if n_nodes > 1 else "cluster.n_gpus_per_node"
    size = n_nodes if n_nodes > 1 else n_each
    text = "is {}, and the run takes {}, but the Ray cluster has {}; areno waited {:g} s for more ({} changes that)"
    return Problem(key, text, size, describe_request(kind, n_nodes, n_each), describe_nodes(found), waited, TIMEOUT)


def describe_request(kind: str, n_nodes: int, n_each: int) -> str:
    """Return the nodes that a run needs in words, such as `2 nodes with 8 GPUs each`."""
    each = " each" if n_nodes > 1 else ""
    return f"{_format_count(n_nodes, 'node')} with {_format_count(n_each, resource_name(kind))}{each}"


def describe_nodes(found: Sequence[Node]) -> str:
    """Return a list of nodes in words, such as `2 nodes: 10.0.0.1 (8 GPUs, 64 CPUs), 10.0.0.2 (8 GPUs, 64 CPUs)`."""
    if not found:
        return "no node"
    each = (f"{node.host} ({_format_count(node.gpus, _GPU)}, {_format_count(node.cpus, _CPU)})" for node in found)
    return f"{_format_count(len(found), 'node')}: {', '.join(each)}"


def _format_count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
