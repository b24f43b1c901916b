"""The progress of a run, and the triggers for saving, evaluating and writing training states.

`RunProgress` provides the batches of a run and counts steps, epochs, rows and seconds. `Trigger` decides after which
steps an action is due. The training state from which a run resumes contains their state dicts.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.run import FrequencyConfig
from areno.data.loader import BatchLoader
from areno.data.mixed_loader import MixedLoader
from areno.run.groups_in_flight import GroupsInFlight
from areno.tracking.accuracy import has_reward_above_one
from areno.tracking.console import log_epoch
from areno.types import Batch

logger = logging.getLogger("areno")

Name = str | tuple[str, ...]
"""Name of a main metric in the history, or several, of which the first that has values counts."""
EVALUATED_REWARDS = ("eval_accuracy", "eval_rewards_mean")
"""Metrics by which runs with rewards are compared."""


class Trigger:
    def __init__(self, config: FrequencyConfig, clock: Callable[[], float] = time.monotonic):
        self.config, self._clock = config, clock
        self.epochs_ended = 0
        self._last = clock()

    def is_due(self, step: int, epoch_ended: bool = False) -> bool:
        """Return whether the action is due after a step. Call this exactly once per step, since it counts epochs."""
        now, config = self._clock(), self.config
        self.epochs_ended += epoch_ended
        is_due = (
            (config.freq_steps is not None and step % config.freq_steps == 0)
            or (config.freq_epochs is not None and epoch_ended and self.epochs_ended % config.freq_epochs == 0)
            or (config.freq_secs is not None and now - self._last >= config.freq_secs)
        )
        if is_due:
            self._last = now
        return is_due

    def state_dict(self) -> dict[str, float]:
        """Return the counters. Time between two processes of a run does not count."""
        return {"epochs_ended": self.epochs_ended, "seconds_since_last": self._clock() - self._last}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.epochs_ended = int(state["epochs_ended"])
        self._last = self._clock() - state["seconds_since_last"]


class RunProgress:
    """The current step, epoch, rows and seconds of a run, its batches, and the history of its main metrics.

    `step` counts from 1. With dynamic sampling, a step may add several to `batches_taken`. `counts_right`: whether a
    reward of at least 1 means a right answer. It is False with a reward model or a judge, and after any reward above 1.
    `history` has one value per step or per evaluation, oldest first.
    """

    def __init__(self, config: ExperimentConfig, loader: BatchLoader[Any] | MixedLoader):
        self.config, self.loader = config, loader
        self.step = 0
        self.epoch_ended = False
        self.history: dict[str, list[float]] = {}
        limit, sampled_with, has_agents, self._replaces = 0, None, False, False
        n_samples: int | Callable[[str], int] = 1
        self.counts_right = True
        if isinstance(config, PolicyExperimentConfig):
            self._replaces, self.counts_right = config.replaces_in_flight, not config.reward.has_model
            limit, sampled_with = config.rollout.max_head_offpolicyness, dataclasses.asdict(config.gconfig)
            n_samples = config.n_samples_of
            if config.train_dataset.sources:
                sampled_with["sources"] = {
                    name: [config.n_samples_of(name), config.gconfig_of(name).max_new_tokens]
                    for name in config.train_dataset.sources
                }
            if has_agents := config.agent.fn is not None:
                sampled_with["agent.fn"] = config.agent.fn
        self.in_flight = GroupsInFlight(loader.items_at, n_samples, limit, sampled_with, not has_agents)
        self._epoch: int | None = None  # None before the first batch
        self._rows_taken = 0
        self.batches_taken = 0
        self._tokens_sampled = 0
        self._batches: Iterator[Batch[Any]] = iter(())
        self._upcoming: deque[tuple[Batch[Any], dict[str, Any]]] = deque()  # and the loader's position after each
        self._kept: list[tuple[Batch[Any], dict[str, Any]]] = []  # of a state: what `_upcoming` begins with
        self._position = loader.state_dict()  # of the loader, after the last batch that was taken
        self._seconds_before = 0.0  # seconds of earlier sessions of this run
        self._started = time.monotonic()

    @property
    def seed(self) -> int:
        return self.seed_of(self.step)

    def seed_of(self, step: int) -> int:
        return self.config.seed * 1_000_003 + step

    @property
    def epoch(self) -> int:
        return self._epoch or 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the run has taken, including earlier processes of the same run."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def total_steps(self) -> int:
        """The number of the run's last step. It may decrease when rows are skipped because they are too long.

        It is too large until total_train_n_tokens ends the run, because later lengths are not known.
        """
        if self._has_all_tokens:
            return self.step
        left = self.loader.n_batches(self.config.total_train_epochs) - self.batches_taken
        if self._rows_left is not None:
            left = min(left, -(-self._rows_left // (self.loader.batch_size * self._rows_per_item)))
        if self._replaces:  # prompts of batches that earlier steps have taken
            left = max(left, 0) + -(-len(self.in_flight.groups) // self.loader.batch_size)
        total, limit = self.step + max(left, 0), self.config.total_train_steps
        return total if limit is None else min(total, limit)

    @property
    def ended_by(self) -> str:
        """The setting that limits the length of the run. Raise it to train for more steps."""
        if self.step == self.config.total_train_steps:
            return "total_train_steps"
        if self._has_all_tokens:
            return "total_train_n_tokens"
        return "total_train_epochs" if self._rows_left is None or self._rows_left > 0 else "total_train_n_seqs"

    @property
    def _has_all_tokens(self) -> bool:
        limit = self.config.total_train_n_tokens if isinstance(self.config, PolicyExperimentConfig) else None
        return limit is not None and self._tokens_sampled >= limit

    def count_sampled_tokens(self, n: int) -> None:
        """Count sampled tokens of completions for total_train_n_tokens."""
        self._tokens_sampled += n

    @property
    def _rows_left(self) -> int | None:
        total = self.config.total_train_n_seqs
        return None if total is None else total - self._rows_taken

    @property
    def _rows_per_item(self) -> int:
        return self.config.gconfig.n_samples if isinstance(self.config, PolicyExperimentConfig) else 1

    def _n_rows_of(self, batch: Batch[Any]) -> int:
        config = self.config
        if isinstance(config, PolicyExperimentConfig) and config.train_dataset.sources:
            return sum(config.n_samples_of(item.source) for item in batch.items)
        return len(batch) * self._rows_per_item

    @property
    def last_reward(self) -> float | None:
        return self.history["reward_mean"][-1] if "reward_mean" in self.history else None

    def open_batches(self) -> None:
        """Start to read batches from the loader's position. Call this before `next_step`."""
        self._upcoming, self._kept = deque(self._kept), []
        self._batches = self.loader.batches_until_epoch(self.config.total_train_epochs)

    def next_step(self) -> Batch[Any] | None:
        """Begin the next step and return its batch. None if the run has had all its steps, epochs or rows.

        With dynamic sampling across steps, the batch is empty if no batch is left but prompts are in flight (see
        `GroupsInFlight.begin_dynamic_sampling`).
        """
        limit = self.config.total_train_steps
        if self._has_all_tokens or (limit is not None and self.step >= limit):
            return None
        self.epoch_ended = False
        batch = self.next_batch()
        # The prompts of a step without dynamic sampling belong to batches that are not taken yet.
        if batch is None and self.in_flight.groups:
            batch = Batch(items=[], total_skipped_long=self.loader.total_skipped_long, epoch=self.epoch)
        if batch is not None:
            self.step += 1
        return batch

    def next_batch(self) -> Batch[Any] | None:
        """Return the next batch in the same step, for steps that need several. None if no rows are left."""
        if self._rows_left is not None and self._rows_left <= 0:
            return None
        if not self._upcoming and not self._read_ahead():
            return None
        batch, self._position = self._upcoming.popleft()
        self.batches_taken += 1
        self._rows_taken += self._n_rows_of(batch)
        if self._epoch != batch.epoch:
            self.log_epoch_end()
            self._epoch = batch.epoch
            log_epoch(batch.epoch, "start")
        self.epoch_ended = self.epoch_ended or batch.ends_epoch
        return batch

    def _read_ahead(self) -> bool:
        """Read a batch into the queue `_upcoming`. Return False if there is none."""
        batch = next(self._batches, None)
        if batch is not None:
            self._upcoming.append((batch, self.loader.state_dict()))
        return batch is not None

    def upcoming_batches(self, n: int) -> list[Batch[Any]]:
        """Return the batches of the next `n` steps without taking them. Fewer if the run ends before."""
        n = min(n, self.total_steps - self.step)
        while len(self._upcoming) < n and self._read_ahead():
            pass
        return [batch for batch, _ in itertools.islice(self._upcoming, max(n, 0))]

    def position(self) -> dict[str, Any]:
        """Return what a step has taken from the data, for the record of the step. `move_to` takes the same again."""
        return {
            "batches_taken": self.batches_taken,
            "n_upcoming": len(self._upcoming),
            "in_flight": self.in_flight.state_dict(),
        }

    def move_to(self, position: Mapping[str, Any]) -> None:
        """Take from the data what the rollout of a recorded step has taken, see `position`."""
        while self.batches_taken < position["batches_taken"] and self.next_batch() is not None:
            pass
        self.upcoming_batches(position["n_upcoming"])
        self.in_flight.load_state_dict(position["in_flight"])

    def log_epoch_end(self) -> None:
        if self._epoch is not None:
            log_epoch(self._epoch, "end")

    def record_rewards(self, rewards: Iterable[float]) -> None:
        """If a reward is above 1, set `counts_right` to False and forget the accuracy so far."""
        if self.counts_right and has_reward_above_one(rewards := list(rewards)):
            self.counts_right = False
            self.history.pop("eval_accuracy", None)
            text = "a reward is %.4g, so a reward of 1 does not mean a right answer: accuracy, pass@k and avg@n are "
            logger.warning(text + "measured no more, and the result of the run is its mean reward", max(rewards))

    def append_to_history(self, **values: float) -> None:
        for name, value in values.items():
            self.history.setdefault(name, []).append(float(value))

    def recent_mean(self, name: str, n: int = 1) -> float:
        return float(np.mean(self.history[name][-n:]))

    def result(self, evaluated: Name, trained: str, n: int = 1) -> float:
        """Return the last value of `evaluated`. If it has none, return the mean of the last `n` of `trained`."""
        name = self._first_recorded_name(evaluated)
        return self.recent_mean(name) if name in self.history else self.recent_mean(trained, n)

    def _first_recorded_name(self, name: Name) -> str:
        names = (name,) if isinstance(name, str) else name
        return next((one for one in names if one in self.history), names[-1])

    def describe_changes(self, names: Mapping[Name, int]) -> list[str]:
        """Return texts such as "loss 2.000 -> 1.000": the first value of a metric, and the mean of its last n values.

        `names` maps each metric to n. Metrics without values and eval_* with a single value are left out.
        """
        return [
            f"{name} {values[0]:.3f} -> {self.recent_mean(name, n):.3f}"
            for name, n in ((self._first_recorded_name(name), n) for name, n in names.items())
            if len(values := self.history.get(name, [])) > name.startswith("eval_")
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loader": self._position,
            **(self._state_of_sources(self.loader) if isinstance(self.loader, MixedLoader) else {}),
            "epoch": self._epoch,
            "rows_taken": self._rows_taken,
            "batches_taken": self.batches_taken,
            "tokens_sampled": self._tokens_sampled,
            "in_flight": self.in_flight.state_dict(),
            "history": {name: list(values) for name, values in self.history.items()},
            "counts_right": self.counts_right,
            "seconds": self.elapsed_seconds,
        }

    def _state_of_sources(self, loader: MixedLoader) -> dict[str, Any]:
        """Return what the curriculum has learned, and the batches that were read with earlier weights."""
        upcoming = [
            {
                "places": [[item.source, item.index] for item in batch.items],
                "skipped_long": batch.skipped_long,
                "epoch": batch.epoch,
                "ends_epoch": batch.ends_epoch,
                "loader": position,
            }
            for batch, position in self._upcoming
        ]
        return {"curriculum": loader.curriculum.state_dict(), "upcoming": upcoming}

    def _load_sources(self, loader: MixedLoader, state: Mapping[str, Any]) -> None:
        loader.curriculum.load_state_dict(state["curriculum"])
        self._kept = []
        for each in state["upcoming"]:
            loader.load_state_dict(each["loader"])
            batch = Batch(
                items=loader.items_at(list(map(tuple, each["places"]))),
                skipped_long=each["skipped_long"],
                total_skipped_long=loader.total_skipped_long,
                epoch=each["epoch"],
                ends_epoch=each["ends_epoch"],
            )
            self._kept.append((batch, loader.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Call this before `open_batches`."""
        self.step, self._epoch = state["step"], state["epoch"]
        self.loader.load_state_dict(state["loader"])
        self._position = self.loader.state_dict()
        if isinstance(self.loader, MixedLoader):
            self._load_sources(self.loader, state)
        if "in_flight" in state:
            self.in_flight.load_state_dict(state["in_flight"])
        self._rows_taken = state["rows_taken"]
        self._tokens_sampled = state.get("tokens_sampled", 0)
        self.batches_taken = state["batches_taken"]
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.counts_right = self.counts_right and state.get("counts_right", True)
        self._seconds_before, self._started = state["seconds"], time.monotonic()
