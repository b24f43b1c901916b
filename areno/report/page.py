"""Write the report of runs: one HTML page that needs no network and no other file.

`page_contents` collects the data of the page, `render_page` makes the HTML, and `write_report` does both and writes the
file.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.errors import ArenoError
from areno.files.durable import atomic_write_text
from areno.report.curves import Chart, charts_by_heading, is_count, unit_of
from areno.report.verdict import differences, run_names, settings_with_current_names, verdict
from areno.schema.values import flatten_settings
from areno.tracking.reader import (
    NAMES,
    RunReader,
    Series,
    duration_text,
    headlines,
    last_step,
    loss_is_meaningful,
    run_seconds,
)
from areno.version import __version__

SAMPLE_BYTES = 8 * 2**20  # of all compressed samples in the page
_ROUNDING = 1e-6  # largest absolute value of a loss that is 0 by construction
MAX_STEPS = 2_000  # whose samples are read
SHOWN_CHARS = 120  # of prompt and completion in the table of samples
_TOKEN_VALUES = ("tokens", "logprobs", "train_logprobs", "token_advantages")
_INDEX = ("reward", "advantage", "response_tokens", "finish_reason", "status")


def page_contents(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Collect all data that the page shows.

    The compressed samples of all runs take at most SAMPLE_BYTES. "headlines" has, for each main scalar and each run,
    [first value, best value, last value, step of the best value] or None. "constant" has the scalars that have no chart
    because they never change in any run. "differences" has the settings, algorithms and scripts that differ.
    """
    names = run_names(runs)
    metrics = [run.curves() for run in runs]
    shown, constant = _charts_and_constants(metrics)
    described = []
    for name, run, of_run in zip(names, runs, metrics, strict=True):
        series = {key: _json_series(found.steps, found.values) for key, found in of_run.items()}
        described.append(
            {
                "name": name,
                "path": str(run.path),
                "status": run.status(),
                "steps": last_step(run),
                "duration": duration_text(run_seconds(run)),
                "versions": run.versions,
                "settings": flatten_settings(settings_with_current_names(run)),
                "overrides": run.overrides,
                "series": series,
                "forecast": run.forecast(),
                "check": run.check(),
                "samples": packed_samples(run, SAMPLE_BYTES // len(runs)),
            }
        )
    return {
        "title": _title(runs),
        "runs": described,
        "verdict": verdict(runs, names, metrics),
        "headlines": _headlines(metrics),
        "charts": {
            heading: [vars(chart) | {"unit": chart.unit, "counts": chart.shows_counts} for chart in of]
            for heading, of in shown.items()
        },
        "constant": constant,
        "differences": differences(runs) if len(runs) > 1 else {},
    }


def _title(runs: Sequence[RunReader]) -> str:
    """Return `experiment/trial` of the run or sweep, and the number of runs if there are several."""
    folders = {run.sweep or run.path for run in runs}
    of = "/".join(folders.pop().absolute().parts[-2:]) if len(folders) == 1 else ""
    several = f"{len(runs)} runs" if len(runs) > 1 else ""
    return ", ".join(filter(None, (of, several)))


def _charts_and_constants(metrics: Sequence[Mapping[str, Series]]) -> tuple[dict[str, list[Chart]], dict[str, float]]:
    """Return heading -> charts, and the constant scalars without a chart: name -> value.

    A scalar is constant if it has the same value in all steps of all runs. It still appears in a predefined chart.
    The loss of a policy also counts as constant if it is 0 up to rounding.
    """
    values: dict[str, list[float]] = {}
    for of_run in metrics:
        for name, series in of_run.items():
            values.setdefault(name, []).extend(series.values)
    constant = {name: of[0] for name, of in sorted(values.items()) if len(of) > 1 and all(one == of[0] for one in of)}
    if not loss_is_meaningful(values) and all(abs(value) < _ROUNDING for value in values.get("train/loss", [1.0])):
        constant["train/loss"] = 0.0
        del values["train/loss"]
    shown = charts_by_heading(values, len(metrics))
    if more := [chart for chart in shown.pop("More", []) if chart.title not in constant]:
        shown["More"] = more
    charted = {name for of in shown.values() for chart in of for name in chart.names}
    return shown, {name: value for name, value in constant.items() if name not in charted}


def _headlines(metrics: Sequence[Mapping[str, Series]]) -> list[dict[str, Any]]:
    """Return the "headlines" of `page_contents`, for each main scalar that a run has recorded."""
    found = [headlines(of_run) for of_run in metrics]
    rows = []
    for name, (title, _) in NAMES.items():
        lines = [of_run.get(name) for of_run in found]
        if any(lines):
            values = [line and [line.first, line.best, line.last, line.step] for line in lines]
            unit = unit_of(name)
            rows.append({"name": name, "title": title, "unit": unit, "counts": is_count(unit), "runs": values})
    return rows


def _json_series(steps: Sequence[int], values: Sequence[float]) -> list[list[Any]]:
    return [list(steps), [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]]


def packed_samples(run: RunReader, most_bytes: int) -> dict[str, Any]:
    """Return the samples of a run as gzipped JSON in base64, in at most `most_bytes`.

    For a long run, about MAX_STEPS evenly spaced steps are read. If their samples do not fit, the per-token values are
    left out first, then whole steps at even distances. The first and the last step always stay. "index" has a row for
    each sample, for the table of samples. "left_out" is a sentence about what did not fit.
    """
    all_steps = run.sampled_steps()
    if not all_steps:
        return {"index": "", "steps": {}, "left_out": ""}
    steps = [*all_steps[: -1 : -(-len(all_steps) // MAX_STEPS)], all_steps[-1]]
    index, sizes, slim = [], {}, {}
    packed: dict[int, str] = {}
    for step in steps:
        samples = [without_nan(sample) for sample in run.samples(step)]
        index += [_index_row(step, number, sample) for number, sample in enumerate(samples)]
        packed[step] = to_gzip_base64_json(samples)
        bare = [{name: value for name, value in sample.items() if name not in _TOKEN_VALUES} for sample in samples]
        slim[step] = to_gzip_base64_json(bare) if bare != samples else packed[step]
        sizes[step] = len(slim[step])
    left = most_bytes - len(to_gzip_base64_json(index))
    full = sum(map(len, packed.values())) <= left
    kept = detailed = steps
    if not full:
        kept = _evenly_spaced_steps(steps, sizes, left)
        detailed = _evenly_spaced_steps(
            kept, {step: len(packed[step]) - sizes[step] for step in kept}, left - _total_bytes(sizes, kept)
        )
        packed = {step: packed[step] if step in detailed else slim[step] for step in kept}
    left_out = ""
    if not full or steps != all_steps:
        left_out = f"{len(all_steps) - len(kept)} of {len(all_steps)} steps are without samples"
        left_out += f" and {len(kept) - len(detailed)} without the values of single tokens, to keep this page small"
    shown = set(packed)
    return {
        "index": to_gzip_base64_json([line for line in index if line[0] in shown]),
        "steps": packed,
        "left_out": left_out,
    }


def _total_bytes(sizes: Mapping[int, int], steps: Sequence[int]) -> int:
    return sum(sizes[step] for step in steps)


def _evenly_spaced_steps(steps: Sequence[int], sizes: Mapping[int, int], most_bytes: int) -> list[int]:
    """Choose as many evenly spaced steps as fit, always with the first and the last step. [] if not even these fit."""
    for stride in range(1, len(steps) + 1):
        kept = [*steps[:-1:stride], steps[-1]]
        if _total_bytes(sizes, kept) <= most_bytes:
            return kept
    return []


def _index_row(step: int, number: int, sample: Mapping[str, Any]) -> list[Any]:
    """Return the values that the table of samples shows for one sample.

    If the sample has no task, the end of its prompt is shown, because few-shot examples come before the question.
    """
    task = task_of(sample)
    return [
        step,
        number,
        sample.get("group", sample.get("row")),
        *(sample.get(name) for name in _INDEX),
        task[:SHOWN_CHARS] if task else str(sample.get("prompt") or "")[-SHOWN_CHARS:],
        str(sample.get("completion") or "")[:SHOWN_CHARS],
    ]


def task_of(sample: Mapping[str, Any]) -> str:
    """Return the task of a recorded sample: the first user message of an agent, else the field `task`."""
    try:
        messages = sample["trajectory"]["turns"][0]["messages"]
        content = next(message["content"] for message in messages if message["role"] == "user")
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        return "\n".join(parts)
    except (
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        StopIteration,
    ):  # not an agent's sample, or written by another program
        return str(sample.get("task") or "")


def without_nan(value: Any) -> Any:
    """Return a copy of a JSON value with None in place of NaN and infinities, which JSON does not allow."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(one) for name, one in value.items()}
    return [without_nan(one) for one in value] if isinstance(value, list) else value


def to_gzip_base64_json(value: Any) -> str:
    """Return a value as gzipped JSON in base64. The page unpacks it with the browser's DecompressionStream."""
    return _gzip_base64(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


def _gzip_base64(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


_STATIC = Path(__file__).with_name("static")
_SCRIPTS = ("elements", "summary", "curves", "samples", "settings", "printing", "page")


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of runs to an HTML file, and return its path. An existing file is replaced."""
    if not runs:
        raise ArenoError("a report needs the folder of at least one run")
    page = render_page(page_contents([RunReader(run) for run in dict.fromkeys(map(str, runs))]))
    page = page.encode("utf-8", "replace").decode()  # names and texts may hold lone surrogates
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
            path.write_text(page, encoding="utf-8")
        else:
            atomic_write_text(path.resolve(), page)
    except OSError as error:
        raise ArenoError("{} cannot be written: {}", path, error.strerror) from error
    return path


def render_page(data: dict[str, Any]) -> str:
    names = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "TITLE": html.escape(f"areno: {names}"),
        "STYLE": _static_file("page.css"),
        "PLOTLY": _gzip_base64(_plotly_source()),
        "DATA": _script_json(without_nan({**data, "areno": __version__})),
        "SCRIPT": "".join(_static_file(f"{name}.js") for name in _SCRIPTS),
    }
    page = _static_file("page.html")
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)
    return page


def _script_json(value: Any) -> str:
    """Return a value as JSON for a script element. "<" is escaped, so that no text can end the element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).replace("<", "\\u003c")


def _static_file(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _plotly_source() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ArenoError("the curves of a report need plotly; install it by pip install 'areno[report]'") from error
    return get_plotlyjs()
