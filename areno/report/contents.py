"""What a report shows of its runs, as plain data for the page."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from areno.config.schema.values import flat
from areno.report.curves import charts, thinned
from areno.report.differences import differing, run_names
from areno.tracking.headlines import NAMES, headlines, last_step
from areno.tracking.reader import RunReader, Series

SAMPLE_BYTES = 8 * 2**20  # of all samples in the page, compressed
SHOWN_CHARS = 80  # of prompt and completion in the table of samples
_TOKEN_VALUES = ("tokens", "logprobs", "train_logprobs", "token_advantages")
_INDEX = ("reward", "advantage", "response_tokens", "finish_reason", "status")


def contents(runs: Sequence[RunReader], sample_bytes: int = SAMPLE_BYTES) -> dict[str, Any]:
    """Everything that the page shows. sample_bytes: how much of the page the samples may be, compressed and encoded.

    {"runs": [{"name", "path", "status", "steps", "versions", "settings", "overrides", "series", "samples"}],
    "headlines": [[title, number of the run, first, best, last]], "charts": {heading: [{"title", "names", "stacked"}]},
    "differences": {key: [value of each run]}}
    """
    names = run_names(runs)
    metrics = [run.metrics() for run in runs]
    shown = charts(name for of_run in metrics for name in of_run)
    described = []
    for name, run, of_run in zip(names, runs, metrics, strict=True):
        series = {key: _pair(*thinned(found.steps, found.values)) for key, found in of_run.items()}
        described.append(
            {
                "name": name,
                "path": str(run.path),
                "status": run.status(),
                "steps": last_step(of_run),
                "versions": run.versions,
                "settings": flat(run.config),
                "overrides": run.overrides,
                "series": series,
                "samples": packed_samples(run, sample_bytes // len(runs)),
            }
        )
    return {
        "runs": described,
        "headlines": _headlines(metrics),
        "charts": {heading: [vars(chart) for chart in of] for heading, of in shown.items()},
        "differences": differing([run.config for run in runs]) if len(runs) > 1 else {},
    }


def _headlines(metrics: Sequence[Mapping[str, Series]]) -> list[list[Any]]:
    found = [headlines(of_run) for of_run in metrics]
    return [
        [title, number, *of_run[name][1:4]]
        for name, (title, _) in NAMES.items()
        for number, of_run in enumerate(found)
        if name in of_run
    ]


def _pair(steps: Sequence[int], values: Sequence[float]) -> list[list[Any]]:
    return [list(steps), [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]]


def packed_samples(run: RunReader, most_bytes: int) -> dict[str, Any]:
    """The samples of a run: an index of all and, step by step, each in full, gzipped and in base64.

    {"index": text, "steps": {step: text}, "left_out": what did not fit in most_bytes, in words; "" if all did}.
    The values of single tokens are left out first, then whole steps, evenly, but never the first and the last.
    """
    steps = run.sampled_steps()
    if not steps:
        return {"index": "", "steps": {}, "left_out": ""}
    index, sizes, slim = [], {}, {}
    packed: dict[int, str] = {}
    for step in steps:
        samples = [without_nan(sample) for sample in run.samples(step)]
        index += [_index_line(step, number, sample) for number, sample in enumerate(samples)]
        packed[step] = pack(samples)
        bare = [{name: value for name, value in sample.items() if name not in _TOKEN_VALUES} for sample in samples]
        slim[step] = pack(bare) if bare != samples else packed[step]
        sizes[step] = len(slim[step])
    left = most_bytes - len(pack(index))
    full = sum(map(len, packed.values())) <= left
    told = ""
    if not full:
        kept = _evenly(steps, sizes, left)
        detailed = _evenly(kept, {step: len(packed[step]) - sizes[step] for step in kept}, left - _total(sizes, kept))
        packed = {step: packed[step] if step in detailed else slim[step] for step in kept}
        told = f"{len(steps) - len(kept)} of {len(steps)} steps are without samples"
        told += f" and {len(kept) - len(detailed)} without the values of single tokens, to keep this page small"
    shown = set(packed)
    return {"index": pack([line for line in index if line[0] in shown]), "steps": packed, "left_out": told}


def _total(sizes: Mapping[int, int], steps: Sequence[int]) -> int:
    return sum(sizes[step] for step in steps)


def _evenly(steps: Sequence[int], sizes: Mapping[int, int], most_bytes: int) -> list[int]:
    """As many of the steps as fit, at equal distances, with the first and the last."""
    for stride in range(1, len(steps) + 1):
        kept = [*steps[:-1:stride], steps[-1]]
        if _total(sizes, kept) <= most_bytes:
            return kept
    return []


def _index_line(step: int, number: int, sample: Mapping[str, Any]) -> list[Any]:
    """step, number in the step, the group, the values of _INDEX, and the beginnings of prompt and completion."""
    texts = (str(sample.get(name) or "") for name in ("prompt", "completion"))
    return [
        step,
        number,
        sample.get("group", sample.get("row")),
        *(sample.get(name) for name in _INDEX),
        *(text[-SHOWN_CHARS:] if name == 0 else text[:SHOWN_CHARS] for name, text in enumerate(texts)),
    ]


def without_nan(value: Any) -> Any:
    """JSON of other programs knows no NaN: null stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(one) for name, one in value.items()}
    return [without_nan(one) for one in value] if isinstance(value, list) else value


def pack(value: Any) -> str:
    """JSON, gzipped, in base64. The page unpacks it with the browser's own DecompressionStream."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()
