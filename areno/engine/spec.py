"""The description of an engine that each worker receives, and the records that workers report. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areno.config.experiments import HeadName
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig, SamplingConfig
from areno.config.run import EngineConfig, Layout
from areno.config.teacher import Divergence
from areno.layers.config import AdapterSpec
from areno.models.config import TransformerConfig
from areno.models.cost import Cost
from areno.models.speed import host_tokens
from areno.schema.values import flat

if TYPE_CHECKING:
    from areno.engine.train.rows import RouteShape  # imports numpy, which takes a tenth of the time of `areno plan`

LOOPBACK = "127.0.0.1"
_MOST_OF_CALL = 512  # samples for each copy of the model: their logits still take little memory

OldLogprobs = Literal["recompute", "loglinear", "rollout"]
"""Source of the log-probabilities that importance ratios divide by; see UpdateSpec.old_logprobs."""


SharePrefixes = Literal["auto", "on", "off"]
"""When training and scoring compute the prefixes that rows share once; see EngineSpec.share_prefixes."""
_WORTH_SHARING = 0.1  # share of the rows' tokens from which "auto" computes shared tokens once
_SHARED_LAUNCH = 1.15  # how much longer the host launches the kernels of a pass with shared prefixes
FASTER = 0.95  # share of the time without sharing, below which passes with shared prefixes count as faster


@dataclass(frozen=True, slots=True)
class Sharing:
    """Decides when training or scoring with a model computes shared prefixes once.

    Times of the host are given in tokens: how many the device computes meanwhile. They are 0 on a CPU.

    Attributes:
        when: The setting share_prefixes, or "off" if the model cannot share prefixes.
        launch_tokens: Time in which the host launches the kernels of a pass.
        search_tokens: Time in which the host looks for the shared prefix of a row.
    """

    when: SharePrefixes = "off"
    launch_tokens: int = 0
    search_tokens: float = 0.0

    @staticmethod
    def of(
        when: SharePrefixes,
        config: TransformerConfig,
        itemsize: int,
        *,
        trains: bool,
        on_cuda: bool,
        adapters: AdapterSpec | None = None,
        tp_size: int = 1,
    ) -> Sharing:
        """Return the rule for a model.

        Args:
            when: The setting share_prefixes.
            config: Shape of the model.
            itemsize: Bytes of a weight.
            trains: Whether the rule is for training. Otherwise it is for scoring.
            on_cuda: Whether the model is on a GPU.
            adapters: Adapters, if they are trained in place of the weights.
            tp_size: Number of tensor-parallel GPUs that share the work.
        """
        if not config.shares_prefixes or when == "off":
            return Sharing()
        if not on_cuda:
            return Sharing(when)
        cost = Cost.of(config, itemsize, adapters)
        launch, search = host_tokens(config, cost, trains=trains)
        return Sharing(when, tp_size * launch, tp_size * search)

    def saves_enough(self, n_saved: int, n_tokens: int) -> bool:
        """Return whether shared prefixes save enough tokens to be used. Never with "off".

        With "auto", a tenth of the tokens is enough, and with "on" a single token.

        Args:
            n_saved: Number of tokens that are not computed again.
            n_tokens: Number of tokens of the rows.
        """
        return self.when != "off" and n_saved >= (_WORTH_SHARING * n_tokens if self.when == "auto" else 1)

    def time(self, sizes: Sequence[int], launch_tokens: float | None = None) -> float:
        """Estimate the time of passes in tokens: the larger of the host's time and the device's, which overlap.

        Args:
            sizes: Number of computed tokens of each pass.
            launch_tokens: Time in which the host launches a pass. None is that of passes without shared prefixes.
        """
        return max(len(sizes) * (self.launch_tokens if launch_tokens is None else launch_tokens), sum(sizes))

    def may_be_faster(self, n_tokens: int, n_rows: int) -> bool:
        """Return whether passes would take less time with shared prefixes if nearly all tokens were shared.

        Args:
            n_tokens: Number of tokens of the rows.
            n_rows: Number of rows.
        """
        return self.is_faster([1], [n_tokens], n_rows)

    def is_faster(self, shared: Sequence[int], apart: Sequence[int], n_rows: int) -> bool:
        """Return whether passes take less time with shared prefixes than without. True unless `when` is "auto".

        Args:
            shared: Number of computed tokens of each pass, with shared prefixes.
            apart: The same without shared prefixes.
            n_rows: Number of rows.
        """
        if self.when != "auto":
            return True
        shared_time = self.time(shared, _SHARED_LAUNCH * self.launch_tokens) + n_rows * self.search_tokens
        return shared_time < FASTER * self.time(apart)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """The LoRA adapters that are trained in place of the actor's weights.

    Attributes:
        adapters: Rank, scaling and target layers.
        init_from: Folder in peft's format with the initial weights of the adapters. If "", they are initialised from
            the engine's seed.
        base: Name of the base model, written into the folders in which adapters are saved.
        trained_on: Name of the base model according to the folder `init_from`. "" if the folder does not name it.
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
        head: Kind of the model's head.
        key: Name of the setting that holds the path, for messages. Equality ignores it.
        optimizer: Settings of the optimizer. None freezes the model.
        gradient_checkpointing: Whether layers recompute activations in the backward pass.
        offload: Whether the model rests in host memory while it is not in use. If it is trained, its master weights
            and moments are always in host memory. The weights of the actor stay on the device.
        needs_head: Whether the folder must hold a trained head that gives scores, as for a reward model. A critic may
            train a new head.
        random_init: Whether to draw the weights from the engine's seed instead of reading them from the folder.
        router_aux_loss_coef: Coefficient of the loss that balances the load of experts.
        lora: The adapters that are trained in place of the weights. None trains all weights.
        pad_token_id: For a head that gives scores, the padding token if config.json of the folder names none.
            transformers needs it to find the last token of a row. None leaves config.json as it is.
        step_separator: Text after each step, which is written to config.json of a process reward model. None leaves
            config.json as it is.
        in_training: Whether training passes of the actor use the model, as those with a divergence from a teacher do.
        own_tokenizer: Whether rows for the model are encoded by its own tokenizer, as those of a judge. Its vocabulary
            and context length may then differ from the actor's.
        common_ids: For a teacher whose vocabulary differs from the actor's: ranges (first, end) of the token ids that
            have the same text in both. The divergence compares both models over these ids. Empty: over all ids.
    """

    path: str
    head: HeadName = "lm"
    key: str = field(default="actor.path", compare=False)
    optimizer: OptimizerConfig | None = None
    gradient_checkpointing: bool = True
    offload: bool = False
    needs_head: bool = False
    random_init: bool = False
    router_aux_loss_coef: float = 0.0
    lora: LoraSpec | None = None
    pad_token_id: int | None = None
    step_separator: str | None = None
    in_training: bool = False
    own_tokenizer: bool = False
    common_ids: tuple[tuple[int, int], ...] = ()

    def with_own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json with the fields that the role adds to it.

        Args:
            values: Content of config.json in the folder of the model.
        """
        pads = self.pad_token_id is not None and values.get("pad_token_id") is None
        added = {"pad_token_id": self.pad_token_id} if pads else {}
        return {**values, **added} | ({} if self.step_separator is None else {"step_separator": self.step_separator})

    @property
    def section(self) -> str:
        """Configuration section with the role's micro-batches: its own section if it is trained, else "actor"."""
        return self.key.removesuffix(".path") if self.optimizer else "actor"

    def difference(self, name: str, wanted: RoleSpec) -> str:
        """Return the error message for a role that is loaded with this spec, and is now requested with another spec.

        Args:
            name: Name of the role.
            wanted: The requested spec.
        """
        was, now = flat(dataclasses.asdict(self)), flat(dataclasses.asdict(wanted))
        fields = [field for field in {**now, **was} if now.get(field) != was.get(field)]
        changed = ", ".join(f"{field}={now.get(field)!r} (loaded with {was.get(field)!r})" for field in fields)
        how = "the actor is what the engine was built for" if name == "actor" else "call release_role to replace it"
        return f"role {name!r} is loaded already, asked for now with {changed}; {how}"


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

    def has_folder_of_actor(self, role: RoleSpec) -> bool:
        """Return whether the model of a role is in the folder of the actor."""
        return role.path == self.actor.path or Path(role.path).resolve() == Path(self.actor.path).resolve()

    def is_base_of_actor(self, role: RoleSpec) -> bool:
        """Return whether a role is the frozen base model of an actor with adapters.

        The actor with its adapters switched off then serves the role, and no second model is loaded.
        """
        frozen = role.optimizer is None and role.lora is None and role.head == "lm"
        return self.actor.lora is not None and frozen and self.has_folder_of_actor(role)

    def has_base_of(self, role: RoleSpec, other: RoleSpec) -> bool:
        """Return whether two roles share one base model: frozen roles that differ only in their adapters' weights.

        Args:
            role: One role.
            other: Another role.
        """
        if role.lora is None or other.lora is None or role.optimizer is not None or other.optimizer is not None:
            return False
        same = role.lora.adapters == other.lora.adapters and role.offload == other.offload
        return same and (role.path, role.head) == (other.path, other.head)

    def with_own_weights(self, roles: Mapping[str, RoleSpec]) -> dict[str, RoleSpec]:
        """Return the roles that load a model. All other roles use the model of an earlier role.

        Args:
            roles: Roles by name, the actor first.
        """
        found: dict[str, RoleSpec] = {}
        for name, role in roles.items():
            if not self.is_base_of_actor(role) and not any(self.has_base_of(role, own) for own in found.values()):
                found[name] = role
        return found

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


