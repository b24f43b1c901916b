"""The description of an engine that each worker receives: models, devices and settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from areno.config.models import MicroBatchSpec
from areno.config.run import EngineConfig, Layout
from areno.specs.role import RoleSpec

if TYPE_CHECKING:
    pass  # imports numpy, which takes a tenth of the time of `areno plan`


LOOPBACK = "127.0.0.1"


SharePrefixes = Literal["auto", "on", "off"]
"""When training and scoring compute the prefixes that rows share once; see EngineSpec.share_prefixes."""


@dataclass(frozen=True)
class WorkerAddress:
    """The address of a worker process.

    Attributes:
        device: "cpu" or "cuda:<i>".
        host: Address of the machine. The default is the driver's machine.
    """

    device: str
    host: str = LOOPBACK

    def __str__(self) -> str:
        return self.device if self.host == LOOPBACK else f"{self.device} of {self.host}"


@dataclass(frozen=True, kw_only=True)
class ProfilingSpec:
    """What each worker records about itself, beside its results.

    Attributes:
        folder: Folder of the files, which exists.
        events: Whether to record events for the trace of the run.
        memory_entries: Number of events that snapshots of the device memory hold. None makes no snapshots.
    """

    folder: str
    events: bool = False
    memory_entries: int | None = None


@dataclass(kw_only=True)
class EngineSpec:
    """One engine: its models, the devices they are on, and the settings of the section `engine`.

    Attributes:
        actor: The model that generates and is trained. Without an optimizer the engine cannot train it. A role with the
            same folder starts from the actor's weights, even if they are random.
        devices: "cpu" or "cuda:<i>" of each worker process, in the order of the ranks.
        engine: The section `engine` of the configuration. Its world_size is ignored: there is one rank for each of
            `devices`.
        dtype: Type of the weights of all models, as the name of a torch dtype.
        seed: Seed of random weights, and of rollouts without a seed of their own.
        routing_replay: Whether the decoder returns the experts of each token, so that training can use the same
            experts.
        mb_spec: Size of micro-batches in scoring, and in training if `Engine.train` gets no UpdateSpec.
        share_prefixes: When training and scoring compute the prefixes that rows share once: "on" if rows share any,
            "auto" if this saves at least a tenth of the tokens and, by estimate, a twentieth of the time, "off" never.
        tokenizer_path: Folder of the tokenizer for stop strings and grammars, which is also copied into checkpoints. ""
            takes the tokenizer of the actor.
        eos_token_ids: Tokens that end a completion, in addition to those in the actor's files.
        turn_end_ids: Those of them with which the chat template ends the assistant's turns. The generation_config.json
            of a saved actor lists them.
        texts: Ranges (first, end) of the token ids that have a text, which are the only ones that are sampled. Empty:
            all ids are.
        context_len: Context length of the actor in tokens, as its config.json states. Only the driver reads it.
        planned: Roles that `Engine.ensure_roles` will load later. If the models cannot fit together, an error is raised
            before the first one is loaded.
        n_nodes: Number of machines. Each has the same number of consecutive ranks.
        hosts: Address of the machine of each rank. Empty if all ranks run on the driver's machine, or while the
            addresses are unknown.
        shared: Settings that hold folders which all machines must see, as (name of the setting, folder) pairs.
        setup_timeout: Seconds to wait for missing machines.
        profiling: What the workers record about themselves. None records nothing.
    """

    actor: RoleSpec
    devices: list[str]
    engine: EngineConfig = field(default_factory=EngineConfig)
    dtype: str = "float32"
    seed: int = 1
    routing_replay: bool = False
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    share_prefixes: SharePrefixes = "auto"
    tokenizer_path: str = ""
    eos_token_ids: tuple[int, ...] = ()
    turn_end_ids: tuple[int, ...] = ()
    texts: tuple[tuple[int, int], ...] = ()
    context_len: int = 0
    planned: dict[str, RoleSpec] = field(default_factory=dict)
    n_nodes: int = 1
    hosts: tuple[str, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    setup_timeout: float = 0.0
    profiling: ProfilingSpec | None = None

    def frozen(self) -> EngineSpec:
        """Return a copy of the spec without the actor's optimizer, for an engine that cannot train the actor."""
        return replace(self, actor=replace(self.actor, optimizer=None))

    def turn_ends_of(self, role: str) -> tuple[int, ...]:
        """Return the tokens that generation_config.json of a saved role must list."""
        return self.turn_end_ids if role == "actor" else ()

    def keeps_routes(self, role: str) -> bool:
        """Return whether the decoder of a role returns the experts of each token, which only training needs.

        Args:
            role: Name of the role.
        """
        return self.routing_replay and role == "actor"

    @property
    def addresses(self) -> list[WorkerAddress]:
        """The addresses of the worker processes, by rank."""
        hosts = self.hosts or [LOOPBACK] * self.world_size
        return [WorkerAddress(device, host) for device, host in zip(self.devices, hosts, strict=True)]

    def n_ranks_on_machine(self, rank: int) -> int:
        """Return the number of ranks on the machine of a rank, including the rank itself."""
        hosts = [address.host for address in self.addresses]
        return hosts.count(hosts[rank])

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def layout(self) -> Layout:
        """The division of the ranks into copies of the models."""
        return self.engine.layout(self.world_size)

    @property
    def splits_tokens(self) -> bool:
        """Whether sequence parallelism is on, which requires tp_size > 1.

        The setting engine.sequence_parallel decides. If it is not set, sequence parallelism is on unless
        engine.exact is true, because sequence parallelism changes the order of sums.
        """
        wanted = self.engine.sequence_parallel
        return (not self.engine.exact if wanted is None else wanted) and self.layout.is_sharded
