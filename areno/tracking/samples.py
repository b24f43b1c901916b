"""Trackers that write samples in a readable form, to the log (ARENO_LOG_COMPLETIONS) and to files.

Samples from training are in rollouts/<step>.jsonl. Samples from evaluations are in eval/<step>.jsonl or, with several
validation sets, in eval/<set>/<step>.jsonl. A file appears only when it is complete.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areno.errors import ArenoError, ConfigError, Problem
from areno.files.durable import BackgroundCall
from areno.tracking.tracker import END_OF_STEP, Tracker
from areno.types import PromptItem, ScoredSample, Trajectory

logger = logging.getLogger("areno.rollout")

VARIABLE = "ARENO_LOG_COMPLETIONS"
_SHOWN_CHARS = 1000
_SHOWN_TOKENS = 64
_TASK_CHARS = 500


class SampleLog(Tracker):
    """Logs the first samples of each step: ARENO_LOG_COMPLETIONS says how many (default 0)."""

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
                "completion step=%d sample=%d reward=%s finish_reason=%s tokens=%d\n  prompt: %s\n  completion: %s%s",
                step,
                number,
                reward,
                sample.sequence.finish_reason,
                sample.sequence.n_tokens,
                _shorten_text(sample.item.text),
                _shorten_text(sample.completion),
                "" if sample.trajectory is None else _trajectory_text(sample.trajectory),
            )


class SampleFiles(Tracker):
    """Writes at most `most` samples of each training step, see `select_samples`. None writes all.

    A thread writes the file of a step while the models are trained, and the end of the step waits for the thread.
    """

    def __init__(self, folder: str | Path, most: int | None, token_text: Callable[[int], str]):
        self.folder, self._most = Path(folder), most
        self._encoder = _SampleEncoder(token_text)
        self._writer = BackgroundCall("areno-samples")
        self._step, self._samples, self._order = 0, list[ScoredSample](), list[int]()

    def samples(self, step: int, samples: Sequence[ScoredSample]) -> None:
        self._step, self._samples, self._order = step, list(samples), list(range(len(samples)))
        if self._most is not None:
            kept = select_samples([sample.group for sample in samples], self._most, step)
            self._order = list(itertools.compress(self._order, kept))
        self._writer.start(self._write, step, self._samples, list(self._order))

    def numbers_of(self, step: int, indices: Sequence[int]) -> list[int]:
        """Return the numbers in the file of samples of the latest step. Those that it lacks are added at its end.

        Empty if the samples of the step have not been given.
        """
        if step != self._step:
            return []
        if missing := [index for index in indices if index not in self._order]:
            self._order += missing
            self._writer.wait()
            self._write(step, self._samples, self._order)
        return [self._order.index(index) for index in indices]

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if END_OF_STEP in scalars:
            self._writer.wait()

    def finish(self) -> None:
        self._writer.close()

    def _write(self, step: int, samples: Sequence[ScoredSample], order: Sequence[int]) -> None:
        key, advice = "rollout.dump_n_samples", "set it to 0"
        if self._most is None:
            key, advice = "rollout.dump_to_file", "set it to false"
        lines = self._encoder.encode(samples, {"step": step}, order)
        _write_json_lines(self.folder / f"{step:06d}.jsonl", lines, key, advice)


class EvalSampleFiles(Tracker):
    def __init__(self, folder: str | Path, token_text: Callable[[int], str]):
        self.folder, self._encoder = Path(folder), _SampleEncoder(token_text)

    def eval_samples(self, step: int, samples: Sequence[ScoredSample], name: str) -> None:
        lines = self._encoder.encode(samples, {"step": step, "set": name or None})
        _write_json_lines(self.folder / name / f"{step:06d}.jsonl", lines, "cluster.fileroot", "set another folder")


def select_samples(groups: Sequence[int], most: int, step: int) -> list[bool]:
    """Choose whole groups at random, with at most `most` samples in all. Return a flag for each sample.

    `groups` has the group of each sample; samples of the same prompt are a group. If the first group that is drawn is
    larger than `most`, only its first samples are chosen. `step` is the seed, so that a step always has the same
    samples.
    """
    sizes = Counter(groups)
    order = list(sizes)
    random.Random(step).shuffle(order)
    left: dict[int, int] = {}
    for group in order:
        if sizes[group] <= most or not left:
            left[group] = min(sizes[group], most)
            most -= left[group]
    kept = []
    for group in groups:
        kept.append(left.get(group, 0) > 0)
        left[group] = left.get(group, 0) - 1
    return kept


def _write_json_lines(path: Path, lines: Iterable[Mapping[str, object]], key: str, advice: str) -> None:
    """Write JSON lines to a temporary file and rename it. Errors name the setting `key` and give `advice`."""
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            for line in lines:
                # A user's solutions may hold values that JSON lacks, such as dates. They are written as text.
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        unfinished.replace(path)
    except OSError as error:
        text = "{} cannot be written: {}; free space there, or {}"
        raise ArenoError(Problem(key, text, path, error.strerror, advice)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _trajectory_text(trajectory: Trajectory) -> str:
    said = {
        "messages": _shorten_text(json.dumps(trajectory.messages, ensure_ascii=False, default=str)),
        "final answer": _shorten_text(str(trajectory.messages[-1].get("content") or "")),
        "tool calls": _shorten_text(json.dumps(trajectory.tool_calls, ensure_ascii=False)),
        "tool results": _shorten_text(json.dumps(trajectory.tool_results, ensure_ascii=False, default=str)),
    }
    for number, row in enumerate(trajectory.rows):
        name = "tokens" if len(trajectory.rows) == 1 else f"tokens of row {number}"
        said[name] = f"{row.tokens[:_SHOWN_TOKENS]} of {len(row)}"
        said["trained" if number == 0 else f"trained of row {number}"] = (
            f"{int(row.trained.sum())} of {len(row)}, {int(row.sampled.sum())} sampled; "
            f"runs {_run_lengths(row.trained)}"
        )
    return "".join(f"\n  {name}: {text}" for name, text in said.items())


def _run_lengths(values: np.ndarray) -> list[tuple[int | float, int]]:
    plain = values if values.dtype.kind == "f" else values.astype(np.int64)
    edges = [*(np.flatnonzero(np.diff(plain)) + 1).tolist(), len(plain)] if len(plain) else []
    return [(plain[start].item(), end - start) for start, end in itertools.pairwise([0, *edges])]


def _replay_fields(trajectory: Trajectory, advantages: np.ndarray | None) -> dict[str, object]:
    """Return a trajectory as JSON values, from which its training rows can be rebuilt without a model.

    `advantages` are those of its trained tokens.
    """
    rows: list[dict[str, object]] = [
        {
            "tokens": row.tokens,
            "sources": _run_lengths(row.sources),
            "trained": _run_lengths(row.trained),
            "turns": _run_lengths(row.turns),
            "logprobs": [round(float(value), 6) for value in row.logprobs[row.sampled]],
            "versions": _run_lengths(row.versions[row.sampled]),
        }
        for row in trajectory.rows
    ]
    ends = np.cumsum([row.trained.sum() for row in trajectory.rows])
    if advantages is not None and len(advantages) == ends[-1] and _differ(advantages):
        for row, of_row in zip(rows, np.split(np.round(advantages, 6), ends[:-1]), strict=True):
            row["advantages"] = _run_lengths(of_row)
    return {"turns": trajectory.turns, "rows": rows}


def _differ(values: np.ndarray) -> bool:
    return len(values) > 0 and bool(np.ptp(values) > 0)


class _SampleEncoder:
    """Converts samples to dictionaries for JSON lines, and caches the text of each token id."""

    def __init__(self, token_text: Callable[[int], str]):
        self._token_text, self._texts = token_text, dict[int, str]()

    def encode(
        self, samples: Sequence[ScoredSample], first: Mapping[str, object], order: Sequence[int] | None = None
    ) -> Iterator[dict[str, object]]:
        """Yield a dictionary for each sample, with the fields of `first` first. `order` has the indices of samples."""
        counts: Counter[int] = Counter()  # group -> samples so far
        numbers = []
        for sample in samples:
            numbers.append(counts[sample.group])
            counts[sample.group] += 1
        for index in range(len(samples)) if order is None else order:
            sample = samples[index]
            yield {
                **first,
                "group": sample.group,
                "sample": numbers[index],
                **_sample_fields(sample),
                **self._token_fields(sample),
            }

    def _token_fields(self, sample: ScoredSample) -> dict[str, object]:
        """Return the fields with a value for each token. Agents' samples have them in each row of the trajectory."""
        if sample.trajectory is not None:
            return {"trajectory": _replay_fields(sample.trajectory, sample.advantages)}
        tokens, texts = sample.sequence.resp_tokens, self._texts
        for token in set(tokens).difference(texts):
            texts[token] = self._token_text(token)
        found: dict[str, object] = {
            "prompt_token_ids": sample.item.tokens,
            "token_ids": tokens,
            "tokens": [texts[token] for token in tokens],
            "logprobs": _rounded(sample.sequence.resp_logprobs),
            "versions": _run_lengths(np.asarray(sample.sequence.resp_versions)),
        }
        if sample.train_logprobs is not None:
            found["train_logprobs"] = [None if value != value else value for value in _rounded(sample.train_logprobs)]
        if sample.advantages is not None and _differ(sample.advantages):
            found["token_advantages"] = _rounded(sample.advantages)
        return found