@dataclass(frozen=True)
class UpdateSpec:
    """How one call of `Engine.train` divides its rows into optimizer steps and micro-batches.

    Attributes:
        mb_spec: Size of a micro-batch, the rows of one forward pass. It does not change the result. If it sets no size,
            the engine chooses one or, with gradient_accumulation_steps, takes 16 rows.
        n_minibatches: Number of optimizer steps. If greater than 1, the rows are shuffled by `seed` and divided equally
            over the steps. Must be 1 if gradient_accumulation_steps is set.
        gradient_accumulation_steps: Number of micro-batches in one optimizer step, in the order of the rows. None
            divides the rows by n_minibatches instead.
        sampling: Settings that the rows were sampled with. Ignored for models with a value head.
        seed: Seed of the shuffle.
        rows_per_unit: Number of adjacent rows that stay together in one micro-batch: 2 for preference pairs.
        old_logprobs: Source of the old log-probabilities, the denominator of importance ratios. "rollout" takes
            those of the rollout. "recompute" takes the old_logprobs of the rows. For rows without old_logprobs,
            "recompute" computes them with the weights before the first update: for the first step in the step's own
            forward pass, so that the ratios are exactly 1, and for later steps in a scoring pass over the same
            micro-batches. "loglinear" is "recompute" for the first step. In later steps it computes nothing, and the
            loss interpolates the old log-probabilities.
        may_halve: Whether a step that runs out of memory continues with micro-batches of half the size. Otherwise
            running out of memory is an error.
        divergence: The divergence from a teacher that the training passes compute for the loss, as
            `DataPack.divergence`. None computes none.
    """

    mb_spec: MicroBatchSpec
    n_minibatches: int = 1
    gradient_accumulation_steps: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    rows_per_unit: int = 1
    old_logprobs: OldLogprobs = "recompute"
    may_halve: bool = False
    divergence: Divergence | None = None


