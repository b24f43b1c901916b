"""The number of tokens that a step drafts, chosen by expected step times and the measured shares of right tokens.

A drafted token is right if the step that verifies it samples the same token. All decisions depend on counts only, so
all ranks that share a model decide alike.

Shape letters: B sequences, J drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.engine.decoder.draft_verification import DRAFT_LENGTHS

MAX_SEQUENCES = 256  # larger batches do not draft: their time grows in proportion to the number of rows
_MOST = max(DRAFT_LENGTHS)
_LEAST_GAIN = 1.03  # least expected speed with drafts, relative to the speed without
_SHORT_PAUSE, _LONGEST_PAUSE = 8, 128  # steps
_KEPT = 0.75  # part of the counts of right and wrong tokens that is kept in a pause
_KNOWN = 48  # first drafted tokens that were tried; with fewer, a pause ends with a try
_MOST_TRIED = 1024  # the counts are halved beyond, to follow a policy that changes


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a decoding step, as multiples of the time that one more row takes on the device."""

    fixed: float  # of a step without rows, mostly for reading the weights
    verification: float  # of a step with drafts, beyond that of its rows
    most_rows: int

    def plain_step_cost(self, n_rows: int) -> float:
        return self.fixed + n_rows

    def drafted_step_cost(self, n_rows: int, length: int) -> float:
        return self.fixed + self.verification + n_rows * (1 + length)

    def possible_lengths(self, n_rows: int) -> list[int]:
        return [length for length in DRAFT_LENGTHS if n_rows * (1 + length) <= self.most_rows]


def step_costs(n_params: int, n_rows: int, *, on_cuda: bool, use_graphs: bool) -> StepCosts:
    """Return rough estimates of the costs of a decoding step of at most `n_rows` rows."""
    if not on_cuda:
        row_ms = 0.12 + 1e-7 * n_params
        return StepCosts(fixed=(5 + 4e-7 * n_params) / row_ms, verification=2.5 / row_ms, most_rows=n_rows)
    row_us = 0.7 + 4e-9 * n_params  # sampling and attention, and two operations for each parameter
    # Measured on an H100 with 0.6B: 1.12 ms without drafts, with 7 drafted tokens 1.44 ms for 8 sequences.
    return StepCosts(
        fixed=max(240, (1000 if use_graphs else 3000) / row_us), verification=250 / row_us, most_rows=n_rows
    )


class DraftLength:
    """Decides how many tokens each sequence of a step drafts, from measured shares of right tokens.

    All sequences draft the same number of tokens: the number with the shortest expected time for each new token, on
    average over the sequences. So a few sequences whose drafts are right do not slow down many whose drafts are wrong.

    If decoding without drafts is the fastest, drafts pause, at first for 8 steps and finally for 128, or until the
    batch has shrunk to half. After a pause, one step tries drafts, unless the shares are known well. This trial waits
    while `awaits_texts` is True, until the caller has filled the table of n-grams.
    """

    def __init__(self, costs: StepCosts):
        self.costs = costs
        # For each place in a draft: how often the tokens before it were right, and how often it was right as well.
        self._tried, self._right = np.zeros(_MOST), np.zeros(_MOST)
        self._pause = self._waits = self._paused_at = 0
        self.awaits_texts = False

    def begin_rollout(self, costs: StepCosts, kept: float) -> None:
        """Begin a rollout, and multiply the counts of earlier rollouts by `kept`."""
        self.costs = costs
        if kept == 0:
            self._pause = 0
        self._tried *= kept
        self._right *= kept
        self._waits, self._paused_at, self.awaits_texts = 0, 0, False

    def next_length(self, n_running: int, relative_acceptance_B: np.ndarray, *, is_prepared: bool) -> int:
        """Return the number of tokens to draft in the next step. Call it once before each step.

        `relative_acceptance_B` is each sequence's number of right tokens per step, divided by the average.
        `is_prepared` says that the table of n-grams is filled.
        """
        self.awaits_texts = False
        if not 0 < n_running <= MAX_SEQUENCES:
            return 0
        if (found := self._best_length(n_running, relative_acceptance_B)) > 0:
            self._pause = self._waits = self._paused_at = 0
            return found
        if 2 * n_running <= self._paused_at:
            self._pause = self._waits = 0
        self._waits -= 1
        if self._waits >= 0:
            return 0
        tried = 0 if self._tried[0] >= _KNOWN else self._trial_length(n_running)
        self.awaits_texts = tried > 0 and not is_prepared
        if self.awaits_texts:
            return 0
        self._pause = min(max(_SHORT_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._waits, self._paused_at = self._pause, n_running
        self._tried *= _KEPT
        self._right *= _KEPT
        return tried

    def _trial_length(self, n_rows: int) -> int:
        """Return the largest length with which a step takes at most twice as long as without drafts."""
        costs, most = self.costs, 2 * self.costs.plain_step_cost(n_rows)
        return max(
            (length for length in costs.possible_lengths(n_rows) if costs.drafted_step_cost(n_rows, length) <= most),
            default=0,
        )

    def _best_length(self, n_rows: int, relative_acceptance_B: np.ndarray) -> int:
        """Return the length with the shortest expected time of a new token, 0 for no drafts."""
        # Places with few tries are taken to be like the average place.
        average = (self._right.sum() + 2) / (self._tried.sum() + 4)
        right_J = (self._right + 4 * average) / (self._tried + 4)
        gained_J = np.cumsum(np.cumprod(right_J))
        best, found = self.costs.plain_step_cost(n_rows) / _LEAST_GAIN, 0
        for length in self.costs.possible_lengths(n_rows):
            gained_B = np.minimum(gained_J[length - 1] * relative_acceptance_B, length)
            steps_per_token = float((1 / (1 + gained_B)).mean())
            best, found = min((best, found), (steps_per_token * self.costs.drafted_step_cost(n_rows, length), length))
        return found

    def count_accepted_by_position(self, tried_J: np.ndarray, right_J: np.ndarray) -> None:
        """Add two counts for each position in a draft.

        `tried_J`: sequences whose drafts were right before the position. `right_J`: those that were also right at it.
        """
        self._tried[: len(tried_J)] += tried_J
        self._right[: len(right_J)] += right_J
        if self._tried[0] > _MOST_TRIED:
            self._tried *= 0.5
            self._right *= 0.5
