"""Draw the reward of runs, or another of their scalars, against the step.

    python docs/plots.py IMAGE TITLE LABEL=RUN[@SCALAR] ...

    python docs/plots.py reward.png Addition "training=outputs/quickstart/s*" "test=outputs/quickstart/s*@eval/accuracy"

RUN is the folder of a run, or a pattern for the folders of the same run with several seeds: each seed becomes a thin
line and their mean a thick one. SCALAR is a name in logs/metrics.jsonl, by default the mean reward of the step.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

REWARD = "rollout/rewards_mean"
COLORS = ["#1f5fa8", "#d9541e", "#3b8c3f", "#7a4fa3", "#444444"]


def read_series(run: Path, metric: str) -> dict[int, float]:
    """Step -> value of a scalar of one run."""
    lines = (run / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row[metric] for row in map(json.loads, lines) if row.get(metric) is not None}


def draw(axes: Axes, label: str, runs: list[dict[int, float]], color: str) -> None:
    """One thin line for each run; their mean, over the steps that all of them have, as a thick one."""
    if len(runs) > 1:
        for run in runs:
            axes.plot(list(run), list(run.values()), color=color, linewidth=0.8, alpha=0.4)
        label = f"{label}, mean of {len(runs)} seeds"
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    means = [sum(run[step] for run in runs) / len(runs) for step in steps]
    axes.plot(steps, means, color=color, linewidth=2.2, label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", help="PNG file to write")
    parser.add_argument("title")
    parser.add_argument("curves", nargs="+", metavar="LABEL=RUN[@SCALAR]")
    parser.add_argument("--ylabel", default="mean reward of the step")
    args = parser.parse_args()

    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for text, color in zip(args.curves, itertools.cycle(COLORS), strict=False):
        label, _, source = text.partition("=")
        pattern, _, metric = source.partition("@")
        folders = [Path(folder) for folder in sorted(glob.glob(pattern))]
        if not folders:
            parser.error(f"there is no run {pattern!r}; expected LABEL=RUN or LABEL=RUN@SCALAR")
        draw(axes, label, [read_series(run, metric or REWARD) for run in folders], color)
    axes.set(title=args.title, xlabel="step", ylabel=args.ylabel)
    axes.set_xlim(left=0)
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    Path(args.image).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.image, dpi=100)
    # Lines need few colours; a palette makes the file a third of the size.
    Image.open(args.image).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(args.image, optimize=True)


if __name__ == "__main__":
    main()