@dataclass(kw_only=True, frozen=True)
class SharedDecoder:
    """Numbers of samples, over all ranks, for a decoder that serves training and evaluation.

    Attributes:
        usual: Largest number that training decodes at the same time. The KV cache has room for as many samples of the
            maximum length.
        most: Largest number that an evaluation decodes at the same time. The KV cache grows for them only by a small
            share of the memory, because it stays in memory while models are trained.
    """

    usual: int
    most: int


@dataclass(kw_only=True, frozen=True)
class RolloutSpec:
    """Settings of a rollout phase.

    Attributes:
        max_running: Largest number of samples that are decoded at the same time, over all ranks.
        max_len: Largest number of tokens in a sample, prompt and completion together.
        role: Name of the role whose model decodes.
        shared: Numbers of samples of all phases that share the decoder. None if no phase has another number.
        decoder: Settings of the decoder.
        keeps_cache: Whether the KV cache stays in memory until the next phase. If so, it leaves room for the memory
            that offloaded models take while they are used.
    """

    max_running: int
    max_len: int
    role: str = "actor"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    keeps_cache: bool = True
    shared: SharedDecoder | None = None

    @staticmethod
    def of_call(
        role: str, n_samples: int, max_len: int, decoder: DecoderConfig, max_running: int | None, layout: Layout
    ) -> RolloutSpec:
        """Return the settings of the decoder that one call of `Engine.complete` uses.

        Args:
            role: Name of the role whose model decodes.
            n_samples: Number of samples of the call.
            max_len: Largest number of tokens in a sample, prompt and completion together.
            decoder: Settings of the decoder.
            max_running: Largest number of samples that are decoded at the same time, over all ranks. None: at most 512
                for each copy of the model.
            layout: Division of the ranks into copies of the model.
        """
        most = max_running or _MOST_OF_CALL * layout.dp_size
        return RolloutSpec(
            role=role, max_running=min(n_samples, most), max_len=max_len, decoder=decoder, keeps_cache=False
        )

    @property
    def n_slots(self) -> int:
        """Number of samples that the decoder can have in its batch, over all ranks."""
        return self.max_running if self.shared is None else max(self.shared.most, self.shared.usual)

    @property
    def usual(self) -> int:
        """Number of samples, over all ranks, for which the KV cache has room if each has the maximum length."""
        return self.max_running if self.shared is None else self.shared.usual


