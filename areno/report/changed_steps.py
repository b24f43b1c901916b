"""Compute a recorded step twice, with and without a change of settings, and compare what it computes and its update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from areno.api.algorithms import algorithm_of
from areno.config.experiments import ExperimentConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.launch.compose import mention_version
from areno.report.replayed_steps import Difference, compare_records, values_of
from areno.run.recorded_run import Base, RecordedRun, compute_steps, run_replay, saved_state, scratch_folder
from areno.run.replaying import Replay
from areno.run.resume import SettingChange, changed_settings
from areno.run.states import ENGINE
from areno.schema.build import build
from areno.schema.fields import is_read_by_rollout
from areno.tracking.reader import RunReader

_MASTER = ".master."
_SHOWN_PARAMETERS = 5
_WITHOUT_MEAN = (": lengths", ": tokens", ": trained")


@dataclass(frozen=True)
class ChangedValue:
    """A result of the step that the change alters. Of several values, these are the means."""

    name: str
    without: float
    changed: float
    n_different: int
    n: int


@dataclass(frozen=True)
class ChangedUpdate:
    """The updates of a model in the step, without and with the change: of its fp32 master weights."""

    role: str
    norm_without: float
    norm_changed: float
    cosine: float  # between the two updates; nan if one is 0
    norm_difference: float
    parameters: list[tuple[str, float]]  # (name, norm of the difference of its updates), the largest first


@dataclass(frozen=True)
class ChangedStep:
    """What a change of settings does to a step."""

    step: int
    base: int  # step of the state from which it was computed
    changes: list[str]
    is_as_recorded: bool  # whether the step without the change has the bits of the record
    has_difference: bool
    values: list[ChangedValue] = field(default_factory=list)
    updates: list[ChangedUpdate] = field(default_factory=list)


def compare_change(
    run: RunReader, step: int, changes: Sequence[str], device: str = "auto", resamples: bool = False
) -> ChangedStep:
    """Compute a step of a run with and without `changes`, each "key=value", from the same state.

    With `resamples`, the step with the change draws new samples. Otherwise it takes the recorded ones, and settings on
    which these depend are refused.
    """
    recorded = RecordedRun(run.path)
    nearest = recorded.base_of(step)
    record = recorded.read(step)
    if failed := recorded.error_of(step):
        text = "step {} ended the run with an error ({}), so that there is nothing to compare; leave {} out"
        raise ArenoError(text, step, failed, "--change")
    settings, changed = changed_by(algorithm_of(recorded.path).config, record["config"], changes, resamples)
    before = step - 1
    inputs = {key: known for key, known in record["inputs"].items() if key not in {each.key for each in changed}}
    with mention_version(run.path), scratch_folder() as scratch:
        base = nearest
        if base.step < before:
            _, base = compute_steps(recorded, base, before, scratch, device, keeps_state=True)
        without = Replay(
            step, recorded.read, record["inputs"], saves=frozenset([step, *([before] if not before else [])])
        )
        run_replay(recorded, base, without, record["config"], scratch / "without", device)
        base = saved_state(scratch / "without", 0) if base.folder is None else base
        with_change = Replay(step, recorded.read, inputs, resamples, frozenset([step]))
        run_replay(recorded, base, with_change, settings, scratch / "changed", device)
        found = ChangedStep(
            step=step,
            base=nearest.step,
            changes=[str(each) for each in changed],
            is_as_recorded=not compare_records(record, without.found[step]).differences,
            has_difference=bool(differences(without.found[step], with_change.found[step])),
        )
        if not found.has_difference:
            return found
        states = [base, saved_state(scratch / "without", step), saved_state(scratch / "changed", step)]
        values = list(_changed_values(without.found[step], with_change.found[step]))
        return replace(found, values=values, updates=list(_changed_updates(*states)))


def changed_by(
    cls: type[ExperimentConfig], settings: Mapping[str, Any], changes: Sequence[str], resamples: bool
) -> tuple[dict[str, Any], list[SettingChange]]:
    """Apply changes to settings. Return (changed settings, the changes). Raises ConfigError for changes that cannot be.

    A value is written as on the command line of a run: `actor.eps_clip=0.3`.
    """
    problems = [Problem("--change", "is {!r}; KEY=VALUE is expected", text) for text in changes if "=" not in text]
    if problems:
        raise ConfigError(problems)
    try:
        whole = OmegaConf.merge(OmegaConf.create(dict(settings)), OmegaConf.from_dotlist(list(changes)))
        data: Any = OmegaConf.to_container(whole)
    except OmegaConfBaseException as error:
        raise ConfigError(Problem("--change", "cannot be applied: {}", error)) from error
    config = build(cls, data, sources=False)
    found = changed_settings(cls, settings, asdict(config))
    for change in found:
        if change.on_resume.kind == "never":
            text = "cannot change in the middle of a run ({}); start a new run with it"
            problems.append(Problem(change.key, text, change))
        elif is_read_by_rollout(cls, change.key) and not resamples:
            text = "is read by the rollout, so that the recorded samples or rewards may not be those of {}; add "
            problems.append(Problem(change.key, text + "--resample to draw samples again", change.override))
    if not found:
        problems.append(Problem("--change", "changes nothing: the step had {}", " ".join(changes)))
    if problems:
        raise ConfigError(problems)
    return data, found


def differences(without: Mapping[str, Any], changed: Mapping[str, Any]) -> list[Difference]:
    """Return what differs, among the results that both steps have: a change may add a metric that alters nothing."""
    names = {name for name, _ in values_of(without)} & {name for name, _ in values_of(changed)}
    return [found for found in compare_records(without, changed).differences if found.name in names]


def _changed_values(without: Mapping[str, Any], changed: Mapping[str, Any]) -> Iterator[ChangedValue]:
    before, now = dict(values_of(without)), dict(values_of(changed))
    for difference in differences(without, changed):
        if difference.name.startswith("digest of ") or difference.name.endswith(_WITHOUT_MEAN):
            continue
        one, other = _mean(before[difference.name]), _mean(now[difference.name])
        yield ChangedValue(difference.name, one, other, difference.n_different, difference.n)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]  # tokens that are not trained may have no value
    return float(known.mean(dtype=np.float64)) if len(known) else math.nan


def _changed_updates(base: Base, without: Base, changed: Base) -> Iterator[ChangedUpdate]:
    before, one, other = (master_weights(state) for state in (base, without, changed))
    roles = dict.fromkeys(name.partition(_MASTER)[0] for name in one)
    for role in roles:
        names = [name for name in one if name.startswith(role + _MASTER)]
        products = np.zeros(3)  # of the updates: with themselves, and with each other
        apart: list[tuple[str, float]] = []
        for name in names:
            start = before[name].double()
            first, second = one[name].double() - start, other[name].double() - start
            products += [(first * first).sum().item(), (second * second).sum().item(), (first * second).sum().item()]
            if norm := (second - first).norm().item():
                apart.append((name.partition(_MASTER)[2], norm))
        norms = np.sqrt(products[:2])
        yield ChangedUpdate(
            role=role,
            norm_without=float(norms[0]),
            norm_changed=float(norms[1]),
            cosine=float(products[2] / norms.prod()) if norms.all() else math.nan,
            norm_difference=math.sqrt(sum(norm * norm for _, norm in apart)),
            parameters=sorted(apart, key=lambda each: -each[1])[:_SHOWN_PARAMETERS],
        )


def master_weights(state: Base) -> dict[str, Tensor]:
    """Return the fp32 master weights in a training state, by role and name."""
    from torch.distributed import checkpoint

    from areno.engine.state.storage import StateFileReader

    assert state.folder is not None
    reader = StateFileReader(Path(state.folder) / ENGINE)
    stored: dict[str, Any] = reader.metadata.state_dict_metadata
    found: dict[str, Any] = {name: torch.empty(each.size) for name, each in stored.items() if _MASTER in name}
    checkpoint.load(found, storage_reader=reader, no_dist=True)
    return found
