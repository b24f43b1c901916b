"""Everything a worker needs to come up, in one picklable record, and what it reports back. No torch in here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.run import DecoderConfig
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

    path: its folder. head: "lm" scores log-probabilities; "value" has one output for each token (critic, reward model).
    key: the setting that messages name. optimizer: None is frozen. offload: keep it in host memory while not in use.
    needs_head: the folder must hold a trained value head (a reward model), not just a body to train one on (a critic).
    random_init: start from weights drawn from the engine's seed, whatever the folder holds.
    lora: None has no adapters.
    """

    path: str
    head: Literal["lm", "value"]
    key: str = field(compare=False)  # two callers may name the same model differently
    optimizer: OptimizerConfig | None = None
    gradient_checkpointing: bool = True
    offload: bool = False
    needs_head: bool = False
    random_init: bool = False
    router_aux_loss_coef: float = 0.0  # of the loss that balances a model's experts
    lora: LoraSpec | None = None

    @property
    def section(self) -> str:
        """The configuration section of its micro-batches: its own where it is trained, else the actor's."""
        return self.key.removesuffix(".path") if self.optimizer else "actor"

    def difference(self, name: str, wanted: RoleSpec) -> str:
        """What to say where the role is loaded so and asked for otherwise."""
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
    """One engine: which model, on which devices, trained how.

    devices: "cpu" or "cuda:<i>" for each worker process, of which there are as many as entries.
    tp_size: of them share one copy of the model. cp_size: copies that train each row together.
    n_nodes: machines that share them evenly, in the order of the ranks. hosts: their addresses, by rank, once they are
    known; () is the driver's own machine. shared: settings with the folders that all machines must see.
    random_init: the actor starts from weights drawn from `seed`, and so does a role of the same folder. dummy_load:
    every model does, and no weight file is read. optimizer: None builds an engine that cannot train.
    lora: the actor's adapters, which are trained instead of its weights; None trains all of it.
    planned: the roles that ensure_roles will be asked for, so that models which cannot fit together are refused before
    the first is read. zero_stage: what data-parallel ranks divide of a trained role, rather than each holding it whole.
    1: masters and moments. 2: gradients, too. sequence_parallel: in training and scoring, the tensor-parallel ranks
    share the tokens between the products of a layer; None lets `splits_tokens` decide.
    """

    model_path: str
    devices: list[str]
    tp_size: int = 1
    cp_size: int = 1
    zero_stage: Literal[0, 1, 2] = 1
    sequence_parallel: bool | None = None
    dtype: str = "float32"
    random_init: bool = False
    dummy_load: bool = False
    seed: int = 1
    attn_backend: Literal["auto", "flash", "native"] = "auto"
    routing_replay: bool = False  # the decoder tells which experts each token went through
    router_aux_loss_coef: float = 0.0
    exact: bool = False  # each token by itself: rows of staleness 0 must have the model's very log-probabilities
    deterministic: bool = False  # the same bits whenever the same is done again
    gradient_checkpointing: bool = True
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    tokenizer_path: str = ""  # for stop strings, and carried along when a checkpoint is saved; "" is the model's own
    eos_token_ids: tuple[int, ...] = ()  # end a completion, beside those that the model's own files name
    context_len: int = 0  # tokens; what the model's config.json says, for the driver's use
    lora: LoraSpec | None = None
    planned: dict[str, RoleSpec] = field(default_factory=dict)
    stall_timeout_s: float | None = 600.0  # longest time without progress; None waits for ever
    n_nodes: int = 1
    hosts: tuple[str, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    setup_timeout: float = 0.0  # seconds to wait for machines that are missing

    @property
    def actor(self) -> RoleSpec:
        """The model of the engine itself, as a role."""
        return RoleSpec(
            path=self.model_path,
            head="lm",
            key="actor.path",
            optimizer=self.optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
            router_aux_loss_coef=self.router_aux_loss_coef,
            random_init=self.random_init,
            lora=self.lora,
        )

    @property
    def addresses(self) -> list[WorkerAddress]:
        """Of the worker processes, by rank."""
        hosts = self.hosts or [LOOPBACK] * self.world_size
        return [WorkerAddress(device, host) for device, host in zip(self.devices, hosts, strict=True)]

    def n_beside(self, rank: int) -> int:
        """How many ranks share the machine of a rank, itself included."""
        hosts = [address.host for address in self.addresses]
        return hosts.count(hosts[rank])

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def dp_size(self) -> int:
        """Copies of the model."""
        return self.world_size // self.tp_size

    @property
    def splits_tokens(self) -> bool:
        """Whether sequence parallel is on. Where bits count it is not: sums of shares have an order of their own."""
        wanted = not self.exact if self.sequence_parallel is None else self.sequence_parallel
        return wanted and self.tp_size > 1

    @property
    def data_size(self) -> int:
        """Groups of copies that train rows of their own."""
        return self.dp_size // self.cp_size


@dataclass(frozen=True)
class UpdateSpec:
    """How one call of `Engine.train` cuts its rows into optimizer steps and micro-batches.

    mb_spec: the rows of one forward pass; the result does not depend on it.
    n_minibatches: optimizer steps of equally many rows each (give or take one), after a shuffle by `seed`.
    gradient_accumulation_steps: one optimizer step for every so many micro-batches, in the order of the rows. None and
    n_minibatches=1 make one step of all rows. Set at most one of the two.
    temperature: the one that the rows were sampled at. Models with values have none.
    rows_per_unit: so many adjacent rows are never separated (2 for preference pairs).
    old_logprobs: what importance ratios divide by. recompute: the old_logprobs of the rows; where rows have none, the
        training pass before the first update. That update takes its own forward pass, so its ratios are exactly 1; for
        the later ones a scoring pass over the same micro-batches comes first. loglinear: as recompute in the first
        update; the loss interpolates in the later ones. rollout: the log-probabilities of the rollout.
    """

    mb_spec: MicroBatchSpec
    n_minibatches: int = 1
    gradient_accumulation_steps: int | None = None
    temperature: float = 1.0
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
