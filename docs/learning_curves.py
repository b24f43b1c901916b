"""Run countdown with each algorithm and with settings that must not change learning, and draw the results.

    python docs/learning_curves.py run BASE FOLDER [NAME ...] --seeds 1 2 3 --parallel 6   make the missing runs
    python docs/learning_curves.py draw FOLDER IMAGE [NAME ...]                            draw the curves
    python docs/learning_curves.py table FOLDER [NAME ...]                                 print a table

BASE is the checkpoint of a base model, such as outputs/reproduce/countdown-gpu-s1/base/checkpoints/latest. NAME is a
name in RUNS or in GROUPS. Without a name, all runs are made. Each curve is the mean over the seeds that are there, and
the area around it reaches from the lowest to the highest seed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image
from plots import REWARD, read_series

from areno.tracking.reader import list_runs

GRPO = ["areno.recipes.grpo", "--config-name=countdown"]
FOUR_STEPS = [*GRPO, "actor.ppo_n_minibatches=4"]
GROUPS: dict[str, dict[str, list[str]]] = {  # group -> name -> module and settings
    "algorithms": {
        "GRPO": GRPO,
        "GSPO": ["areno.recipes.gspo", "--config-name=countdown"],
        "PPO": ["areno.recipes.ppo", "--config-name=countdown_ppo"],
        **{
            name: [*GRPO, f"variant={variant}"]
            for name, variant in [("DAPO", "dapo"), ("Dr.GRPO", "dr_grpo"), ("RLOO", "rloo"), ("CISPO", "cispo")]
        },
    },
    "controls": {
        f"{name}{text}": [*run, *settings]
        for text, settings in (("", []), (", lr 1e-5", ["actor.optimizer.lr=1e-5"]))
        for name, run in (
            ("random reward", [*GRPO, "reward.fn=examples/countdown/reward.py:random_reward"]),
            ("shuffled advantages", ["examples/algorithms/shuffled_grpo.py", "--config-name=countdown"]),
        )
    },
    "baselines": {"rejection sampling": [*GRPO, "actor.adv_norm=null"]},  # trains on right answers alone
    "rates": {
        **{f"lr {rate}": [*GRPO, f"actor.optimizer.lr={rate}"] for rate in ("1e-5", "1e-4", "3e-4", "1e-3")},
        **{f"4 steps, clip {clip}": [*FOUR_STEPS, f"actor.eps_clip={clip}"] for clip in ("0.05", "0.2", "0.4", "0.8")},
    },
    "features": {
        "exact": [*GRPO, "engine.exact=true"],
        "deterministic": [*GRPO, "engine.deterministic=true"],
        "shared prefixes": [*GRPO, "actor.share_prefixes=on"],
        "adapters": [*GRPO, "actor.use_lora=true", "actor.lora_rank=32", "actor.optimizer.lr=3e-4"],
        "adam_8bit": [*GRPO, "actor.optimizer.type=adam_8bit"],
        "truncated IS, 4 steps": [*FOUR_STEPS, "variant=tis"],
    },
    "ahead": {
        **{f"age {age}": [*GRPO, f"rollout.max_head_offpolicyness={age}", "variant=decoupled"] for age in (1, 2, 4, 8)},
        "tail batching": [*GRPO, "rollout.prompts_ahead=16"],
    },
}
RUNS = {name: settings for group in GROUPS.values() for name, settings in group.items()}
COLUMNS = 4
COLOR, GREY, INK = "#1f5fa8", "#b4b8bf", "#333333"
COMPARED = "GRPO"  # each panel shows it too
SHARE = "actor.mb_spec.max_tokens_per_mb=32768"  # the device is shared by runs that know nothing of each other


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / "learning" / f"{name.replace(',', '').replace(' ', '-')}-s{seed}"


def command(base: Path, folder: Path, name: str, seed: int, is_shared: bool) -> list[str]:
    """Return the command of a run, as a user would type it."""
    module, *settings = RUNS[name]
    where = run_folder(folder, name, seed)
    start = [sys.executable, module] if module.endswith(".py") else [sys.executable, "-m", module]
    place = [f"cluster.fileroot={folder}", f"experiment_name={where.parent.name}", f"trial_name={where.name}"]
    shared = [SHARE] if is_shared else []
    return [
        *start,
        *settings,
        f"actor.path={base}",
        "evaluator.eval_before_train=false",
        f"seed={seed}",
        *shared,
        *place,
    ]


def run(base: Path, folder: Path, jobs: Sequence[tuple[str, int]], n_parallel: int) -> bool:
    """Make runs, several at a time. Return whether all of them ended well."""
    waiting, running, is_well = list(jobs), dict[tuple[str, int], Any](), True
    while waiting or running:
        while waiting and len(running) < n_parallel:
            job = waiting.pop(0)
            words = command(base, folder, *job, n_parallel > 1)
            print(" ".join(words[1:]), flush=True)
            running[job] = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.2)
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                print(f"{job[0]}, seed {job[1]}: {'done' if not process.returncode else 'FAILED'}", flush=True)
                is_well = is_well and not process.returncode
    return is_well


def present(folder: Path) -> dict[str, list[Path]]:
    """Name -> folders of its completed runs."""
    done = {run.path for run in (list_runs(folder) if folder.is_dir() else []) if run.status() == "completed"}
    found = {name: [path for seed in range(1, 10) if (path := run_folder(folder, name, seed)) in done] for name in RUNS}
    return {name: paths for name, paths in found.items() if paths}


def spread(runs: Sequence[Path], scalar: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return (steps, means, lowest, highest values) of a scalar over runs, at the steps that all of them have."""
    series = [read_series(path, scalar) for path in runs]
    steps = sorted(set.intersection(*map(set, series)))
    columns = [[each[step] for each in series] for step in steps]
    return steps, [statistics.fmean(each) for each in columns], [min(each) for each in columns], [*map(max, columns)]


