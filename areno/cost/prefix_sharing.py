"""Decides when training and scoring compute each shared prefix only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areno.cost.flops import TokenCost
from areno.cost.time import host_time_in_tokens
from areno.layers.config import AdapterSpec
from areno.models.config import TransformerConfig
from areno.specs.engine import SharePrefixes

_WORTH_SHARING = 0.1  # share of the rows' tokens from which "auto" computes shared tokens once
_SHARED_LAUNCH = 1.15  # how much longer the host launches the kernels of a pass with shared prefixes
FASTER = 0.95  # share of the time without sharing, below which passes with shared prefixes count as faster


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Decides when training or scoring with a model computes shared prefixes once.

    A host time is given as the number of tokens that the device computes in this time. It is 0 on a CPU.
    """

    when: SharePrefixes = "off"  # the setting share_prefixes, or "off" if the model cannot share prefixes
    launch_tokens: int = 0  # while the host launches the kernels of a pass
    search_tokens: float = 0.0  # while the host looks for the shared prefix of a row

    @staticmethod
    def from_setting(
        when: SharePrefixes,
        config: TransformerConfig,
        itemsize: int,
        *,
        trains: bool,
        on_cuda: bool,
        adapters: AdapterSpec | None = None,
        tp_size: int = 1,
    ) -> PrefixSharing:
        if not config.shares_prefixes or when == "off":
            return PrefixSharing()
        if not on_cuda:
            return PrefixSharing(when)
        cost = TokenCost.from_config(config, itemsize, adapters)
        launch, search = host_time_in_tokens(config, cost, trains=trains)
        return PrefixSharing(when, tp_size * launch, tp_size * search)

    def saves_enough(self, n_saved: int, n_tokens: int) -> bool:
        """Return whether sharing saves enough: a tenth of `n_tokens` with "auto", one token with "on"."""
        return self.when != "off" and n_saved >= (_WORTH_SHARING * n_tokens if self.when == "auto" else 1)

    def time_in_tokens(self, sizes: Sequence[int], launch_tokens: float | None = None) -> float:
        """Estimate the time of passes with `sizes` tokens each: the longer of the host's and the device's time."""
        return max(len(sizes) * (self.launch_tokens if launch_tokens is None else launch_tokens), sum(sizes))

    def may_be_faster(self, n_tokens: int, n_rows: int) -> bool:
        """Return whether passes would take less time with shared prefixes if nearly all tokens were shared."""
        return self.is_faster([1], [n_tokens], n_rows)

    def is_faster(self, shared: Sequence[int], apart: Sequence[int], n_rows: int) -> bool:
        """Return whether sharing saves time. `shared` and `apart` are the tokens of each pass with and without it."""
        if self.when != "auto":
            return True
        shared_time = self.time_in_tokens(shared, _SHARED_LAUNCH * self.launch_tokens) + n_rows * self.search_tokens
        return shared_time < FASTER * self.time_in_tokens(apart)
