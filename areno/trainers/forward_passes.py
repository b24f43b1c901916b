"""Forward passes of a step that need no rewards: log-probabilities of the reference and of the old policy, and values.

They can run early, while reward functions still score the last samples. The results are used if the step trains on the
same rows. If a sample gets no reward, the step trains on other rows, and the passes run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from areno.config.policy_experiments import CriticExperimentConfig
from areno.config.ratio import RatioConfig
from areno.run.setup import PolicySetup
from areno.trainers.rows import policy_rows, prompt_masks, token_rows
from areno.types import ScoredSample, TokenValue, TrainSequence

ScoreName = Literal["ref", "values", "proximal", "entropy", "logit_gradient"]
_PHASES: dict[ScoreName, str] = {"ref": "ref", "values": "values"}  # of others: recompute


class StepScores:
    """Scores the rows of a step: "ref" (reference), "values" (critic), and values of tokens under the actor."""

    def __init__(self, setup: PolicySetup):
        self._setup = setup
        self._rows: list[Any] = []  # the token arrays of the rows that were scored early
        self._early: dict[ScoreName, list[Any]] = {}  # their scores

    def compute_early(self, samples: Sequence[ScoredSample]) -> None:
        """Compute all scores that the settings need, before rewards are known. Not for samples of agents."""
        config, selection = self._setup.config, self._setup.config.actor.chosen_token_selection
        needed: dict[ScoreName, bool] = {
            # In online DPO, rewards decide which samples are in pairs. So not all rows need log-probabilities.
            "ref": config.ref is not None and config.trained_samples_per_prompt == config.gconfig.n_samples,
            "values": isinstance(config, CriticExperimentConfig),
            "proximal": isinstance(config.actor, RatioConfig) and config.actor.needs_proximal_logprobs,
            "entropy": selection is not None and selection.needs_entropy,
            "logit_gradient": config.actor.needs_logit_gradients,
        }
        names: list[ScoreName] = [name for name in needed if needed[name]]
        if names:
            rows = policy_rows(samples, [0.0] * len(samples), 0)
            self._rows = [row.tokens for row in rows]
            self._early = {name: self._compute(name, rows) for name in names}

    def scores_of_rows(self, name: ScoreName, rows: Sequence[TrainSequence]) -> list[Any]:
        """Return the score `name` of each token of each row. Early results for the same rows are used again."""
        # A row shares its token array with its sample.
        is_same = len(rows) == len(self._rows) and all(
            row.tokens is known for row, known in zip(rows, self._rows, strict=True)
        )
        return self._early[name] if is_same and name in self._early else self._compute(name, rows)

    def _compute(self, name: ScoreName, rows: Sequence[TrainSequence]) -> list[Any]:
        setup = self._setup
        compute: dict[ScoreName, Callable[[], list[Any]]] = {
            "ref": lambda: logprobs_of(setup, "ref", rows),
            "values": lambda: setup.trainer.score_values("critic", token_rows(rows)),
            "proximal": lambda: logprobs_of(setup, "actor", rows),
            "entropy": lambda: logprobs_of(setup, "actor", rows, "entropy"),
            "logit_gradient": lambda: logprobs_of(setup, "actor", rows, "logit_gradient"),
        }
        with setup.run.clock.phase(_PHASES.get(name, "recompute")):
            return compute[name]()


def logprobs_of(
    setup: PolicySetup, role: str, rows: Sequence[TrainSequence], value: TokenValue = "logprob"
) -> list[list[float]]:
    """Return a value of every trained token under the actor or the reference, 0.0 elsewhere.

    The temperature is that of the rollout. For the actor, rows with `routes` are scored with routing replay.
    """
    routes, masks = [row.routes for row in rows] if role == "actor" else None, prompt_masks(rows)
    how = {"sampling": setup.config.gconfig, "routes": routes, "prompt_masks": masks, "value": value}
    return setup.trainer.score_logprobs(role, token_rows(rows), **how)