def _rounded(values: Any) -> list[float]:
    """Round to four decimals, which halves the size of the file and is still more precise than bfloat16."""
    return np.round(np.asarray(values, dtype=np.float64), 4).tolist()


def _sample_fields(sample: ScoredSample) -> dict[str, object]:
    parts, advantages = sample.outcome.parts, sample.advantages
    return {
        **({"source": sample.item.source} if sample.item.source else {}),
        "row": sample.item.index,
        **({"task": task} if (task := _task_text(sample.item)) else {}),
        "prompt": sample.item.text,
        "completion": sample.completion,
        "reward": sample.outcome.value,
        **({"parts": dict(parts)} if parts else {}),
        **(
            {}
            if advantages is None
            else {"advantage": round(float(np.mean(advantages)), 6) if len(advantages) else 0.0}
        ),
        "status": sample.outcome.status,
        "message": sample.outcome.message,
        "solutions": sample.item.solutions,
        **({"teacher": sample.teacher} if sample.teacher else {}),
        "prompt_tokens": len(sample.item.tokens),
        "response_tokens": sample.sequence.n_tokens,
        "finish_reason": sample.sequence.finish_reason,
    }


def _task_text(item: PromptItem) -> str:
    """Return the beginning of the last user message, else of the prompt. "" if that text equals `item.text`."""
    asked = [message.get("content") for message in item.messages or () if message.get("role") == "user"]
    text = asked[-1] if asked else item.prompt
    return text[:_TASK_CHARS] if isinstance(text, str) and text != item.text else ""


def _shorten_text(text: str) -> str:
    text = repr(text)[1:-1]
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"
