"""The description of an engine that each worker receives: models, devices and settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from areno.config.layout import Layout
from areno.config.models import MicroBatchSpec
from areno.config.run import EngineConfig
from areno.specs.role import RoleSpec

LOOPBACK = "127.0.0.1"


SharePrefixes = Literal["auto", "on", "off"]
"""When training and scoring compute each shared prefix only once; see EngineSpec.share_prefixes."""


@dataclass(frozen=True)
class WorkerAddress:
    device: str  # "cpu" or "cuda:<i>"
    host: str = LOOPBACK  # of the machine; the default is the driver's

    def __str__(self) -> str:
        return self.device if self.host == LOOPBACK else f"{self.device} of {self.host}"


@dataclass(frozen=True, kw_only=True)
class ProfilingSpec:
    """What each worker records for profiling."""

    folder: str  # exists
    events: bool = False  # for the trace of the run
    memory_entries: int | None = None  # events that snapshots of the device memory hold; None: no snapshots


@dataclass(kw_only=True)
class EngineSpec:
    """One engine: its models, the devices they are on, and the settings of the section `engine`.

    A role with the folder of the actor starts from the actor's weights, even if they are random. `turn_end_ids` are the
    tokens with which the chat template ends the assistant's turns. A saved actor lists them in generation_config.json.
    `planned` roles are loaded later by `Engine.ensure_roles`. If they cannot fit together, an error is raised before
    the first one is loaded.
    """

    actor: RoleSpec  # without an optimizer the engine cannot train it
    devices: list[str]  # "cpu" or "cuda:<i>" of each rank
    engine: EngineConfig = field(default_factory=EngineConfig)  # its world_size is ignored
    dtype: str = "float32"  # of all weights: the name of a torch dtype
    seed: int = 1  # of random weights, and of rollouts without a seed of their own
    routing_replay: bool = False  # the decoder returns the experts of each token, so that training can use the same
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)  # scoring, and training without UpdateSpec
    share_prefixes: SharePrefixes = "auto"  # when the prefixes that rows share are computed once, see `PrefixSharing`
    tokenizer_path: str = ""  # for stop strings, grammars and checkpoints; "": of the actor
    eos_token_ids: tuple[int, ...] = ()  # end a completion, in addition to those in the actor's files
    turn_end_ids: tuple[int, ...] = ()  # some of eos_token_ids
    texts: tuple[tuple[int, int], ...] = ()  # ranges (first, end) of the ids that may be sampled; empty: all
    context_len: int = 0  # of the actor, according to config.json; only the driver reads it
    planned: dict[str, RoleSpec] = field(default_factory=dict)
    n_nodes: int = 1  # machines, each with equally many consecutive ranks
    hosts: tuple[str, ...] = ()  # address of each rank's machine; empty: the driver's, or not yet known
    shared: tuple[tuple[str, str], ...] = ()  # (setting, its folder, which all machines must see)
    setup_timeout: float = 0.0  # seconds to wait for missing machines
    profiling: ProfilingSpec | None = None

    def without_optimizer(self) -> EngineSpec:
        return replace(self, actor=replace(self.actor, optimizer=None))

    def turn_end_ids_of(self, role: str) -> tuple[int, ...]:
        """Return the end-of-turn tokens that generation_config.json of a saved role must list."""
        return self.turn_end_ids if role == "actor" else ()

    def records_routes(self, role: str) -> bool:
        """Return whether the decoder of a role records the experts of each token. Only training needs them."""
        return self.routing_replay and role == "actor"

    @property
    def addresses(self) -> list[WorkerAddress]:
        hosts = self.hosts or [LOOPBACK] * self.world_size
        return [WorkerAddress(device, host) for device, host in zip(self.devices, hosts, strict=True)]

    def n_ranks_on_machine(self, rank: int) -> int:
        hosts = [address.host for address in self.addresses]
        return hosts.count(hosts[rank])

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def layout(self) -> Layout:
        return self.engine.layout(self.world_size)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on.

        By default it is off with engine.exact, because it changes the order of sums.
        """
        wanted = self.engine.sequence_parallel
        return (not self.engine.exact if wanted is None else wanted) and self.layout.is_sharded
