"""Compare the settings of a sweep at an equal number of tokens, by validation set. The first setting is the baseline.

    python docs/equal_tokens.py SWEEP

The number of tokens is the largest that all runs have sampled in training. Solve rates are interpolated between
evaluations. A difference is the mean over seeds of setting minus baseline, with its 95 % interval (t distribution).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
from plots import read_series

from areno.errors import ArenoError
from areno.league.results import difference_text
from areno.tracking.reader import RunReader, list_runs


def by_setting(sweep: Path) -> dict[str, dict[int, RunReader]]:
    """Return setting -> seed -> completed run. Of the overrides, a setting has those that are not in all runs."""
    runs = [run for run in list_runs(sweep) if run.status() == "completed"]
    if not runs:
        raise ArenoError("there are no completed runs in {}", sweep)
    shared = set.intersection(*(set(run.overrides) for run in runs))
    found: dict[str, dict[int, RunReader]] = {}
    for run in runs:
        own = [each for each in run.overrides if each not in shared and not each.startswith("seed=")]
        found.setdefault(" ".join(own), {})[run.config["seed"]] = run
    return found


def token_curve(run: RunReader) -> dict[int, float]:
    """Return step -> number of tokens sampled in training up to this step."""
    lengths, counts = (read_series(run.path, f"rollout/{name}") for name in ("response_len_mean", "num_sequences"))
    return dict(zip([0, *lengths], np.cumsum([0, *(lengths[step] * counts[step] for step in lengths)]), strict=True))


def rate_at(run: RunReader, metric: str, tokens: float) -> float:
    rates, sampled = read_series(run.path, metric), token_curve(run)
    return float(np.interp(tokens, [sampled[step] for step in rates], list(rates.values())))


def table(settings: dict[str, dict[int, RunReader]]) -> str:
    """Return a Markdown table: solve rates of the baseline, and the differences of the other settings from it."""
    (first, baseline), *others = settings.items()
    seeds = sorted(set.intersection(*(set(runs) for runs in settings.values())))
    if not seeds:
        raise ArenoError("the settings have no seed in common")
    tokens = min(max(token_curve(runs[seed]).values()) for runs in settings.values() for seed in seeds)
    metrics = [name for name in baseline[seeds[0]].metrics() if name.startswith("eval/") and name.endswith("accuracy")]
    titles = [f"seeds: {len(seeds)}, {tokens / 1e3:,.3g} thousand tokens", *(name[5:-9] or "mean" for name in metrics)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    rates = {name: {seed: rate_at(baseline[seed], name, tokens) for seed in seeds} for name in metrics}
    lines.append(f"| {' | '.join([first, *(f'{statistics.fmean(each.values()):.3f}' for each in rates.values())])} |")
    for setting, runs in others:
        cells = [difference_text([rate_at(runs[s], name, tokens) - rates[name][s] for s in seeds]) for name in metrics]
        lines.append(f"| {' | '.join([setting, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of a sweep over settings and seeds")
    sweep = parser.parse_args().sweep
    try:
        print(table(by_setting(sweep)))
    except ArenoError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
