"""Finds the devices of a run: on this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

from areno.config.experiments import ExperimentConfig
from areno.config.run import EngineConfig
from areno.errors import ConfigError, Key, Problem

logger = logging.getLogger("areno")


def find_devices(
    engine: EngineConfig, cuda_ids: Sequence[int] | None = None, key: str = "engine.world_size"
) -> list[str]:
    """Return a device of this machine for each worker, such as ["cuda:0", "cuda:1"], or "cpu" for each.

    Raises ConfigError, which names the setting `key`, if there are too few devices.
    """
    import torch

    visible = torch.cuda.device_count() if engine.device != "cpu" else 0
    if engine.device == "cuda" and not visible:
        raise ConfigError([Problem("engine.device", "is cuda, but torch sees no CUDA device; use cpu or auto")])
    if not visible:
        if cuda_ids is not None:
            why = "torch sees no CUDA device" if engine.device != "cpu" else "engine.device is cpu"
            raise ConfigError([Problem("devices", f"is {list(cuda_ids)}, but {why}; leave it out to run on the CPU")])
        wanted, most = engine.world_size or engine.tp_size * engine.cp_size, max(64, os.cpu_count() or 1)
        if wanted > most:
            found = "; on the CPU of this machine a run has at most {} worker processes"
            if engine.world_size is None:
                text, cp = "is {} with {}={}" + found, Key("engine.cp_size")
                raise ConfigError(Problem("engine.tp_size", text, engine.tp_size, cp, engine.cp_size, most))
            raise ConfigError(Problem(key, "is {}" + found, wanted, most))
        return ["cpu"] * wanted
    if cuda_ids is not None:
        if missing := [index for index in cuda_ids if index >= visible]:
            shown = "that is 0" if visible == 1 else f"those are 0 to {visible - 1}"
            found = f"has {missing[0]}, but {visible} CUDA devices are visible; {shown}"
            raise ConfigError([Problem("devices", found)])
        return [f"cuda:{index}" for index in cuda_ids]
    wanted = engine.world_size or visible
    if wanted > visible:
        raise ConfigError(Problem(key, f"is {wanted}, but only {visible} CUDA devices are visible"))
    return [f"cuda:{index}" for index in range(wanted)]


def devices_of(config: ExperimentConfig) -> list[str]:
    """Return the devices of a run, one for each worker, node by node.

    Device numbers start from 0 on each node, such as ["cuda:0", "cuda:1", "cuda:0", "cuda:1"] for two nodes.
    """
    engine, n_each = config.engine, config.cluster.n_gpus_per_node
    if config.scheduler.type == "ray":
        return _devices_of_nodes(config)
    if engine.world_size is None and n_each is not None:
        return find_devices(replace(engine, world_size=n_each), key="cluster.n_gpus_per_node")
    return find_devices(engine)


def _n_devices_per_node(config: ExperimentConfig) -> int | None:
    """Return how many devices per node the settings ask for. None if they do not say."""
    size, cluster = config.engine.world_size, config.cluster
    return cluster.n_gpus_per_node or (size and size // cluster.n_nodes)


def n_local_workers(config: ExperimentConfig) -> int:
    """Return how many workers share the CPU cores of this machine. With Ray this is an upper bound."""
    if config.scheduler.type == "local":
        return len(devices_of(config))
    import torch

    engine, each = config.engine, _n_devices_per_node(config)
    visible = torch.cuda.device_count() if engine.device != "cpu" else 0
    if visible or engine.device == "cuda":  # this machine may have no device of the run
        return visible if each is None else min(each, visible)
    return each or engine.tp_size


def _devices_of_nodes(config: ExperimentConfig) -> list[str]:
    from areno.engine.processes import ray_cluster

    engine, n_nodes, timeout = config.engine, config.cluster.n_nodes, config.scheduler.setup_timeout
    n_each = _n_devices_per_node(config)
    ray_cluster.connect(n_nodes, n_each or engine.tp_size)

    def kind_of(nodes: Sequence[ray_cluster.Node]) -> str:
        return engine.device if engine.device != "auto" else "cuda" if any(node.gpus for node in nodes) else "cpu"

    def min_devices_per_node(kind: str) -> int:
        return n_each or (engine.tp_size if kind == "cpu" else 1)

    def have_enough(nodes: Sequence[ray_cluster.Node]) -> bool:  # the nodes with GPUs may come last
        return ray_cluster.has_room(nodes, kind := kind_of(nodes), n_nodes, min_devices_per_node(kind))

    kind = kind_of(ray_cluster.nodes())
    found = ray_cluster.wait_for_nodes(
        have_enough, timeout, ray_cluster.describe_request(kind, n_nodes, min_devices_per_node(kind))
    )
    n_least = min_devices_per_node(kind := kind_of(found))
    if not ray_cluster.has_room(found, kind, n_nodes, n_least):
        raise ConfigError(ray_cluster.too_few_devices_problem(kind, n_nodes, n_least, found, timeout))
    if kind == "cpu" and engine.device == "auto":
        _warn_of_cpu(ray_cluster.describe_nodes(found))
    if n_each is None and kind == "cuda":
        n_least = sorted((node.gpus for node in found), reverse=True)[n_nodes - 1]
        if problems := [problem.under("engine") for problem in engine.node_problems(n_least)]:
            raise ConfigError(problems)
    return ["cpu" if kind == "cpu" else f"cuda:{rank % n_least}" for rank in range(n_nodes * n_least)]


def _warn_of_cpu(found: str) -> None:
    """Warn that engine.device=auto uses CPUs. Raises ConfigError if this machine has GPUs that Ray does not see."""
    import torch

    if n_here := torch.cuda.device_count():
        text = "is auto, and Ray sees no GPU, but this machine has {}: the Ray cluster has {}; start Ray with "
        text += "--num-gpus=N on the nodes with GPUs, or set it to cpu"
        raise ConfigError(Problem("engine.device", text, n_here, found))
    logger.warning("engine.device=auto takes the CPU, since Ray sees no GPU: the Ray cluster has %s", found)
