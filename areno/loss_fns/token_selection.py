"""Tokens that the policy loss treats apart, chosen from the whole batch before its first update.

A selection is a class that declares its settings and its formula. The setting `actor.token_selection` chooses a class
by the name under which TOKEN_SELECTIONS has registered it. To add a selection, write a class with
`TOKEN_SELECTIONS.register`. Arrays are numpy float64. The module imports no numpy, because the configuration of a run
is read before it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areno.schema.choices import Choices
from areno.schema.fields import Section, setting

if TYPE_CHECKING:
    import numpy as np


@dataclass(kw_only=True)
class TokenSelection(Section):
    """Base class of selections. The fields of a subclass are keys of the section `actor.<name>`.

    Attributes:
        needs_entropy: Whether `choose` gets entropies, which takes a forward pass before the update.
        effect: What happens to chosen tokens. "keep": only their policy loss counts. "drop": their policy loss is 0.
            "kl": `kl_coef` times the absolute log-ratio to the policy before the update is added to it. Tokens whose
            policy loss is 0 still count where a mean divides by the number of tokens.
    """

    needs_entropy: ClassVar[bool] = False
    effect: ClassVar[Literal["keep", "drop", "kl"]] = "drop"
    kl_coef: ClassVar[float] = 0.0

    def choose(
        self, logprobs_T: np.ndarray, advantages_T: np.ndarray, entropies_T: np.ndarray | None, seed: int
    ) -> np.ndarray:
        """Choose tokens among all trained tokens of a batch.

        Args:
            logprobs_T: Log-probabilities in the rollout.
            advantages_T: Advantages.
            entropies_T: Entropies of the policy before the update, if the selection needs them.
            seed: For random choices, of this step.

        Returns:
            (T,) bool, True for chosen tokens.
        """
        raise NotImplementedError


TOKEN_SELECTIONS: Choices[TokenSelection] = Choices("token_selection")


def _covariances(logprobs_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """Return (log p - mean) (A - mean) of each token (arXiv 2505.22617 eq. 10)."""
    return (logprobs_T - logprobs_T.mean()) * (advantages_T - advantages_T.mean())


@TOKEN_SELECTIONS.register(
    "top_entropy", section=True, help="only tokens with the highest entropy train (arXiv 2506.01939)"
)
@dataclass(kw_only=True)
class TopEntropy(TokenSelection):
    """Forking tokens (arXiv 2506.01939 eq. 5): only the tokens in the highest `share` of entropies train.

    A token is chosen if its entropy is at least the (1 - share) quantile of the batch.
    """

    needs_entropy: ClassVar[bool] = True
    effect: ClassVar[Literal["keep", "drop", "kl"]] = "keep"
    share: float = setting(0.2, help="Share of the tokens that train", gt=0, lt=1)

    def choose(
        self, logprobs_T: np.ndarray, advantages_T: np.ndarray, entropies_T: np.ndarray | None, seed: int
    ) -> np.ndarray:
        import numpy as np

        assert entropies_T is not None
        return entropies_T >= np.quantile(entropies_T, 1.0 - self.share)


@TOKEN_SELECTIONS.register(
    "clip_cov", section=True, help="a few tokens whose log-probability covaries with the advantage do not train"
)
@dataclass(kw_only=True)
class ClipCov(TokenSelection):
    """Clip-Cov (arXiv 2505.22617 eq. 11): `share` of the tokens, drawn from those of low < cov < high, do not train."""

    effect: ClassVar[Literal["keep", "drop", "kl"]] = "drop"
    share: float = setting(2e-4, help="Share of all tokens that do not train, at least one", gt=0, lt=1)
    low: float = setting(1.0, help="Covariance above which tokens are drawn")
    high: float = setting(5.0, help="Covariance below which tokens are drawn")

    def choose(
        self, logprobs_T: np.ndarray, advantages_T: np.ndarray, entropies_T: np.ndarray | None, seed: int
    ) -> np.ndarray:
        import numpy as np

        cov_T = _covariances(logprobs_T, advantages_T)
        candidates, chosen_T = (
            np.flatnonzero((self.low < cov_T) & (cov_T < self.high)),
            np.zeros(len(cov_T), dtype=bool),
        )
        n = min(max(1, int(self.share * len(cov_T))), len(candidates))
        chosen_T[np.random.default_rng(seed).choice(candidates, n, replace=False)] = True
        return chosen_T


@TOKEN_SELECTIONS.register(
    "kl_cov", section=True, help="the tokens whose log-probability covaries most with the advantage have a KL penalty"
)
@dataclass(kw_only=True)
class KLCov(TokenSelection):
    """KL-Cov (arXiv 2505.22617 eq. 12-13): coef |log r| is added for the `share` of tokens of largest covariance."""

    effect: ClassVar[Literal["keep", "drop", "kl"]] = "kl"
    share: float = setting(2e-4, help="Share of the tokens with a penalty, at least one", gt=0, lt=1)
    coef: float = setting(1.0, help="Coefficient of the penalty", gt=0)

    @property
    def kl_coef(self) -> float:  # type: ignore[override]
        return self.coef

    def choose(
        self, logprobs_T: np.ndarray, advantages_T: np.ndarray, entropies_T: np.ndarray | None, seed: int
    ) -> np.ndarray:
        import numpy as np

        cov_T = _covariances(logprobs_T, advantages_T)
        n = max(1, int(self.share * len(cov_T)))
        chosen_T = np.zeros(len(cov_T), dtype=bool)
        chosen_T[np.argsort(-cov_T, kind="stable")[:n]] = True
        return chosen_T


@dataclass(kw_only=True)
@TOKEN_SELECTIONS.with_sections
class TokenSelectionConfig(Section):
    """The choice of a selection, with the settings of all of them. The actors of GRPO and PPO inherit from it."""

    token_selection: Literal[tuple(TOKEN_SELECTIONS)] | None = setting(  # type: ignore[valid-type]
        None,
        help="Tokens that the policy loss treats apart, chosen before the first update. "
        f"{TOKEN_SELECTIONS.help}. null: none",
    )

    @property
    def chosen_token_selection(self) -> Any:
        return TOKEN_SELECTIONS.chosen(self)
