"""Everything a worker needs to come up, in one picklable record, and what it reports back. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from areno.config.model_roles import MicroBatchSpec, OptimizerConfig


@dataclass(kw_only=True)
class RoleSpec:
    """One more model beside the actor, in the same workers and the same parallel layout.

    path: its folder. head: "lm" scores log-probabilities; "value" has one output for each token (critic, reward model).
    key: the setting that messages name. optimizer: None is frozen. offload: keep it in host memory while not in use.
    needs_head: the folder must hold a trained value head (a reward model), not just a body to train one on (a critic).
    """

    path: str
    head: Literal["lm", "value"]
    key: str
    optimizer: OptimizerConfig | None = None
    gradient_checkpointing: bool = True
    offload: bool = False
    needs_head: bool = False


@dataclass(kw_only=True)
class EngineSpec:
    """One engine: which model, on which devices, trained how.

    devices: one entry per worker process, "cpu" or "cuda:<i>"; its length is the world size.
    random_init: weights drawn from `seed` instead of read from the folder.
    optimizer: None builds an engine that cannot train (and allocates nothing for it).
    """

    model_path: str
    devices: list[str]
    tp_size: int = 1
    dtype: str = "float32"
    random_init: bool = False
    seed: int = 1
    attn_backend: Literal["auto", "flash", "native"] = "auto"
    gradient_checkpointing: bool = True
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    tokenizer_path: str = ""  # for stop strings, and carried along when a checkpoint is saved; "" is the model's own
    eos_token_ids: tuple[int, ...] = ()  # end a completion, beside those that the model's own files name
    context_len: int = 0  # tokens; what the model's config.json says, for the driver's use

    @property
    def actor(self) -> RoleSpec:
        """The model of the engine itself, as a role."""
        return RoleSpec(
            path=self.model_path,
            head="lm",
            key="actor.path",
            optimizer=self.optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
        )

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size


@dataclass(kw_only=True, frozen=True)
class RolloutSpec:
    """What a rollout phase needs: how many sequences at once, how long, and how the KV cache is sized.

    max_running counts over all data-parallel ranks; max_len is prompt plus completion, in tokens.
    """

    max_running: int
    max_len: int
    max_prefill_tokens: int = 8192
    mem_fraction: float = 0.6
    max_kv_tokens: int | None = None
    eager_decode: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What the decoder of one data-parallel rank does now (running, waiting: samples) and has done so far."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_prompt_tokens: int = 0  # needed no prefill, since their blocks were found
    graph_replays: int = 0

    def since(self, before: RolloutStats) -> RolloutStats:
        """The same, with what was done before taken off."""
        return RolloutStats(
            running=self.running,
            waiting=self.waiting,
            generated_tokens=self.generated_tokens - before.generated_tokens,
            preemptions=self.preemptions - before.preemptions,
            cached_prompt_tokens=self.cached_prompt_tokens - before.cached_prompt_tokens,
            graph_replays=self.graph_replays - before.graph_replays,
        )
