"""The settings of a rollout phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from areno.config.layout import Layout
from areno.config.rollout import DecoderConfig

_MOST_OF_CALL = 512  # samples for each copy of the model: their logits still take little memory


@dataclass(kw_only=True, frozen=True)
class DecoderConcurrency:
    """How many samples decode at the same time, over all ranks: `usual` in training, `most` in evaluation.

    The KV cache has room for the `usual` samples of the maximum length. For an evaluation it grows only by a small
    share of the memory, because it stays in memory while models are trained.
    """

    usual: int
    most: int


@dataclass(kw_only=True, frozen=True)
class RolloutSpec:
    """Settings of a rollout phase.

    If `keeps_cache`, the KV cache stays in memory until the next phase, and leaves room for the memory that offloaded
    models take while they are used.
    """

    max_running: int  # samples that decode at the same time, over all ranks
    max_len: int  # tokens of a prompt and its completion
    role: str = "actor"  # whose model decodes
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    keeps_cache: bool = True
    shared: DecoderConcurrency | None = None  # None: no phase that shares the decoder has another number

    @staticmethod
    def for_call(
        role: str, n_samples: int, max_len: int, decoder: DecoderConfig, max_running: int | None, layout: Layout
    ) -> RolloutSpec:
        """Return the settings of the decoder that one call of `Engine.complete` uses."""
        most = max_running or _MOST_OF_CALL * layout.dp_size
        return RolloutSpec(
            role=role, max_running=min(n_samples, most), max_len=max_len, decoder=decoder, keeps_cache=False
        )

    @property
    def n_slots(self) -> int:
        """Number of samples that the decoder can have in its batch, over all ranks."""
        return self.max_running if self.shared is None else max(self.shared.most, self.shared.usual)

    @property
    def n_samples_with_cache(self) -> int:
        """Number of samples, over all ranks, for which the KV cache has room if each has the maximum length."""
        return self.max_running if self.shared is None else self.shared.usual
