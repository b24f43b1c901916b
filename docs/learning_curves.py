"""Run countdown with each algorithm and with settings that must not change learning, and draw the results.

    python docs/learning_curves.py run BASE FOLDER [NAME ...] --seeds 1 2 3 --parallel 6   make the missing runs
    python docs/learning_curves.py draw FOLDER IMAGE [NAME ...]                            draw the curves
    python docs/learning_curves.py table FOLDER [NAME ...]                                 print a table
    python docs/learning_curves.py tokens FOLDER IMAGE [NAME ...]       draw solve rate against sampled tokens

BASE is the checkpoint of a base model, such as outputs/reproduce/countdown-gpu-s1/base/checkpoints/latest. NAME is a
name in RUNS or in GROUPS. Without a name, all runs are made. Each curve is the mean over the seeds that are there, and
the area around it reaches from the lowest to the highest seed.

The group `distillation` needs --student, the checkpoint of a smaller base model. Its run TEACHER trains BASE by
reinforcement learning. With each seed, the students learn from the teacher of the same seed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import COLORS, REWARD, read_series

from areno.tracking.reader import list_runs

GRPO = ["areno.recipes.grpo", "--config-name=countdown"]
FOUR_STEPS = [*GRPO, "actor.ppo_n_minibatches=4"]
LONG = [
    *FOUR_STEPS,
    "total_train_steps=40",
    "gconfig.max_new_tokens=1024",
    "rollout.max_kv_tokens=1200000",  # six caches fit a device
    "valid_dataset.dataset_kwargs.count=500",
]
FP8 = ["actor.fp8_config.mode=e4m3", "rollout.kv_cache_dtype=fp8"]
TEACHER = "RL"  # trains the teachers of distillation, one with each seed
STUDENT = "actor.path={student}"
EVALUATED = ["evaluator.eval_before_train=true", "evaluator.freq_steps=10"]
DISTILL = ["areno.recipes.distill", "--config-name=countdown_distill", STUDENT, "teacher.path={teacher}", *EVALUATED]
BATCH, N_SAMPLES = {"gpu": 64, "cpu": 32}, {"gpu": 16, "cpu": 8}  # prompts of a step, and samples of a prompt
ALL_AHEAD = {f"age {age}, all ahead": age for age in (2, 4, 8)}  # runs that sample all batches up to an age together
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
        **{
            name: [*GRPO, f"rollout.max_head_offpolicyness={age}", "variant=decoupled"]
            for name, age in [*((f"age {age}", age) for age in (1, 2, 4, 8)), *ALL_AHEAD.items()]
        },
        "tail batching": [*GRPO, "rollout.prompts_ahead=16"],
    },
    "fp8": {
        "bf16, 1,024 tokens": LONG,
        "FP8": [*LONG, *FP8],
        "FP8, exact": [*LONG, *FP8, "engine.exact=true"],
        "FP8 rollout": ["examples/algorithms/fp8_rollout.py", *LONG[1:], *FP8],
    },
    "distillation": {
        TEACHER: [*GRPO, *EVALUATED],
        "RL of the student": [*GRPO, STUDENT, *EVALUATED],
        "RL of the student, lr 1e-4": [*GRPO, STUDENT, "actor.optimizer.lr=1e-4", *EVALUATED],
        **{
            f"distillation, {text}": [*DISTILL, f"teacher.loss_type={kind}"]
            for text, kind in [
                ("reverse KL", "reverse_kl"),
                ("JSD", "jsd"),
                ("forward KL", "forward_kl"),
                ("sampled reverse KL", "sampled_reverse_kl"),
            ]
        },
        "distillation, JSD, lr 1e-3": [*DISTILL, "actor.optimizer.lr=1e-3"],
    },
}
RUNS = {name: settings for group in GROUPS.values() for name, settings in group.items()}
COLUMNS = 4
COLOR, GREY, INK = "#1f5fa8", "#b4b8bf", "#333333"
COMPARED = "GRPO"  # each panel shows it too
SHARE = "actor.mb_spec.max_tokens_per_mb=32768"  # the device is shared by runs that know nothing of each other


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / "learning" / f"{name.replace(',', '').replace(' ', '-')}-s{seed}"


@dataclass(frozen=True)
class Setup:
    """The models, the size and the place of runs.

    Attributes:
        base: Checkpoint of the base model.
        student: Checkpoint of the base model of students. None if no run needs one.
        folder: Root folder of the runs.
        size: "gpu" or "cpu", the cut of the task.
        is_shared: Whether several runs share the device.
    """

    base: Path
    student: Path | None
    folder: Path
    size: str = "gpu"
    is_shared: bool = False

    def command(self, name: str, seed: int) -> list[str]:
        """Return the command of a run, as a user would type it."""
        teacher = run_folder(self.folder, TEACHER, seed) / "checkpoints/latest"
        module, task, *settings = [each.format(student=self.student, teacher=teacher) for each in RUNS[name]]
        where = run_folder(self.folder, name, seed)
        start = [sys.executable, module] if module.endswith(".py") else [sys.executable, "-m", module]
        place = [f"cluster.fileroot={self.folder}", f"experiment_name={where.parent.name}", f"trial_name={where.name}"]
        return [
            *start,
            task if self.size == "gpu" else f"{task}_{self.size}",
            *([] if has_setting(settings, "actor.path") else [f"actor.path={self.base}"]),
            *([] if has_setting(settings, "evaluator.eval_before_train") else ["evaluator.eval_before_train=false"]),
            *settings,
            *(self.all_ahead(ALL_AHEAD[name]) if name in ALL_AHEAD else []),
            f"seed={seed}",
            *([SHARE] if self.is_shared else []),
            *place,
        ]

    def all_ahead(self, age: int) -> list[str]:
        """Return settings with which a step samples the next `age` batches together with its own."""
        n_ahead = age * BATCH[self.size]
        n_samples = N_SAMPLES[self.size] * (BATCH[self.size] + n_ahead)
        return [
            f"rollout.prompts_ahead={n_ahead}",
            f"rollout.max_concurrent_rollouts={n_samples}",
            f"rollout.max_kv_tokens={200 * n_samples}",  # six caches fit a device; samples have up to 271 tokens
        ]


def has_setting(settings: Sequence[str], key: str) -> bool:
    return any(each.partition("=")[0] == key for each in settings)


def is_taught(name: str) -> bool:
    """Return whether a run learns from a teacher."""
    return has_setting(RUNS[name], "teacher.path")


def with_teachers(jobs: Sequence[tuple[str, int]], done: dict[str, list[Path]], folder: Path) -> list[tuple[str, int]]:
    """Add the runs of missing teachers before the jobs that learn from them."""
    wanted = [(TEACHER, seed) for name, seed in jobs if is_taught(name)]
    missing = [job for job in wanted if run_folder(folder, *job) not in done.get(TEACHER, [])]
    return list(dict.fromkeys([*missing, *jobs]))


def run(setup: Setup, jobs: Sequence[tuple[str, int]], n_parallel: int) -> bool:
    """Make runs, several at a time. A student waits for its teacher. Return whether all of them ended well."""
    waiting, running, failed = list(jobs), dict[tuple[str, int], Any](), set[tuple[str, int]]()
    while waiting or running:
        for job in list(waiting):
            teacher = (TEACHER, job[1]) if is_taught(job[0]) else None
            if teacher in failed:
                waiting.remove(job)
                failed.add(job)
                print(f"{job[0]}, seed {job[1]}: FAILED, because its teacher failed", flush=True)
            elif len(running) < n_parallel and teacher not in (*waiting, *running):
                waiting.remove(job)
                words = setup.command(*job)
                print(" ".join(words[1:]), flush=True)
                running[job] = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.2)
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                print(f"{job[0]}, seed {job[1]}: {'done' if not process.returncode else 'FAILED'}", flush=True)
                failed |= {job} if process.returncode else set()
    return not failed


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
    save(figure, image)


def save(figure: Figure, image: Path) -> None:
    """Write a figure as a PNG file."""
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


SOLVED = "eval/accuracy"
GOAL = 0.95  # share of the teacher's solve rate


def token_curve(path: Path) -> tuple[list[float], list[float]]:
    """Return (millions of tokens sampled in training before each evaluation, solve rates) of a run."""
    lengths, counts = (read_series(path, f"rollout/{name}") for name in ("response_len_mean", "num_sequences"))
    sampled = dict(zip(lengths, accumulate(lengths[step] * counts[step] / 1e6 for step in lengths), strict=True))
    rates = read_series(path, SOLVED)
    return [sampled.get(step, 0.0) for step in rates], list(rates.values())


def tokens_until(path: Path, rate: float) -> float | None:
    """Return the millions of tokens at which a run reaches a solve rate, interpolated. None if it never does."""
    points = list(zip(*token_curve(path), strict=True))
    if points[0][1] >= rate:
        return points[0][0]
    for (x, before), (later, after) in pairwise(points):
        if after >= rate:
            return x + (later - x) * (rate - before) / (after - before)
    return None


def goal(runs: dict[str, list[Path]], path: Path) -> float:
    """Return the solve rate to reach: GOAL times the last solve rate of the teacher with the same seed."""
    teacher = next(each for each in runs[TEACHER] if each.name.rpartition("-s")[2] == path.name.rpartition("-s")[2])
    return GOAL * token_curve(teacher)[1][-1]


def draw_tokens(runs: dict[str, list[Path]], names: Sequence[str], image: Path) -> None:
    """Draw the solve rates of runs against the tokens that they sampled in training."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for name, color in zip(names, [*COLORS, "#b08d00", "#c04f8a"], strict=False):
        curves = [token_curve(path) for path in runs[name]]
        for curve in curves:
            axes.plot(*curve, color=color, linewidth=0.8, alpha=0.4)
        mean = [[statistics.fmean(each) for each in zip(*part, strict=False)] for part in zip(*curves, strict=True)]
        axes.plot(*mean, color=color, linewidth=2.2, label=f"{name}: the teachers" if name == TEACHER else name)
    level = statistics.fmean(goal(runs, path) for path in runs[TEACHER])
    axes.axhline(level, color=INK, linewidth=1, linestyle="--", label=f"{GOAL:.0%} of the teacher")
    axes.set(xlabel="millions of tokens sampled in training", ylabel="solve rate, test problems")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    save(figure, image)


