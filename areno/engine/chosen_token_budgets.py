"""Keeps, in the driver, the largest number of tokens per micro-batch, by role and phase."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

from areno.cost.token_budget import TRAIN

logger = logging.getLogger("areno")

TokenBudgets = dict[str, dict[str, int]]
"""Role -> {"train": tokens, "score": tokens}: the largest number of tokens in a micro-batch, on one device."""


class ChosenTokenBudgets:
    """Keeps the largest number of tokens per micro-batch (the budget) by role and phase.

    `choose` returns the budgets that each rank has chosen, and the smallest of them counts. Set `are_due` after a model
    was loaded or a rollout with other settings has begun: the next `token_budget` then calls `choose` again.
    """

    def __init__(self, choose: Callable[[], Sequence[TokenBudgets]]):
        self._choose = choose
        self.tokens: TokenBudgets = {}
        self.are_due = True

    def token_budget(self, role: str, phase: str) -> int:
        """Return the largest number of tokens of a micro-batch. `phase` is "train" or "score".

        Asks the ranks first if `are_due`. A budget never rises, so the order in which models are loaded has no effect.
        """
        if self.are_due:
            before, chosen = copy.deepcopy(self.tokens), self._choose()
            self.are_due = False
            for name, tokens in chosen[0].items():
                known = self.tokens.setdefault(name, {})
                for each in tokens:
                    of_ranks = [of_rank[name][each] for of_rank in chosen]
                    known[each] = min(*of_ranks, known.get(each, of_ranks[0]))
            if self.tokens != before:
                logger.info("%s", format_budgets(self.tokens))
        return self.tokens[role][phase]

    def halve(self, role: str, phase: str, n_halvings: int) -> None:
        """Halve a budget `n_halvings` times, as the workers have done when memory ran out, and log a warning."""
        if n_halvings:
            before = self.tokens[role][phase]
            self.tokens[role][phase] = now = max(1, before >> n_halvings)
            doing = "training" if phase == TRAIN else "scoring with"
            logger.warning(
                "out of device memory in %s the model of role %s: its micro-batches have at most %s tokens from now "
                "on, instead of %s",
                doing,
                role,
                f"{now:,}",
                f"{before:,}",
            )


def format_budgets(budgets: TokenBudgets) -> str:
    of_roles = []
    for role, tokens in budgets.items():
        of_phases = ", ".join(f"{n:,} ({phase})" for phase, n in tokens.items())
        of_roles.append(f"{role} {of_phases}")
    return f"micro-batches, in tokens: {'; '.join(of_roles)}"
