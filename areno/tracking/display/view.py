"""Lays out the live display as lines of styled text that fit the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from areno.tracking.display.board import ShownSample, Snapshot, sparkline
from areno.tracking.display.screen import Line
from areno.tracking.reader import duration_text, is_in_critic_warmup, loss_is_meaningful

_TITLE, _VALUE = 26, 9  # cells of the title and of the value of a row
_TWO_COLUMNS = 100  # the least width for two columns, in cells


@dataclass(frozen=True)
class ScalarRow:
    """A row of the display for one scalar. Main rows are at the top."""

    title: str
    name: str
    share: bool = False  # shown in percent
    is_main: bool = False


_ROWS = (
    ScalarRow("reward", "rollout/rewards_mean", is_main=True),
    ScalarRow("loss", "train/loss", is_main=True),
    ScalarRow("evaluation: accuracy", "eval/accuracy", is_main=True),
    ScalarRow("evaluation: reward", "eval/rewards_mean", is_main=True),
    ScalarRow("evaluation: loss", "eval/loss", is_main=True),
    ScalarRow("accuracy", "rollout/accuracy"),
    ScalarRow("accuracy", "train/accuracy"),
    ScalarRow("margin", "train/margin"),
    ScalarRow("response length", "rollout/response_len_mean"),
    ScalarRow("truncated", "rollout/truncated", share=True),
    ScalarRow("groups without difference", "rollout/frac_groups_zero_std", share=True),
    ScalarRow("critic: explained variance", "train/explained_variance"),
    ScalarRow("critic: loss", "train/critic_loss"),
    ScalarRow("KL to the reference", "train/kl_loss"),
    ScalarRow("KL to the reference", "rollout/ref_kl"),
    ScalarRow("KL to the policy before", "train/approx_kl"),
    ScalarRow("entropy", "train/entropy"),
    ScalarRow("rollout against training", "train/logp_abs_diff_mean"),
    ScalarRow("gradient norm", "train/grad_norm"),
    ScalarRow("learning rate", "train/lr"),
    ScalarRow("tokens/s, rollout", "rollout/tokens_per_second"),
    ScalarRow("tokens/s, training", "train/tokens_per_second"),
    ScalarRow("peak memory (GiB)", "train/memory_gib"),
    ScalarRow("host memory, all (GiB)", "train/host_memory_gib"),
)

_PART = "rollout/reward/"  # the beginning of the names of the parts of a reward


def render_lines(look: Snapshot, title: str, width: int, height: int) -> list[Line]:
    """Return fewer lines than `height`, each narrower than `width`, the most important ones first."""
    width -= 1  # after a line of full width, some terminals start another line
    lines = [_horizontal_rule(title, width), *_progress_lines(look, width)]
    if look.n_warnings:
        count = "a warning" if look.n_warnings == 1 else f"{look.n_warnings} warnings, the last"
        lines.append([(_cut_to_width(f" {count}: {look.warning}", width), "yellow")])
    if is_in_critic_warmup(look.trends):
        lines.append([(_cut_to_width(" the critic warms up; the policy is not trained yet", width), "yellow")])
    rows = scalar_rows(look)
    lines += _scalar_lines([row for row in rows if row.is_main], look, width, width - _TITLE - _VALUE - 18)
    lines += _other_scalar_lines([row for row in rows if not row.is_main], look, width)
    del lines[height - 1 :]
    left = height - 1 - len(lines) - 2
    if look.samples and left >= 2:
        each = max(1, min(4, left // len(look.samples)))
        lines += [[], _horizontal_rule(f"samples of step {look.samples_step}", width)]
        for sample in look.samples[:left]:
            lines += _sample_lines(sample, width, each)
    return [_fit_line(line, width) for line in lines]


def scalar_rows(look: Snapshot) -> list[ScalarRow]:
    """Return a row for each scalar that the display knows and the run has recorded.

    If several scalars have the same values, such as accuracy and a reward of 0 or 1, only the first gets a row.
    """
    found: dict[tuple[object, ...], ScalarRow] = {}
    parts = [name for name in look.trends if name.startswith(_PART) and not name.endswith("_std")]
    for row in (*_ROWS, *(ScalarRow(f"reward: {name.removeprefix(_PART)}", name) for name in parts)):
        if row.name in look.trends and (row.name != "train/loss" or loss_is_meaningful(look.trends)):
            course = tuple(look.trends[row.name][1])
            found.setdefault(course if len(set(course)) > 1 else (row.name,), row)
    return list(found.values())


def _progress_lines(look: Snapshot, width: int) -> Iterator[Line]:
    """Draw two lines: the progress of the run, and the current phase with the times of the last step."""
    share = look.step / look.total if look.total else 0.0
    told = [f"step {look.step}/{look.total}", f"{100 * share:3.0f} %", f"{duration_text(look.elapsed)} elapsed"]
    told += [f"{duration_text(look.left)} left"] if look.left is not None else []
    first, *rest = told
    bar = max(0, width - sum(map(len, told)) - 3 * len(told))
    done = round(bar * share)
    bars = ("━" * done, "green"), ("─" * (bar - done), "bright_black")
    yield [(f" {first}  ", "bold"), *bars, (f"  {'   '.join(rest)}", "")]
    phase = look.phase or ("" if look.step else "starting")
    doing = look.note or ", ".join(word for word in (phase, look.work) if word)
    total = look.times.get("step") or 0.0
    times = sorted(((value, name) for name, value in look.times.items() if name != "step"), reverse=True)
    spent = " · ".join(f"{name} {100 * value / total:.0f} %" for value, name in times[:3] if total)
    last = f"last step {total:.3g} s: {spent}" if total else ""
    space = width - 1 - cell_len(doing) - cell_len(last)
    padded_last = " " * space + last if space > 1 else ""
    yield [(f" {_cut_to_width(doing, width - 1)}", "yellow" if look.note else "cyan"), (padded_last, "dim")]


def _scalar_lines(rows: Sequence[ScalarRow], look: Snapshot, width: int, trend: int) -> Iterator[Line]:
    """Draw title, value, sparkline (at most `trend` wide) and, for a main row, the first value."""
    for row in rows:
        value, course = look.trends[row.name]
        text = _cut_to_width(f" {row.title:<{_TITLE}}{_number_text(value, row.share):>{_VALUE}}  ", width)
        line = sparkline(course, max(0, trend))
        if not row.is_main:
            yield [(text, ""), (line, "blue")]
            continue
        first = next((one for one in course if math.isfinite(one)), math.nan)
        began = f"  from {_number_text(first, row.share)}" if len(course) > 1 and trend > 0 else ""
        yield [(text, "bold"), (line, "green"), (began, "dim")]


def _other_scalar_lines(rows: Sequence[ScalarRow], look: Snapshot, width: int) -> Iterator[Line]:
    """Draw the rows that are not main rows, in two columns if the terminal is wide enough."""
    if width < _TWO_COLUMNS:
        yield from _scalar_lines(rows, look, width, width - _TITLE - _VALUE - 4)
        return
    half = width // 2
    lines = list(_scalar_lines(rows, look, half, half - _TITLE - _VALUE - 5))
    middle = -(-len(lines) // 2)
    for at in range(middle):
        left, right = lines[at], lines[middle + at : middle + at + 1]
        space = half - sum(cell_len(text) for text, _ in left)
        yield [*left, (" " * space, ""), *(part for line in right for part in line)]


def _sample_lines(sample: ShownSample, width: int, n_lines: int) -> Iterator[Line]:
    """Draw a sample in at most `n_lines` lines: the end of its prompt and the beginning of its completion."""
    reward = f" {sample.reward:>6}  "
    room = width - len(reward)
    prompt, completion = " ".join(sample.prompt.split()), " ".join(sample.completion.split())
    size = f"  ({sample.n_tokens} tokens)"
    if n_lines == 1 or cell_len(prompt) + cell_len(completion) + len(size) + 4 < room:
        asked = _end_of_text(prompt, room // 2)
        answer = _cut_to_width(completion, room - cell_len(asked) - 3 - len(size))
        yield [(reward, "bold"), (asked, "dim"), (" → ", "dim"), (answer, ""), (size, "dim")]
        return
    yield [(reward, "bold"), (_end_of_text(prompt, room), "dim")]
    for line in range(1, n_lines):
        rest, completion = completion, completion[room:]
        is_last = line == n_lines - 1 or not completion
        shown = _cut_to_width(rest, room - len(size)) if is_last else _cut_to_width(rest[:room], room)
        yield [(" " * len(reward), ""), (shown, ""), (size if is_last else "", "dim")]
        if is_last:
            return


def _horizontal_rule(title: str, width: int) -> Line:
    text = _cut_to_width(f"── {title} ", width)
    return [(text + "─" * (width - cell_len(text)), "bright_black")]


def _fit_line(line: Line, width: int) -> Line:
    kept: list[tuple[str, str]] = []
    for text, style in line:
        kept.append((text if cell_len(text) <= width else set_cell_size(text, width), style))
        width -= cell_len(kept[-1][0])
    return kept


def _cut_to_width(text: str, width: int) -> str:
    """Cut a text to `width` cells, and replace its control characters."""
    width = max(0, width)
    text = "".join(char if char.isprintable() else "·" for char in text[: width + 1])
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"[:width]


def _end_of_text(text: str, width: int) -> str:
    return _cut_to_width(text if len(text) <= width else "…" + text[1 - width :], width)


def _number_text(value: float, share: bool) -> str:
    if share:
        return f"{100 * value:.1f} %"
    return f"{value / 1000:,.1f}k" if abs(value) >= 10_000 else f"{value:.4g}"
