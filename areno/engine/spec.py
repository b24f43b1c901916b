"""Everything a worker needs to come up, in one picklable record, and what it reports back. No torch in here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Literal

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import SamplingConfig
from areno.config.run import DecoderConfig, EngineConfig, Layout
from areno.engine.train.rows import RouteShape
from areno.layers.config import AdapterSpec
from areno.models.cost import Cost
from areno.schema.values import flat

LOOPBACK = "127.0.0.1"

OldLogprobs = Literal["recompute", "loglinear", "rollout"]
"""Where the log-probabilities that an importance ratio divides by come from; see UpdateSpec.old_logprobs."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The adapters that are trained in the place of the actor's weights.

    init_from: folder of peft that they start from; "" draws them from the seed. base: what is recorded in the folders
    that they are saved to as the model which they belong to. trained_on: what is recorded so in the folder init_from.
    """

    adapters: AdapterSpec
    init_from: str = ""
    base: str = ""
    trained_on: str = ""


@dataclass(kw_only=True)
class RoleSpec:
    """One model of the engine.

    Attributes:
        path: Folder of the model.
        head: "lm" gives log-probabilities. "value" gives one number for each token (critic, reward model).
        key: Setting of the path, for messages. It does not count in comparisons.
        optimizer: None freezes the model.
        gradient_checkpointing: Recompute the activations of layers in the backward pass.
        offload: Keep the model in host memory while it is not in use.
        needs_head: The folder must hold a trained value head (reward model). A critic may train a new one.
        random_init: Draw the weights from the engine's seed, and ignore those of the folder.
        router_aux_loss_coef: Factor of the loss that balances a model's experts.
        lora: The adapters that are trained in place of the weights. None trains all weights.
    """

    path: str
    head: Literal["lm", "value"] = "lm"
    key: str = field(default="actor.path", compare=False)
    optimizer: OptimizerConfig | None = None
    gradient_checkpointing: bool = True
    offload: bool = False
    needs_head: bool = False
    random_init: bool = False
    router_aux_loss_coef: float = 0.0
    lora: LoraSpec | None = None

    @property
    def section(self) -> str:
        """The configuration section of its micro-batches: its own where it is trained, else the actor's."""
        return self.key.removesuffix(".path") if self.optimizer else "actor"

    def difference(self, name: str, wanted: RoleSpec) -> str:
        """Return the message about a role that is loaded in another form than requested."""
        was, now = flat(dataclasses.asdict(self)), flat(dataclasses.asdict(wanted))
        fields = [field for field in {**now, **was} if now.get(field) != was.get(field)]
        changed = ", ".join(f"{field}={now.get(field)!r} (loaded with {was.get(field)!r})" for field in fields)
        how = "the actor is what the engine was built for" if name == "actor" else "call release_role to replace it"
        return f"role {name!r} is loaded already, asked for now with {changed}; {how}"


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker process runs: a device ("cpu" or "cuda:<i>") of a host."""

    device: str
    host: str = LOOPBACK

    def __str__(self) -> str:
        return self.device if self.host == LOOPBACK else f"{self.device} of {self.host}"


@dataclass(kw_only=True)
class EngineSpec:
    """One engine: its models, the devices they are on, and the settings of the section `engine`.

    Attributes:
        actor: The model of the engine itself. Without an optimizer the engine cannot train it. A role of the same
            folder starts from the actor's weights, random ones included.
        devices: "cpu" or "cuda:<i>" of each worker process, in the order of the ranks.
        engine: The section `engine` of the configuration. Its world_size is not read: there is one rank for each of
            `devices`.
        dtype: Type of the weights of all models, as the name of a torch dtype.
        seed: Seed of random weights and of rollouts that are given none.
        routing_replay: The decoder returns the experts of each token.
        mb_spec: Micro-batches of scoring, and of training if UpdateSpec does not set them.
        tokenizer_path: Tokenizer for stop strings, copied into checkpoints. "" is the actor's own.
        eos_token_ids: Tokens that end a completion, in addition to those that the actor's files name.
        context_len: Context of the actor in tokens, as its config.json states. Only the driver reads it.
        planned: The roles that ensure_roles will be asked for. Models that cannot fit together are refused before the
            first one is loaded.
        n_nodes: Machines that share the ranks evenly, in the order of the ranks.
        hosts: Addresses of the machines by rank, once they are known. () is the machine of the driver.
        shared: Settings with folders that all machines must see, as (key, path).
        setup_timeout: Seconds to wait for missing machines.
    """

    actor: RoleSpec
    devices: list[str]
    engine: EngineConfig = field(default_factory=EngineConfig)
    dtype: str = "float32"
    seed: int = 1
    routing_replay: bool = False
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    tokenizer_path: str = ""
    eos_token_ids: tuple[int, ...] = ()
    context_len: int = 0
    planned: dict[str, RoleSpec] = field(default_factory=dict)
    n_nodes: int = 1
    hosts: tuple[str, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    setup_timeout: float = 0.0

    def frozen(self) -> EngineSpec:
        """Return the spec of the same engine that cannot train its actor."""
        return replace(self, actor=replace(self.actor, optimizer=None))

    @property
    def addresses(self) -> list[WorkerAddress]:
        """Return the addresses of the worker processes by rank."""
        hosts = self.hosts or [LOOPBACK] * self.world_size
        return [WorkerAddress(device, host) for device, host in zip(self.devices, hosts, strict=True)]

    def n_ranks_on_machine(self, rank: int) -> int:
        """Return the number of ranks on the machine of `rank`, itself included."""
        hosts = [address.host for address in self.addresses]
        return hosts.count(hosts[rank])

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.devices)

    @property
    def layout(self) -> Layout:
        """Return how the ranks hold the models."""
        return self.engine.layout(self.world_size)

    @property
    def splits_tokens(self) -> bool:
        """Return whether sequence parallel is on. Exact mode turns it off, as it changes the order of sums."""
        wanted = self.engine.sequence_parallel
        return (not self.engine.exact if wanted is None else wanted) and self.layout.is_sharded


@dataclass(frozen=True)
class UpdateSpec:
    """How one call of `Engine.train` cuts its rows into optimizer steps and micro-batches.

    Attributes:
        mb_spec: Rows of one forward pass. The result does not depend on it.
        n_minibatches: Number of optimizer steps, each of equally many rows (within one row), after a shuffle by `seed`.
        gradient_accumulation_steps: Micro-batches of one optimizer step, in the order of the rows. None and
            n_minibatches=1 make one step of all rows. Set at most one of the two.
        sampling: Settings that the rows were sampled with. Models with values do not read them.
        seed: Seed of the shuffle.
        rows_per_unit: Number of adjacent rows that are never separated (2 for preference pairs).
        old_logprobs: What importance ratios divide by. "recompute": the old_logprobs of the rows. For rows that have
            none, the training pass before the first update computes them: the first update uses its own forward pass,
            so its ratios are exactly 1, and a scoring pass over the same micro-batches precedes the later updates.
            "loglinear": as "recompute" in the first update, and the loss interpolates in the later ones. "rollout": the
            log-probabilities of the rollout.
    """

    mb_spec: MicroBatchSpec
    n_minibatches: int = 1
    gradient_accumulation_steps: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    rows_per_unit: int = 1
    old_logprobs: OldLogprobs = "recompute"


@dataclass(kw_only=True, frozen=True)
class RolloutSpec:
    """max_running: most samples decoded at once, over all ranks. max_len: longest prompt plus completion, in tokens."""

    max_running: int
    max_len: int
    decoder: DecoderConfig = field(default_factory=DecoderConfig)


@dataclass(kw_only=True)
class EngineInfo:
    """What the first worker says about itself once the model is loaded."""

    n_params: int
    context_len: int
    vocab_size: int
    device: str
    dtype: str
    attn_backend: str
    memory_gib: float
    cost: Cost  # of a token in the actor
    routes: RouteShape | None = None  # of its tokens; None where it has no experts
    n_adapter_params: int = 0  # of its adapters, beside n_params
    tp_sums: str = ""  # how tensor-parallel ranks add up while they decode; "" where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What the decoder of one data-parallel rank does now (running, waiting: samples) and has done so far."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0  # needed no prefill, since their blocks were found
    graph_replays: int = 0