def draw_panel(axes: Axes, name: str, runs: dict[str, list[Path]], scalar: str) -> None:
    """Draw the curve of one name over its seeds, and that of GRPO in grey."""
    if name != COMPARED and COMPARED in runs:
        steps, means, _, _ = spread(runs[COMPARED], scalar)
        axes.plot(steps, means, color=GREY, linewidth=1.2)
    steps, means, low, high = spread(runs[name], scalar)
    axes.fill_between(steps, low, high, color=COLOR, alpha=0.2, linewidth=0)
    axes.plot(steps, means, color=COLOR, linewidth=1.6)
    axes.grid(alpha=0.25)


def draw(runs: dict[str, list[Path]], names: Sequence[str], image: Path) -> None:
    """Draw the reward and the length of answers of each name, one panel for each."""
    scalars = [(REWARD, "mean reward"), ("rollout/response_len_mean", "tokens of an answer")]
    rows = -(-len(names) // COLUMNS)
    columns = min(COLUMNS, len(names))
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    size = (2.6 * columns + 0.6, 2.9 * rows + 0.5)
    figure, grid = plt.subplots(2 * rows, columns, figsize=size, squeeze=False, sharex=True, sharey="row")
    for index, name in enumerate(names):
        for place, (scalar, text) in enumerate(scalars):
            axes = grid[2 * (index // columns) + place][index % columns]
            draw_panel(axes, name, runs, scalar)
            axes.set_ylim(bottom=0)
            if index % columns == 0:
                axes.set_ylabel(text)
            if not place:
                n_seeds = len(runs[name])
                axes.set_title(f"{name} ({n_seeds} seed{'s'[: n_seeds > 1]})", loc="left", fontsize=10, color=INK)
    for index in range(len(names), rows * columns):
        for place in range(2):
            grid[2 * (index // columns) + place][index % columns].set_axis_off()
    figure.supxlabel(f"step (grey: {COMPARED})", fontsize=10)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=100)
    # Lines need few colours; a palette makes the file a third of the size.
    Image.open(image).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(image, optimize=True)


def table(runs: dict[str, list[Path]], names: Sequence[str]) -> str:
    """Return the table of results in Markdown. Several seeds give several numbers."""

    def of(name: str, value: Callable[[Path], float], digits: int) -> str:
        return ", ".join(f"{value(path):.{digits}f}" for path in runs[name])

    def last(scalar: str, n: int = 1) -> Callable[[Path], float]:
        return lambda path: statistics.fmean(list(read_series(path, scalar).values())[-n:])

    titles = [
        "run",
        "mean reward, last ten steps",
        "solve rate",
        "pass@16",
        "tokens of an answer",
        "entropy",
        "a step, s",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in names:
        cells = [
            of(name, last(REWARD, 10), 3),
            of(name, last("eval/accuracy"), 3),
            of(name, last("eval/pass@16"), 3),
            of(name, last("rollout/response_len_mean", 10), 0),
            of(name, last("train/entropy", 10), 3),
            of(name, lambda path: statistics.median(read_series(path, "time/step").values()), 2),
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def chosen(names: Sequence[str], among: Sequence[str]) -> list[str]:
    """Return the names of runs that the user named, directly or by a group. All if there are none."""
    wanted = [each for name in names for each in GROUPS.get(name, [name])] or list(RUNS)
    return [name for name in dict.fromkeys(wanted) if name in among]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    known = [*RUNS, *GROUPS]
    for name in ("run", "draw", "table"):
        command = commands.add_parser(name)
        if name == "run":
            command.add_argument("base", type=Path, help="checkpoint of the base model")
        command.add_argument("folder", type=Path, help="where the runs are")
        if name == "draw":
            command.add_argument("image", type=Path, help="PNG file to write")
        command.add_argument("names", nargs="*", metavar="NAME", help=f"runs or groups of runs: {', '.join(known)}")
        if name == "run":
            command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
            command.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no run {unknown[0]!r}; there are {', '.join(known)}")
    runs = present(args.folder)
    if args.command == "run":
        jobs = [(name, seed) for seed in args.seeds for name in chosen(args.names, list(RUNS))]
        jobs = [job for job in jobs if run_folder(args.folder, *job) not in runs.get(job[0], [])]
        sys.exit(0 if run(args.base, args.folder, jobs, args.parallel) else 1)
    names = chosen(args.names, list(runs))
    if not names:
        parser.error(f"there are no runs in {args.folder}; make them with: learning_curves.py run BASE {args.folder}")
    if args.command == "draw":
        draw(runs, names, args.image)
    else:
        print(table(runs, names))


if __name__ == "__main__":
    main()