@dataclass(kw_only=True)
class EngineInfo:
    """Facts about the actor and its device, reported by the first worker after the model is loaded.

    Attributes:
        n_params: Number of parameters without adapters.
        context_len: Context length of the model, in tokens.
        vocab_size: Vocabulary size of the model.
        device: Device of the first worker.
        sharing: When training the actor computes shared prefixes once.
        device_name: Name of the first worker's GPU, such as "NVIDIA H100 80GB HBM3". "" for a CPU.
        dtype: Type of the weights, as the name of a torch dtype.
        attn_backend: Attention kernel of training and prefill.
        memory_gib: Peak memory of the first worker so far, in GiB.
        device_bytes: Whole memory of the first worker's device. For a CPU, the worker's share of the machine's memory.
        cost: FLOPs and bytes that one token costs, over all tensor-parallel ranks.
        routes: Number of layers with experts, experts per token, and experts per layer. None for a model without
            experts.
        n_adapter_params: Number of parameters of the adapters.
        tp_sums: Name of the backend that sums over tensor-parallel ranks in decoding, such as "nccl" or "shared
            memory". "" for tp_size=1.
    """

    n_params: int
    context_len: int
    vocab_size: int
    device: str
    dtype: str
    attn_backend: str
    memory_gib: float
    device_bytes: int
    cost: Cost
    routes: RouteShape | None = None
    n_adapter_params: int = 0
    tp_sums: str = ""
    device_name: str = ""
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Counters of the decoder of one data-parallel rank. All but `running` and `waiting` count since the phase began.

    Attributes:
        running: Samples in the batch now.
        waiting: Samples that wait for a place in the batch now.
        generated_tokens: Sampled tokens.
        preemptions: Times that a sample left the batch because KV blocks ran out.
        cached_prompt_tokens: Prompt tokens found in the prefix cache, which need no prefill.
        graph_replays: Passes over the model that ran as a CUDA graph: decode steps and prefills.
        drafted_tokens: Drafted tokens that were verified (rollout.speculation).
        accepted_tokens: Drafted tokens that were accepted.
        decode_steps: Decode steps, with or without drafts.
        draft_steps: Decode steps that verified drafts.
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    graph_replays: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_steps: int = 0
    draft_steps: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of the drafts of a rollout phase so far, summed over the data-parallel ranks (rollout.speculation).

    Attributes:
        drafted: Number of drafted tokens that were verified.
        accepted: Number of drafted tokens that were accepted, which means sampled without a step of their own.
        steps: Number of decode steps, with or without drafts.
        draft_steps: Number of decode steps that verified drafts.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_steps: int = 0

    @staticmethod
    def of(stats: Iterable[RolloutStats]) -> DraftCounts:
        """Sum the counts of all ranks.

        Args:
            stats: The counters of each data-parallel rank.
        """
        found = [(one.drafted_tokens, one.accepted_tokens, one.decode_steps, one.draft_steps) for one in stats]
        return DraftCounts(*map(sum, zip(*found, strict=True)))

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted, 0 without drafts."""
        return self.accepted / max(1, self.drafted)

    @property
    def step_share(self) -> float:
        """Share of the decode steps that verified drafts, 0 without steps."""
        return self.draft_steps / max(1, self.steps)
