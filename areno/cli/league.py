"""`areno reproduce league`: many algorithms on one task, with seeds, equal tokens and learning rates chosen apart.

A run of the league is a run of a recipe in a process of its own. When it ends, it writes a small file with its result.
These files decide which runs are missing, so the league can be made in parts. New variants in conf/variant/ take part.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno.errors import ConfigError, Problem, did_you_mean
from areno.league.results import picture, read_results, tables
from areno.league.runs import STAGES, UPDATES, LeagueRuns, contenders, keys_of_algorithms
from areno.league.schedule import CHOOSING_SEED, League

_OF_UPDATES = f": each batch has {UPDATES} updates, because with one, many of the algorithms are the same"
FIXED = {
    "seed": "; use --seeds",
    "actor.optimizer.lr": ": the stage rates chooses it for each algorithm",
    "variant": ": each run has its own; use --only",
    "actor.ppo_n_minibatches": _OF_UPDATES,
    "critic.ppo_n_minibatches": _OF_UPDATES,
    "valid_dataset.loader": ": each stage has problems of its own",
    "rollout.max_head_offpolicyness": ": the stage staleness compares its values",
    "rollout.prompts_ahead": ": the stage staleness compares its values",
}
"""Settings that the user of the league cannot set -> why, or what to do instead."""


def fixed_settings(size: str) -> dict[str, str]:
    """Return FIXED, with the settings that algorithms of the league have."""
    found = {}
    for key, names in keys_of_algorithms(size).items():
        others = f" and {len(names) - 1} others" if len(names) > 2 else f" and {names[1]}" if len(names) > 1 else ""
        found[key] = f": it is a part of {names[0]}{others}"
    return found | FIXED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of areno reproduce league")
    stages = ", ".join(STAGES)
    group.add_argument(
        "--stage", metavar="NAME,...", help=f"the stages to make: {stages} (default: all, in this order)"
    )
    group.add_argument("--only", metavar="NAME,...", help="the algorithms to run (default: all)")
    group.add_argument("--seeds", metavar="N,...", help="seeds of the stages after the first one (default: 1,2,3)")
    group.add_argument("--parallel", type=int, metavar="N", help="runs at the same time, spread over all devices")
    group.add_argument(
        "--for",
        dest="seconds",
        type=float,
        metavar="SECONDS",
        help="end after this time: start no run that would take longer, and end those that do. --resume goes on",
    )
    group.add_argument("--rows", metavar="FOLDER", help="folder of the results (default: results/ in --output)")
    group.add_argument("--tables", action="store_true", help="make no runs: print the tables, and draw league.svg")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options that only the league has, by option."""
    names = {"--for": "seconds"} | {
        f"--{name}": name for name in ("stage", "only", "seeds", "parallel", "rows", "tables")
    }
    return {option: vars(arguments)[name] for option, name in names.items()}


def run(arguments: argparse.Namespace, size: str, output: Path, problems: list[Problem]) -> int:
    """Run the command. `problems` are those of the arguments that other reproductions have too."""
    league = _check_arguments(arguments, size, output, problems)
    ok = True if arguments.tables else league.play(arguments.seconds)
    if results := read_results(league.rows).values():
        from areno.files.durable import atomic_write_text

        atomic_write_text(league.rows / "league.svg", picture(results))
        print(f"\n{tables(results, league.bed.reached)}\n\nresults and league.svg: {league.rows}")
    return 0 if ok else 1


def _check_arguments(arguments: argparse.Namespace, size: str, output: Path, problems: list[Problem]) -> League:
    import torch

    stages = _names("--stage", arguments.stage, STAGES, problems)
    names = _names("--only", arguments.only, list(contenders(size)), problems, list(contenders("gpu")))
    seed_words = _words("1,2,3" if arguments.seeds is None else arguments.seeds)
    seeds = [int(word) for word in seed_words if word.isdecimal() and 0 < int(word) < CHOOSING_SEED]
    if not seeds or len(seeds) != len(seed_words):
        text = "is {!r}; numbers from 1 to {} with commas are expected, because {} chooses the learning rates"
        problems.append(Problem("--seeds", text, arguments.seeds, CHOOSING_SEED - 1, CHOOSING_SEED))
    problems += _repeated("--seeds", seeds)
    for option, value in (("--parallel", arguments.parallel), ("--for", arguments.seconds)):
        if value is not None and value <= 0 and not arguments.tables:
            problems.append(Problem(option, "is {}; a number above 0 is expected", value))
    rows = Path(arguments.rows).expanduser().absolute() if arguments.rows else output / "results"
    if not arguments.tables and rows.exists() and not rows.is_dir():
        problems.append(Problem("--rows", "{} is a file; name a folder", rows))
    if arguments.tables:
        if not rows.is_dir():
            problems.append(Problem("--tables", "there is no folder {}; name it with --rows", rows))
        elif not any(rows.glob("*/*.json")):
            text = "there are no results, such as countdown/grpo-s1.json, in {}; name their folder with --rows"
            problems.append(Problem("--tables", text, rows))
        makes_runs = {name: vars(arguments)[name] for name in ("stage", "only", "seeds", "parallel", "resume", "base")}
        problems += [
            Problem(f"--{name}", "is for runs, and --tables makes none: it prints all results; leave one out")
            for name, value in (makes_runs | {"for": arguments.seconds}).items()
            if value
        ]
    if problems:
        raise ConfigError(problems)
    if arguments.tables:
        found = read_results(rows).values()
        size = next((one.size for one in found), size)
        # A mixture of settings is no table, though nobody need repeat the settings to see one.
        settings = arguments.settings or LeagueRuns(size, output).given_settings(found)
    else:
        settings = arguments.settings
    parallel = arguments.parallel or (6 * torch.cuda.device_count() if size == "gpu" else 1)
    how = (parallel, arguments.base, settings, not arguments.tables)
    return League(size, output, rows, stages, names, seeds, *how)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _repeated(option: str, values: Sequence[object]) -> list[Problem]:
    """Return a problem if a value is there more than once."""
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    return [Problem(option, "names {} more than once", ", ".join(map(str, twice)))] if twice else []


def _names(
    option: str, text: str | None, known: Sequence[str], problems: list[Problem], of_gpu: Sequence[str] = ()
) -> list[str]:
    words = list(known) if text is None else _words(text)
    if not words:
        problems.append(Problem(option, "is {!r}; names with commas are expected, such as {}", text, known[0]))
    problems += _repeated(option, words)
    for word in dict.fromkeys(words):
        if word in of_gpu and word not in known:
            problems.append(Problem(option, "{} needs --size gpu, because the task of a CPU has no critic", word))
        elif word not in known:
            hint = did_you_mean(word, known, f"; there are {', '.join(known)}")
            problems.append(Problem(option, "there is no {!r}{}", word, hint))
    return words
