"""Draw the mean reward of runs, or another scalar, against the step.

    python docs/plots.py IMAGE TITLE LABEL=RUN[@SCALAR] ...

    python docs/plots.py reward.png Addition "training=outputs/quickstart/s*" "test=outputs/quickstart/s*@eval/accuracy"

RUN is the folder of a run, or a pattern that matches the folders of one run with several seeds. Each seed is a thin
line and their mean is a thick line. SCALAR is a name in logs/metrics.jsonl, by default the mean reward of the step.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from areno.errors import ArenoError
from areno.tracking.reader import RunReader

REWARD = "rollout/rewards_mean"
COLORS = ["#1f5fa8", "#d9541e", "#3b8c3f", "#7a4fa3", "#444444"]


def read_series(run: Path, metric: str) -> dict[int, float]:
    """Step -> value, for one scalar of one run. Values that are not finite are left out."""
    return {step: value for step, value in zip(*RunReader(run).series(metric), strict=True) if math.isfinite(value)}


def draw(axes: Axes, label: str, runs: list[dict[int, float]], color: str) -> None:
    """Draw a thin line for each run, and the mean of all runs as a thick line, at the steps that all of them have."""
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
        try:
            draw(axes, label, [read_series(run, metric or REWARD) for run in folders], color)
        except ArenoError as error:
            parser.error(str(error))
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
