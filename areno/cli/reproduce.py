"""The command `areno reproduce`, which trains a base model from scratch, trains it further by RL, and judges both.

Each reproduction consists of two runs with files in conf/, and of bands for their expected results. The sizes `cpu` and
`gpu` differ only in these files. `cpu` uses `countdown_base_cpu` and `countdown_cpu` instead of `countdown_base` and
`countdown`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.cli import league
from areno.errors import ArenoError, ConfigError, Problem, did_you_mean

SIZES = ("cpu", "gpu")
ALGORITHMS = ("grpo", "gspo")
LEAGUE = "league"
SOLVED, REWARD = "eval/accuracy", "rollout/rewards_mean"


@dataclass(frozen=True)
class ExpectedRanges:
    """The expected results of a reproduction. Each is a range (least, most) of the share of solved test problems."""

    base: tuple[float, float]
    trained: tuple[float, float]
    factor: float  # by which the share must grow at least

    def verdicts(self, base: float, trained: float) -> Iterator[tuple[bool, str]]:
        """Yield (whether it is as expected, text) for each of the two shares and for the growth."""
        for name, rate, band in (("base model", base, self.base), ("after RL", trained, self.trained)):
            met = band[0] <= rate <= band[1]
            yield met, f"solve rate, {name}: {rate:.3f}; expected {band[0]:g} to {band[1]:g}"
        grown = trained / base if base else float("inf") if trained else 0.0
        yield grown >= self.factor, f"growth of the solve rate: {grown:.2f} times; expected at least {self.factor:g}"


REPRODUCTIONS: dict[str, dict[str, ExpectedRanges]] = {
    "countdown": {
        "cpu": ExpectedRanges(base=(0.07, 0.22), trained=(0.15, 0.5), factor=1.4),
        "gpu": ExpectedRanges(base=(0.05, 0.09), trained=(0.27, 0.43), factor=3.0),
    },
    "arithmetic": {
        "cpu": ExpectedRanges(base=(0.07, 0.25), trained=(0.13, 0.45), factor=1.3),
        "gpu": ExpectedRanges(base=(0.07, 0.13), trained=(0.22, 0.4), factor=2.2),
    },
}
"""Name -> size -> bands. docs/learning.md has the same bands."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a base model from random weights on demonstrations with many mistakes, improves it by reinforcement "
        "learning, draws the curve, and says whether the results are in the expected bands. Needs no network. The exit "
        "code is 1 if a result is outside of its band."
    )
    names = ", ".join(REPRODUCTIONS)
    parser.add_argument(
        "name", metavar="NAME", help=f"the task: {names}; or league, which compares many algorithms on both"
    )
    parser.add_argument(
        "--size", default="auto", help="auto, cpu or gpu (default: gpu if there is a CUDA device, otherwise cpu)"
    )
    parser.add_argument("--algo", default="grpo", help=f"{' or '.join(ALGORITHMS)} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of both runs (default: %(default)s)")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="new folder for both runs (default: outputs/reproduce/NAME-SIZE-sSEED)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted reproduction in its folder; finished runs stay"
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="key=value",
        help="other setting of the base model's training, such as total_train_epochs=2. Repeat it for more settings",
    )
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="other settings of the reinforcement learning"
    )
    league.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name == LEAGUE:
        problems: list[Problem] = []
        for option, is_given, instead in (
            ("--algo", arguments.algo != ALGORITHMS[0], "--only"),
            ("--seed", arguments.seed != 1, "--seeds"),
        ):
            if is_given:
                problems.append(Problem(option, "is not for the league; use {}", instead))
        size, output = _size_and_output(arguments, "league-{}", problems)
        return league.run(arguments, size, output, problems)
    name, size, output = _check_arguments(arguments)
    suffix = "" if size == "gpu" else f"_{size}"
    common = [f"cluster.fileroot={_quoted(output.parent)}", f"experiment_name={_quoted(output.name)}"]
    common += [f"seed={arguments.seed}", f"engine.device={'cuda' if size == 'gpu' else 'cpu'}"]
    started = time.monotonic()
    _run_recipe("sft", f"{name}_base{suffix}", [*common, "trial_name=base", *arguments.base])
    base_seconds = time.monotonic() - started
    model = output / "base" / "checkpoints" / "latest"
    own = [f"actor.path={_quoted(model)}", f"trial_name={arguments.algo}", *arguments.settings]
    _run_recipe(arguments.algo, f"{name}{suffix}", [*common, *own])
    seconds = {"base": base_seconds, "rl": time.monotonic() - started - base_seconds}
    result = _collect_result(output / arguments.algo, REPRODUCTIONS[name][size])
    result |= {"name": name, "size": size, "seed": arguments.seed, "algo": arguments.algo, "seconds": seconds}
    _write_result(output, result)
    _print_result(output, result)
    return 0 if all(met for met, _ in result["verdict"]) else 1


def _check_arguments(arguments: argparse.Namespace) -> tuple[str, str, Path]:
    """Check the command line, and return (name, size, output folder)."""
    problems: list[Problem] = []
    for what, value, known in (
        ("NAME", arguments.name, (*REPRODUCTIONS, LEAGUE)),
        ("--algo", arguments.algo, ALGORITHMS),
    ):
        if value not in known:
            hint = did_you_mean(value, known, f"; there are {', '.join(known)}")
            problems.append(Problem(what, "there is no {!r}{}", value, hint))
    size, output = _size_and_output(arguments, f"{arguments.name}-{{}}-s{arguments.seed}", problems)
    if given := [option for option, value in league.given_options(arguments).items() if value]:
        problems.append(Problem(given[0], "is an option of areno reproduce league alone; leave it out"))
    if problems:
        raise ConfigError(problems)
    return arguments.name, size, output


