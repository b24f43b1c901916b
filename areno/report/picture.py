"""An SVG picture of reward curves, for commands that write a picture without a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#1f5fa8", "#c8501e", "#2e7d4f", "#7a3f9d")
_LEFT, _TOP, _WIDTH, _HEIGHT = 50, 40, 700, 300


def svg(title: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture of up to four curves by name. A thick line shows each curve's mean over nine steps."""
    most_x, most_y = max(steps), max(0.1, *(value for values in curves.values() for value in values))

    def points(values: Sequence[float]) -> str:
        return " ".join(
            f"{_LEFT + _WIDTH * step / most_x:.1f},{_TOP + _HEIGHT * (1 - value / most_y):.1f}"
            for step, value in zip(steps, values, strict=True)
        )

    view = f"0 0 {_WIDTH + 80} {_HEIGHT + 90}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">{escape(title)}</text>',
        *_axes(most_x, most_y),
    ]
    for number, (name, values) in enumerate(curves.items()):
        colour, y = _COLOURS[number], _TOP + 16 + 18 * number
        lines.append(f'<polyline points="{points(values)}" fill="none" stroke="{colour}" stroke-opacity="0.35"/>')
        smooth = points(smoothed(values))
        lines.append(f'<polyline points="{smooth}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        if name:
            lines.append(f'<text x="{_LEFT + 10}" y="{y}" font-size="13" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axes(most_x: float, most_y: float) -> list[str]:
    lines = []
    for part in range(5):
        y, value = _TOP + _HEIGHT * (1 - part / 4), most_y * part / 4
        lines.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" font-size="12" text-anchor="end">{value:.2f}</text>')
        x = _LEFT + _WIDTH * part / 4
        number = most_x * part // 4
        lines.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 18}" font-size="12" text-anchor="middle">{number}</text>')
    x, y = _LEFT + _WIDTH / 2, _TOP + _HEIGHT + 40
    return [*lines, f'<text x="{x}" y="{y}" font-size="13" text-anchor="middle">step</text>']


def smoothed(values: Sequence[float], reach: int = 4) -> list[float]:
    """Return the mean of each value with up to `reach` neighbours on each side."""
    windows = (values[max(0, index - reach) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]
