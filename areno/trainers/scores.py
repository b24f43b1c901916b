"""Forward passes over the rows of a step that need no rewards: log-probabilities of the reference, values, old policy.

These passes can run while reward functions still score the last samples. If the samples turn out to be the rows to
train on, which they are unless one has no reward, the results are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from areno.config.policy_experiments import CriticExperimentConfig
from areno.config.ratio import RatioConfig
from areno.run.setup import PolicySetup
from areno.trainers.rows import policy_rows, token_rows
from areno.types import ScoredSample, TrainSequence

ScoreName = Literal["ref", "values", "proximal"]
_PHASES: dict[ScoreName, str] = {"ref": "ref", "values": "values", "proximal": "recompute"}


class StepScores:
    """The scores of the rows of a step: "ref" (reference), "values" (critic) and "proximal" (actor before the update).

    Args:
        setup: Models, data, settings and outputs of the run.
    """

    def __init__(self, setup: PolicySetup):
        self._setup = setup
        self._early: dict[ScoreName, tuple[list[int], list[Any]]] = {}  # ids of the rows' tokens, and their scores
        self._kept: list[Any] = []  # so that no other object gets one of these ids

    def compute_early(self, samples: Sequence[ScoredSample]) -> None:
        """Compute all scores that the settings need, for samples without rewards.

        Args:
            samples: The samples of the step, which are not trajectories of agents.
        """
        config = self._setup.config
        needed: dict[ScoreName, bool] = {
            "ref": config.ref is not None,
            "values": isinstance(config, CriticExperimentConfig),
            "proximal": isinstance(config.actor, RatioConfig) and config.actor.needs_proximal,
        }
        names: list[ScoreName] = [name for name in needed if needed[name]]
        if names:
            rows = policy_rows(samples, [0.0] * len(samples), 0)
            self._kept = [row.tokens for row in rows]
            for name in names:
                self._early[name] = _ids(rows), self._compute(name, rows)

    def of(self, name: ScoreName, rows: Sequence[TrainSequence]) -> list[Any]:
        """Return the scores of training rows.

        Args:
            name: "ref" or "proximal" for log-probabilities, "values" for those of the critic.
            rows: The rows.

        Returns:
            For each row, a number per token.
        """
        ids, scores = self._early.get(name, ([], []))
        return scores if ids and ids == _ids(rows) else self._compute(name, rows)

    def _compute(self, name: ScoreName, rows: Sequence[TrainSequence]) -> list[Any]:
        setup = self._setup
        compute: dict[ScoreName, Callable[[], list[Any]]] = {
            "ref": lambda: logprobs_of(setup, "ref", rows),
            "values": lambda: setup.trainer.score_values("critic", token_rows(rows)),
            "proximal": lambda: logprobs_of(setup, "actor", rows),
        }
        with setup.run.clock.phase(_PHASES[name]):
            return compute[name]()


def _ids(rows: Sequence[TrainSequence]) -> list[int]:
    """Return the identities of the token arrays of rows, which a sample and its row share."""
    return [id(row.tokens) for row in rows]


def logprobs_of(setup: PolicySetup, role: str, rows: Sequence[TrainSequence]) -> list[list[float]]:
    """Compute the log-probability of every token of the rows under the actor or the reference model.

    The log-probabilities are at the temperature of the rollout. For the actor, rows with `routes` are scored with
    routing replay.

    Args:
        setup: Models, data, settings and outputs of the run.
        role: The model: "actor" or "ref".
        rows: Training rows.

    Returns:
        For each row, a log-probability per token, 0.0 for the first.
    """
    routes = [row.routes for row in rows] if role == "actor" else None
    return setup.trainer.score_logprobs(role, token_rows(rows), sampling=setup.config.gconfig, routes=routes)
