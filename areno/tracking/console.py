"""What a run says while it runs: the events of the loops, and the scalars of each step as lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areno.tracking.run_log import IN_FULL, OF_STEP
from areno.tracking.tracker import Tracker

logger = logging.getLogger("areno")

_LABELS = {"rollout/rewards_mean": "reward_mean", "rollout/logprobs_mean": "rollout_logprob_mean"}
# Of evaluations; they describe the answers, not how good they are.
_WITHOUT_LINE = {"response_len_mean", "truncated", "num_sequences"}
_OF_EACH_SET = {"accuracy", "loss"}  # where there are several; the lines of their mean have the other metrics

# How the lines begin that say how a run stands; RunReader.status looks for them.
STARTED, RESUMED, DONE, STOPPED = "epoch=", "going on after step", "done: ", "stopped in step "


def log_epoch(epoch: int, stage: str) -> None:
    """`epoch=0 stage=epoch_start`; stage is start or end."""
    logger.info("%s%d stage=epoch_%s", STARTED, epoch, stage, extra=IN_FULL)


def log_start(facts: Mapping[str, str]) -> None:
    """What a run begins with: its folder, model, data and so on, by name. A live display shows it in its own way."""
    logger.info("%s", "; ".join(f"{name}: {fact}" for name, fact in facts.items()), extra=OF_STEP)


def log_done(n_steps: int, seconds: float, changes: str, folder: Path) -> None:
    """The last line of a run that came to its end. changes: what it reached."""
    logger.info("%s%d steps in %.0f s; %s; files in %s", DONE, n_steps, seconds, changes, folder, extra=OF_STEP)


def log_stopped(step: int, saved_step: int | None, state_step: int | None, folder: Path) -> None:
    """The last line of a run that did not. The steps are those of the last checkpoint and of the last state."""
    kept = f"the run can go on after step {state_step}: --resume {folder}"
    if state_step is None:
        last = "no checkpoint" if saved_step is None else f"the last checkpoint is that of step {saved_step}"
        kept = f"there is no state to go on from, and {last}"
    logger.warning("%s%d; %s", STOPPED, step, kept)


def log_stage(stage: str, role: str = "policy") -> None:
    """`role=policy stage=rollout_start`; stage is rollout_start, rollout_end, train_start, train_end, ..."""
    logger.info("role=%s stage=%s", role, stage, extra=IN_FULL)


class Console(Tracker):
    """Logs the scalars of a run as lines of `name=value`. headline, total_steps: see open_trackers."""

    def __init__(self, headline: Sequence[str] = (), total_steps: Callable[[], int] | None = None):
        self._headline = headline
        self._total_steps = total_steps
        self._step: int | None = None
        self._scalars: dict[str, float] = {}  # of this step so far

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the lines that these scalars call for:

        metric=reward_mean value=0.125000                    rollout/rewards_mean, rollout/logprobs_mean and eval/*
        train_stats={'loss': 0.0, ...}                       all train/*, the loss first
        time rollout=213.9 train=17.3 total=231.2            time/*, in seconds
        step=3/60 reward_mean=0.5 seconds=231.29             the headline
        """
        if step != self._step:
            self._step, self._scalars = step, {}
        self._scalars |= scalars
        for name, value in scalars.items():
            metric = name.rpartition("/")[2]
            if name in _LABELS or (name.startswith("eval/") and metric not in _WITHOUT_LINE):
                is_mean = name.count("/") == 1  # not of one set among several
                shown = OF_STEP if name not in _LABELS and (is_mean or metric in _OF_EACH_SET) else IN_FULL
                logger.info("metric=%s value=%.6f", _LABELS.get(name, name.replace("/", "_")), value, extra=shown)
        stats = {name.removeprefix("train/"): value for name, value in scalars.items() if name.startswith("train/")}
        if stats:
            loss_first = sorted(stats, key=lambda name: name != "loss")
            logger.info("train_stats=%s", {name: round(stats[name], 8) for name in loss_first}, extra=IN_FULL)
        if "time/step" not in scalars:
            return
        total = scalars["time/step"]
        rollout, train = scalars.get("time/rollout", 0.0), scalars.get("time/train", 0.0)
        logger.info("time rollout=%.6f train=%.6f total=%.6f", rollout, train, total, extra=IN_FULL)
        known = (name for name in self._headline if name in self._scalars)
        shown = " ".join(f"{_LABELS.get(name, name.partition('/')[2])}={self._scalars[name]:.4g}" for name in known)
        of = "" if self._total_steps is None else f"/{self._total_steps()}"
        logger.info("step=%d%s %s seconds=%.2f", self._step, of, shown, total, extra=OF_STEP)
