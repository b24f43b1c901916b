"""Run the quickstart with each algorithm and variant, and draw their rewards.

    python docs/algorithm_curves.py run FOLDER            make the missing runs: about five minutes on two cores
    python docs/algorithm_curves.py draw FOLDER IMAGE     draw the image, and print the table of docs/learning.md

All runs have the same seed. All but "GRPO, 1 update" and PPO make four updates per batch, so that the ratios move away
from 1 and the variants differ. PPO has its own task file, in which the critic is first trained alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image
from plots import REWARD, read_series

from areno.tracking.reader import list_runs

STEPS = "total_train_steps=60"
SHARED = [STEPS, "actor.ppo_n_minibatches=4"]
BASE = "GRPO"  # each panel shows it too, for comparison
RUNS: dict[str, tuple[str, list[str]]] = {  # name -> recipe, settings
    BASE: ("grpo", SHARED),
    "GRPO, 1 update": ("grpo", [STEPS]),
    "Dr.GRPO": ("grpo", [*SHARED, "variant=dr_grpo"]),
    "DAPO": ("grpo", [*SHARED, "variant=dapo"]),
    "GSPO": ("gspo", SHARED),
    "GSPO-token": ("grpo", [*SHARED, "variant=gspo_token"]),
    "RLOO": ("grpo", [*SHARED, "variant=rloo"]),
    "REINFORCE++": ("grpo", [*SHARED, "variant=reinforce_pp"]),
    "CISPO": ("grpo", [*SHARED, "variant=cispo"]),
    "SAPO": ("grpo", [*SHARED, "variant=sapo"]),
    "M2PO": ("grpo", [*SHARED, "variant=m2po"]),
    "Decoupled PPO": ("grpo", [*SHARED, "variant=decoupled"]),
    "Truncated IS": ("grpo", [*SHARED, "variant=tis"]),
    "PPO": ("ppo", [STEPS]),
}
COLUMNS = 5
COLOR, GREY, INK = "#1f5fa8", "#b4b8bf", "#333333"


def run_folder(folder: Path, name: str) -> Path:
    return folder / "algorithms" / name.replace(",", "").replace(" ", "-")


def run(folder: Path, name: str) -> None:
    """Make one run, with the command that a user would type."""
    recipe, settings = RUNS[name]
    where = run_folder(folder, name)
    fixed = [f"cluster.fileroot={folder}", f"experiment_name={where.parent.name}", f"trial_name={where.name}"]
    command = [sys.executable, "-m", f"areno.recipes.{recipe}", *settings, *fixed]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def summary(run_dir: Path) -> tuple[float, float, float, float]:
    """Mean reward of the first step and of the last five, held-out accuracy, and the seconds of all steps."""
    rewards, accuracy, seconds = (read_series(run_dir, name) for name in (REWARD, "eval/accuracy", "time/step"))
    last = list(rewards.values())[-5:]
    return next(iter(rewards.values())), sum(last) / len(last), accuracy[max(accuracy)], sum(seconds.values())


def draw_panel(axes: Axes, name: str, curves: dict[str, dict[int, float]]) -> None:
    """Draw the curve of one run, the mean of its last five steps as a number, and the curve of GRPO in grey."""
    if name != BASE and BASE in curves:
        axes.plot(list(curves[BASE]), list(curves[BASE].values()), color=GREY, linewidth=1.2)
    steps, rewards = list(curves[name]), list(curves[name].values())
    axes.plot(steps, rewards, color=COLOR, linewidth=1.8)
    last = sum(rewards[-5:]) / len(rewards[-5:])
    how = {"textcoords": "offset points", "va": "center", "color": COLOR, "fontsize": 11}
    axes.annotate(f"{last:.2f}", (steps[-1], last), xytext=(4, 0), **how)
    axes.set_title(name, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.grid(alpha=0.25)


def draw_legend(axes: Axes) -> None:
    """Draw the legend into a panel without a curve."""
    axes.set_axis_off()
    for y, color, text in ((0.75, COLOR, "the algorithm"), (0.6, GREY, BASE)):
        axes.plot([0.0, 0.15], [y, y], color=color, linewidth=2.0, transform=axes.transAxes)
        axes.text(0.2, y, text, transform=axes.transAxes, va="center", color=INK, fontsize=11)
    axes.text(0.0, 0.42, "numbers: last 5 steps", transform=axes.transAxes, va="center", color=INK, fontsize=11)


def draw(folder: Path, image: Path) -> None:
    """Draw a panel for each completed run."""
    curves = {name: read_series(run_folder(folder, name), REWARD) for name in present(folder)}
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    width, height = 2.3 * columns + 0.8, 1.9 * rows + 0.9
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.75 / width, right=1 - 0.45 / width, bottom=0.6 / height, top=1 - 0.7 / height, wspace=0.32, hspace=0.35
    )
    panels = grid.flatten()
    longest = max(max(curve) for curve in curves.values())
    panels[0].set(xlim=(0, longest * 1.02), ylim=(0.3, 1.02), yticks=[0.4, 0.6, 0.8, 1.0])
    for axes, name in zip(panels, curves, strict=False):
        draw_panel(axes, name, curves)
    for index, axes in enumerate(panels):
        if index == len(curves):
            draw_legend(axes)
        elif index > len(curves):
            axes.set_axis_off()
        elif index + columns >= len(curves):
            axes.tick_params(labelbottom=True)
    figure.suptitle("Reward on the quickstart, by algorithm", fontsize=14, color=INK, y=1 - 0.15 / height, va="top")
    figure.supxlabel("step", fontsize=12, y=0.1 / height, va="bottom")
    figure.supylabel("mean reward of the step", fontsize=12, x=0.1 / width, ha="left")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=100)
    # Lines need few colours; a palette makes the file a third of the size.
    Image.open(image).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(image, optimize=True)


def present(folder: Path) -> list[str]:
    """Names of the completed runs in this folder."""
    runs = {run.path for run in (list_runs(folder) if folder.is_dir() else []) if run.status() == "completed"}
    return [name for name in RUNS if run_folder(folder, name) in runs]


def table(folder: Path) -> str:
    """The table of results, in Markdown."""
    names = ["run", "mean reward, first step -> last 5 steps", "held-out accuracy", "seconds"]
    lines = [f"| {' | '.join(names)} |", "|---|---|---|---|"]
    for name in present(folder):
        first, last, accuracy, seconds = summary(run_folder(folder, name))
        lines.append(f"| {name} | {first:.2f} -> {last:.2f} | {accuracy:.3f} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "draw"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path, help="where the runs are")
        if name == "draw":
            command.add_argument("image", type=Path, help="PNG file to write")
    args = parser.parse_args()
    if args.command == "run":
        for name in RUNS:
            if name not in present(args.folder):
                run(args.folder, name)
    elif not present(args.folder):
        parser.error(f"there are no runs in {args.folder}; make them with: algorithm_curves.py run {args.folder}")
    else:
        draw(args.folder, args.image)
        print(table(args.folder))


if __name__ == "__main__":
    main()
