"""Compare runs: the settings in which they differ, their best results, and the verdict at the top of a report.

The verdict says which setting is best, by how much, and how large the standard deviation over its seeds is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.api.algorithms import algorithm_names, get_algorithm
from areno.files.paths import read_if_exists
from areno.launch.sweep_results import Outcome, Sweep, describe_lead, title_of_overrides
from areno.schema.build import with_current_names
from areno.schema.values import flatten_settings
from areno.tracking.reader import (
    NAMES,
    RunReader,
    Series,
    duration_text,
    headlines,
    is_in_critic_warmup,
    last_step,
    run_seconds,
)
from areno.tracking.run_folder import algorithm_label, recipe_of, script_of

_LONGEST = 48  # characters of the settings in the name of a run
RUN_NAMES = ("trial_name", "experiment_name")  # these differ between runs of equal settings


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return dotted key -> its value in each configuration, for settings that differ. Names of runs are left out."""
    settings = [flatten_settings(config) for config in configs]
    keys = dict.fromkeys(key for one in settings for key in one if key not in RUN_NAMES)
    values = {key: [one.get(key) for one in settings] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def settings_with_current_names(run: RunReader) -> Mapping[str, Any]:
    """Return the settings of a run under their current names. The recorded names may be older."""
    recipe = recipe_of(run.path)
    return with_current_names(get_algorithm(recipe).config, run.config) if recipe in algorithm_names() else run.config


def differences(runs: Sequence[RunReader]) -> dict[str, list[Any]]:
    """Return what differs between runs, as `differing_settings` does: algorithm and script, then the settings."""
    told = [{"algorithm": algorithm_label(run.path), "script": script_of(run.path)} for run in runs]
    return differing_settings(
        [{**first, **settings_with_current_names(run)} for first, run in zip(told, runs, strict=True)]
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """Shorten each path to its last components, as few as are needed to make all names different."""
    parts = [path.absolute().parts for path in paths]
    names = [str(path) for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-length:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return names


def run_names(runs: Sequence[RunReader]) -> list[str]:
    """Return a short name of each run. In a sweep, it lists the overrides that not all runs share."""
    names = short_names([run.path for run in runs])
    given = [set(run.overrides) for run in runs if run.sweep]
    common = set.intersection(*given) if given else set()
    for index, run in enumerate(runs):
        own = [line for line in run.overrides if line not in common] if run.sweep else []
        about = " ".join(map(_short_override, own))
        about = about if len(about) <= _LONGEST else f"{about[: _LONGEST - 3]}..."
        names[index] = f"{names[index]} {about}".rstrip()
    return names


def _short_override(override: str) -> str:
    """Shorten an override: keep the end of its key and of a path. `a.path=/b/c.jsonl` becomes `path=c.jsonl`."""
    key, equals, value = override.partition("=")
    return key.rpartition(".")[2] + equals + value.rstrip("/").rpartition("/")[2]


_LAST_STEPS = 5  # a scalar of single steps is noisy, so the mean of the last steps counts
_FALLBACK = ("train/loss", min)  # for runs with neither evaluation nor reward


def verdict(runs: Sequence[RunReader], names: Sequence[str], metrics: Sequence[Mapping[str, Series]]) -> dict[str, Any]:
    """Compare runs, and return the result for the top of a report as plain data.

    "title" and "value" are the name and the mean of the best setting. "std" is the sample standard deviation over its
    seeds, and "spread" says in words what "value" and "std" are. "places" ranks the settings, best first. "best" is the
    index of the best run. For a single run, "value" is the last value of its main scalar, whose name is "scalar".
    Unknown values are None.
    """
    if len(runs) == 1:
        return _single_run_verdict(runs[0], names[0], metrics[0])
    sweep, notes = _common_sweep(runs)
    compared = sweep or _sweep_over_differences(runs, metrics)
    if sweep is None and (without := [names[one.number] for one in compared.outcomes if one.objective is None]):
        notes.append(f"Without {compared.objective.partition(' ')[0].rstrip(',')}: {', '.join(without)}.")
    notes += [
        f"{names[again]} has the settings of {names[first]}, so a mean counts the two as one."
        for again, first in compared.duplicates().items()
    ]
    return _comparison_verdict(compared, names, notes, "a sweep of" if sweep else "comparison of")


def _single_run_verdict(run: RunReader, name: str, metrics: Mapping[str, Series]) -> dict[str, Any]:
    """Return the result of `verdict` for a single run: its status, and how its main scalar has changed."""
    steps, taken = last_step(run), run_seconds(run)
    state = f"{steps} step{'' if steps == 1 else 's'}" + (f" in {duration_text(taken)}" if taken else "")
    state = ", ".join(filter(None, (run.status(), state)))
    found: dict[str, Any] = {"about": state, "title": name, "value": None, "std": None, "spread": "", "scalar": None}
    warnings = [f"Warning: {text}" for text in run.warnings()]
    found |= {"notes": ["It has recorded no result yet.", *warnings], "places": [], "best": None}
    of_run = headlines(metrics)
    scalar, line = next(((key, one) for key, one in of_run.items() if one.best is not None), (None, None))
    if scalar is None and _FALLBACK[0] in of_run:
        scalar, line = _FALLBACK[0], of_run[_FALLBACK[0]]
    if line is None:
        return found
    notes = [f"{_number_text(line.first)} at the start."]
    if line.best is not None:
        notes.append(f"Best: {_number_text(line.best)} at step {line.step}.")
    if is_in_critic_warmup(metrics):
        notes.append("Only the critic was trained so far (critic.warmup_steps), so the policy is that of the start.")
    notes += warnings
    about = {"title": line.title, "scalar": scalar, "spread": f"{scalar}, last value"}
    return found | about | {"value": line.last, "notes": notes, "best": 0}


def _common_sweep(runs: Sequence[RunReader]) -> tuple[Sweep | None, list[str]]:
    """Return (the sweep of all runs or None, sentences about runs of the sweep that have no result)."""
    folders = {run.sweep and run.sweep.absolute() for run in runs}
    folder = folders.pop()
    if folder is None or folders or (content := read_if_exists(folder / "sweep.json")) is None:
        return None, []
    index = {run.path.absolute().name: place for place, run in enumerate(runs)}
    try:
        sweep, missing = _sweep_from_json(json.loads(content), folder, index)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, [f"{folder / 'sweep.json'} is damaged, so the last values are compared."]
    notes = [f"Without a result: run {', '.join(missing)}."] if missing else []
    ended = {one.number for one in sweep.outcomes}
    if waiting := [name for name, place in index.items() if place not in ended]:
        notes.append(f"Not ended: run {', '.join(waiting)}.")
    return sweep, notes


def _sweep_from_json(read: Any, folder: Path, index: Mapping[str, int]) -> tuple[Sweep, list[str]]:
    """Return a Sweep of the compared runs (name -> index), and the names of runs without a result in sweep.json."""
    sweep = Sweep(folder, str(read["objective"]), "min" if read["mode"] == "min" else "max")
    missing = []
    for one in read["runs"]:
        name, value = str(one["run"]), one["objective"]
        value = None if value is None else float(value)
        if value is None or not math.isfinite(value):
            missing.append(name)
        if name in index:
            overrides = {str(key): str(given) for key, given in one["overrides"].items()}
            sweep.outcomes.append(Outcome(index[name], overrides, value, folder / name))
    sweep.outcomes.sort(key=lambda one: one.number)
    return sweep, missing


def _sweep_over_differences(runs: Sequence[RunReader], metrics: Sequence[Mapping[str, Series]]) -> Sweep:
    """Make a Sweep of runs that have no common sweep. Its parameters are the settings in which the runs differ.

    The objective of the Sweep is the main scalar that most of the runs have recorded.
    """
    choices = [(name, choose) for name, (_, choose) in NAMES.items() if choose] + [_FALLBACK]
    scalar, choose = max(
        choices, key=lambda choice: sum(_last_value(of_run, choice[0]) is not None for of_run in metrics)
    )
    what = " of the last evaluation" if scalar.startswith("eval/") else f", mean of the last {_LAST_STEPS} steps"
    sweep = Sweep(Path(), scalar + what, "min" if choose is min else "max")
    found = differences(runs)
    for index, (run, of_run) in enumerate(zip(runs, metrics, strict=True)):
        overrides = {key: str(values[index]) for key, values in found.items()}
        if "seed" not in found:  # runs of one seed are no sample of its spread
            overrides["run"] = str(index)
        sweep.outcomes.append(Outcome(index, overrides, _last_value(of_run, scalar), run.path))
    return sweep


def _last_value(metrics: Mapping[str, Series], scalar: str) -> float | None:
    """Return the last finite value of an evaluation scalar, or the mean of the last 5 values of another scalar."""
    finite = [value for value in metrics.get(scalar, Series([], [])).values if math.isfinite(value)]
    return statistics.fmean(finite[-1 if scalar.startswith("eval/") else -_LAST_STEPS :]) if finite else None


def _comparison_verdict(sweep: Sweep, names: Sequence[str], notes: list[str], kind: str) -> dict[str, Any]:
    """Return the result of `verdict` for several runs. "about" begins with `kind`, such as "a sweep of"."""
    better = "more" if sweep.mode == "max" else "less"
    places = _ranking(sweep, names)
    found: dict[str, Any] = {
        "about": f"{kind} {len(names)} runs, by {sweep.objective} ({better} is better)",
        "title": "no run has a result",
        "value": None,
        "std": None,
        "spread": "",
        "notes": notes,
        "places": places,
        "best": None if sweep.best is None else sweep.best.number,
    }
    if sweep.best is None:
        return found
    first = places[0]
    found |= {name: first[name] for name in ("title", "value", "std")}
    if first["std"] is not None:
        seeds = {one.overrides.get("seed") for one in sweep.outcomes if one.number in first["runs"]}
        found["spread"] = f"mean ± standard deviation over {len(seeds)} seeds"
    elif len(first["runs"]) == 1:
        found["spread"] = "one run"
    lead = (
        []
        if len(places) == 1
        else [describe_lead(*((one["title"], one["value"], one["std"]) for one in places[:2]))[0]]
    )
    if len(first["runs"]) > 1 or len(places) == 1:
        lead.append(f"The best single run is {names[sweep.best.number]}, with {_number_text(sweep.best.objective)}.")
    return found | {"notes": lead + notes}


def _ranking(sweep: Sweep, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rank the settings by their mean over seeds. If no setting has several seeds, rank the single runs."""
    values = {one.number: one.objective for one in sweep.outcomes}
    found = [(one.overrides, one.mean, one.std, one.runs) for one in sweep.averages()]
    if not found:
        ended = [one for one in sweep.ranked if one.objective is not None and math.isfinite(one.objective)]
        found = [({}, one.objective, None, [one.number]) for one in ended]
    return [
        {
            "title": title_of_overrides(overrides)
            or (names[runs[0]] if len(runs) == 1 else f"{len(runs)} runs of the same settings"),
            "value": value,
            "std": std,
            "runs": runs,
            "values": [values[number] for number in runs],
        }
        for overrides, value, std, runs in found
    ]


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
