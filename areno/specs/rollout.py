"""The settings of a rollout phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areno.config.rollout import DecoderConfig
from areno.config.run import Layout

if TYPE_CHECKING:
    pass  # imports numpy, which takes a tenth of the time of `areno plan`

_MOST_OF_CALL = 512  # samples for each copy of the model: their logits still take little memory


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