def _size_and_output(arguments: argparse.Namespace, name: str, problems: list[Problem]) -> tuple[str, Path]:
    """Return the size and the output folder, whose default name has a place for the size. Append their problems."""
    import torch

    size = arguments.size
    if size not in ("auto", *SIZES):
        hint = did_you_mean(size, ("auto", *SIZES), f"; there are auto, {', '.join(SIZES)}")
        problems.append(Problem("--size", "there is no {!r}{}", size, hint))
    elif size == "gpu" and not torch.cuda.is_available() and not arguments.tables:
        problems.append(Problem("--size", "gpu needs a CUDA device, and there is none; use --size cpu"))
    if size not in SIZES:
        size = "gpu" if torch.cuda.is_available() else "cpu"
    output = Path(arguments.output or f"outputs/reproduce/{name.format(size)}").expanduser().absolute()
    is_known = bool(arguments.output) or arguments.size in ("auto", *SIZES)  # the default has the size in its name
    if is_known and output.exists() and not (arguments.resume or arguments.tables):
        text = "{} exists; name another folder, or continue its runs with --resume"
        problems.append(Problem("--output", text, output))
    elif is_known and arguments.resume and not output.is_dir():
        problems.append(Problem("--resume", "there is no folder {}; start without --resume", output))
    is_league = arguments.name == LEAGUE
    problems += _setting_problems(arguments.base, _FIXED | ({"seed": ""} if is_league else {}))
    problems += _setting_problems(arguments.settings, _FIXED | (league.fixed_settings(size) if is_league else {}))
    return size, output


_FIXED = {
    "seed": "; use --seed",
    "engine.device": "; use --size",
    "actor.path": " to the base model",
    "trial_name": "; use --output",
    "experiment_name": "; use --output",
    "cluster.fileroot": "; use --output",
}
"""Settings that the user cannot set -> what to do instead."""


def _setting_problems(settings: Sequence[str], fixed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each setting that is no key=value, or is set by the command."""
    for setting in settings:
        key, equals, _ = setting.lstrip("+").partition("=")
        if not equals:
            yield Problem("", "{!r} is not a setting; expected key=value", setting)
            continue
        # A section replaces all of its keys, and a key below one that is set replaces a part of it.
        found = [each for each in fixed if f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.")]
        if found:
            own = "" if found[0] == key else f" ({found[0]})"
            yield Problem(key, "is set by areno reproduce{}{}", own, fixed[found[0]])


def _run_recipe(recipe: str, config_name: str, settings: Sequence[str]) -> None:
    """Make or resume a run in a process of its own, so that all memory of a device is free for the next run."""
    words = ["-m", f"areno.recipes.{recipe}", f"--config-name={config_name}", *settings]
    print(f"runs: {shlex.join(['python', *words])}", flush=True)
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code in (130, 143):
        raise KeyboardInterrupt
    if code:
        raise ArenoError("the run of {} failed with exit code {}; its messages are above", config_name, code)


def _quoted(path: Any) -> str:
    return '"' + str(path).replace('"', '\\"') + '"'


def _collect_result(folder: Path, bands: ExpectedRanges) -> dict[str, Any]:
    """Return the curve, the evaluations and the verdict of the reinforcement learning in a run folder."""
    from areno.tracking.reader import RunReader

    reader = RunReader(folder)
    metrics = reader.metrics()
    evaluations = {
        name.removeprefix("eval/"): (series.values[0], series.values[-1])
        for name, series in metrics.items()
        if name.startswith("eval/") and len(series.values) > 1
    }
    if "accuracy" not in evaluations:
        raise ArenoError("{} has no evaluation before and after training; remove the folder and start again", folder)
    curve = metrics[REWARD]
    return {
        "curve": {"steps": curve.steps, "rewards": curve.values},
        "evaluations": evaluations,
        "verdict": list(bands.verdicts(*evaluations["accuracy"])),
    }


def _write_result(output: Path, result: dict[str, Any]) -> None:
    from areno.files.durable import atomic_write_text
    from areno.report.picture import svg

    atomic_write_text(output / "result.json", json.dumps(result, indent=2) + "\n")
    title = f"{result['name']}, {result['algo']}, seed {result['seed']}, on a {result['size'].upper()}"
    atomic_write_text(output / "curve.svg", svg(title, result["curve"]["steps"], {"": result["curve"]["rewards"]}))


def _print_result(output: Path, result: dict[str, Any]) -> None:
    steps, rewards = result["curve"]["steps"], result["curve"]["rewards"]
    print("\nmean reward of the sampled answers")
    size = max(1, len(rewards) // 10)
    for start in range(0, len(rewards), size):
        part = rewards[start : start + size]
        mean, last = sum(part) / len(part), steps[min(start + size, len(steps)) - 1]
        print(f"  steps {steps[start]:>4} to {last:<4} {mean:.3f} {'#' * round(50 * mean)}")
    print("\ntest problems             base model   after RL")
    for name, (before, after) in result["evaluations"].items():
        print(f"  {name:<24}{before:>10.3f} {after:>10.3f}")
    seconds = result["seconds"]
    print(f"\ntime: base model {seconds['base']:.0f} s, reinforcement learning {seconds['rl']:.0f} s")
    for met, text in result["verdict"]:
        print(f"{'met    ' if met else 'NOT MET'} {text}")
    print(f"curve: {output / 'curve.svg'}; numbers: {output / 'result.json'}")
