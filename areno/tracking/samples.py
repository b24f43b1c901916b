"""Samples for people to read: a few in the log (ARENO_LOG_COMPLETIONS), all of them in files.

rollouts/<step>.jsonl has those of training, eval/<step>.jsonl or eval/<set>/<step>.jsonl those of evaluation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areno.errors import ArenoError, ConfigError, Problem
from areno.tracking.tracker import Tracker
from areno.types import ScoredSample

logger = logging.getLogger("areno.rollout")

VARIABLE = "ARENO_LOG_COMPLETIONS"
_SHOWN_CHARS = 1000


class SampleLog(Tracker):
    """Logs the first samples of each step, as many as ARENO_LOG_COMPLETIONS says. ConfigError if that is no number."""

    def __init__(self) -> None:
        text = os.environ.get(VARIABLE, "").strip()
        if text and not text.isdecimal():
            expected = "expected how many samples to log for each step"
            raise ConfigError(f"the environment variable {VARIABLE} is {text!r}; {expected}")
        self._n_samples = int(text or 0)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        for number, sample in enumerate(samples[: self._n_samples]):
            outcome = sample.outcome
            reward = outcome.status if outcome.value is None else f"{outcome.value:g}"
            logger.info(
                "completion step=%d sample=%d reward=%s finish_reason=%s tokens=%d\n  prompt: %s\n  completion: %s",
                step, number, reward, sample.sequence.finish_reason, len(sample.sequence.resp_tokens),
                _short(sample.item.text), _short(sample.completion),
            )  # fmt: skip


class SampleFiles(Tracker):
    """Writes all samples of a step to <folder>/<step>.jsonl, one line each. A file is whole or absent."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        _write(self.folder / f"{step}.jsonl", map(_line, samples), "rollout.dump_to_file", "set it to false")


class EvalFiles(Tracker):
    """Writes all samples of an evaluation set to <folder>/<name>/<step>.jsonl, one line each; whole or absent."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        numbers: Counter[int] = Counter()  # of the samples of each group so far
        lines = []
        for sample in samples:
            lines.append({"step": step, "set": name or None, "sample": numbers[sample.group], **_line(sample)})
            numbers[sample.group] += 1
        _write(self.folder / name / f"{step:06d}.jsonl", lines, "cluster.fileroot", "set another folder")


def _write(path: Path, lines: Iterable[Mapping[str, object]], key: str, advice: str) -> None:
    """Write a file, whole or not at all. An ArenoError names the setting `key` and what to do with it."""
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            for line in lines:
                # What is not JSON in a user's solutions, such as a date of a parquet file, is written as text.
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        unfinished.replace(path)
    except OSError as error:
        text = "{} cannot be written: {}; free space there, or {}"
        raise ArenoError(Problem(key, text, path, error.strerror, advice)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _line(sample: ScoredSample) -> dict[str, object]:
    parts = sample.outcome.parts
    return {
        "row": sample.item.index,
        "prompt": sample.item.text,
        "completion": sample.completion,
        "reward": sample.outcome.value,
        **({"reward_parts": dict(parts)} if parts else {}),
        "status": sample.outcome.status,
        "message": sample.outcome.message,
        "solutions": sample.item.solutions,
        "prompt_tokens": len(sample.item.tokens),
        "response_tokens": len(sample.sequence.resp_tokens),
        "finish_reason": sample.sequence.finish_reason,
    }


def _short(text: str) -> str:
    text = repr(text)[1:-1]
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"