def token_table(runs: dict[str, list[Path]], names: Sequence[str]) -> str:
    """Return a Markdown table of solve rates, and of the tokens sampled until GOAL of the teacher's solve rate."""
    share = f"until {GOAL:.0%} of the teacher's solve rate"
    titles = ["run", "solve rate: base", "end", "million tokens: all", share, f"{share}, {TEACHER} = 1"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    needed = {path: tokens_until(path, goal(runs, path)) for name in names for path in runs[name]}
    of_teachers = [each for path in runs[TEACHER] if (each := tokens_until(path, goal(runs, path))) is not None]
    for name in names:
        curves, until = [token_curve(path) for path in runs[name]], [needed[path] for path in runs[name]]
        columns = [
            [f"{rates[0]:.3f}" for _, rates in curves],
            [f"{rates[-1]:.3f}" for _, rates in curves],
            [f"{tokens[-1]:.2f}" for tokens, _ in curves],
            ["never" if each is None else f"{each:.2f}" for each in until],
            ["-" if each is None else f"{each / statistics.fmean(of_teachers):.2f}" for each in until],
        ]
        lines.append(f"| {' | '.join([name, *map(', '.join, columns)])} |")
    return "\n".join(lines)


def chosen(names: Sequence[str], among: Sequence[str]) -> list[str]:
    """Return the names of runs that the user named, directly or by a group. All if there are none."""
    wanted = [each for name in names for each in GROUPS.get(name, [name])] or list(RUNS)
    return [name for name in dict.fromkeys(wanted) if name in among]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "draw", "table", "tokens"):
        command = commands.add_parser(name)
        if name == "run":
            command.add_argument("base", type=Path, help="checkpoint of the base model")
        command.add_argument("folder", type=Path, help="where the runs are")
        if name in ("draw", "tokens"):
            command.add_argument("image", type=Path, help="PNG file to write")
        known = ", ".join([*RUNS, *GROUPS])
        command.add_argument("names", nargs="*", metavar="NAME", help=f"runs or groups of runs: {known}")
        if name == "run":
            command.add_argument("--student", type=Path, help="checkpoint of the base model of students")
            command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
            command.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
            command.add_argument("--size", choices=("gpu", "cpu"), default="gpu", help="cpu: the small cut of the task")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    known = [*RUNS, *GROUPS]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no run {unknown[0]!r}; there are {', '.join(known)}")
    runs = present(args.folder)
    if args.command == "run":
        names = chosen(args.names, list(RUNS))
        jobs = [(name, seed) for seed in args.seeds for name in names]
        jobs = [job for job in jobs if run_folder(args.folder, *job) not in runs.get(job[0], [])]
        if args.student is None and (students := [name for name in names if STUDENT in RUNS[name]]):
            parser.error(f"{students[0]!r} needs --student, the checkpoint of a smaller base model")
        setup = Setup(args.base, args.student, args.folder, args.size, args.parallel > 1)
        sys.exit(0 if run(setup, with_teachers(jobs, runs, args.folder), args.parallel) else 1)
    names = chosen(args.names, list(runs))
    if not names:
        parser.error(f"there are no runs in {args.folder}; make them with: learning_curves.py run BASE {args.folder}")
    if args.command == "tokens":
        if TEACHER not in runs:
            parser.error(f"there is no run {TEACHER!r}, whose solve rate is the goal; make it with the command run")
        draw_tokens(runs, names, args.image)
        print(token_table(runs, names))
    elif args.command == "draw":
        draw(runs, names, args.image)
    else:
        print(table(runs, names))


if __name__ == "__main__":
    main()
