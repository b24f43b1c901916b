"""The command `areno reward`, which tries reward functions on recorded samples."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.errors import ArenoError, ConfigError, DataError, Key, Problem, keys_renamed
from areno.report.terminal import print_tables

if TYPE_CHECKING:
    from areno.config.judge import JudgeConfig
    from areno.tracking.reader import RunReader
    from areno.types import RewardOutcome, RewardRecord

_FLAGS = {
    "reward.fn": "FUNCTION",
    "reward.weights": "--weights",
    "reward.workers": "--workers",
    "reward.timeout_s": "--timeout-s",
}
_SHOWN_ERRORS = 3
_ABOUT = """\
Scores recorded samples as a run would, in reward processes with their time limit, and prints the rewards.

  areno reward reward.py --data samples.jsonl
  areno reward math format --weights 1 0.2 --data outputs/prompts/TRIAL --step 50
  areno reward length reward.length.max_tokens=64 --data samples.jsonl
  areno reward reward.judge.base_url=http://localhost:8000/v1 reward.judge.model=NAME --data samples.jsonl

The samples are those that a run has kept, or rows with the fields prompt and completion, and what the function
reads beside them, such as solutions. Exit code 1 says that some samples could not be scored."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = _ABOUT, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "functions",
        nargs="+",
        metavar="FUNCTION",
        help="file.py, file.py:function or the name of a built-in reward; "
        "settings such as reward.code.partial=true may follow",
    )
    add(
        "--data",
        required=True,
        metavar="PATH",
        help="file with samples (jsonl, json, parquet or csv), or the folder of a run",
    )
    add(
        "--step",
        type=int,
        help="step of the run whose samples are scored (default: the last step with recorded samples)",
    )
    add(
        "--weights",
        nargs="+",
        type=float,
        metavar="W",
        help="weights of the functions in their sum (default: 1 for all)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer that counts tokens for the reward length, if the samples have no tokens",
    )
    add("--limit", type=int, metavar="N", help="score the first N samples only")
    add("--show", type=int, default=20, metavar="N", help="number of samples in the table (default: 20)")
    add("--workers", type=int, help="number of processes that call the functions (default: 2)")
    add("--timeout-s", type=float, help="time limit of the functions for one sample in seconds (default: 30)")


def run(arguments: argparse.Namespace) -> int:
    with keys_renamed(_FLAGS.get):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from areno.report.tables import agreement_lines, samples_table, summary_table
    from areno.scoring.pool import RewardPool
    from areno.tracking.run_log import RunLog

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(Problem("--limit", f"is {arguments.limit}; at least 1 is expected"))
    config = _reward_config(arguments)
    rows = _rows_to_score(arguments.data, arguments.step)[: arguments.limit]
    records = [_reward_record(row, f"{arguments.data}, sample {number}") for number, row in enumerate(rows)]
    if arguments.tokenizer is not None:
        _count_tokens(records, arguments.tokenizer)
    outcomes, seconds, how = None, 0.0, ""
    with RunLog(own_process=True):
        if config.fn is not None:
            with RewardPool(config, tracebacks=True) as pool:
                pool.wait_ready()
                started = time.monotonic()
                outcomes = pool.compute_outcomes(records)
                seconds, how = time.monotonic() - started, f", with {pool.n_workers} processes"
        if config.judge.is_set:
            outcomes, judging_s = _with_judge_scores(config.judge, records, outcomes)
            seconds += judging_s
    assert outcomes is not None
    print_tables(samples_table(rows, records, outcomes, arguments.show))
    if len(rows) > arguments.show:
        print(f"and {len(rows) - arguments.show} samples more (--show)")
    print_tables(summary_table(outcomes))
    print(*agreement_lines(rows, outcomes), sep="\n")
    each = 1000 * seconds / len(records)
    print(f"{len(records)} samples in {seconds:.2f} s: {each:.1f} ms for each{how}")
    return _print_errors(outcomes)


def _with_judge_scores(
    judge: JudgeConfig, records: Sequence[RewardRecord], outcomes: list[RewardOutcome] | None
) -> tuple[list[RewardOutcome], float]:
    """Add a judge's scores to the rewards, if there are any. Return (rewards, seconds). Equal prompts form a group."""
    from areno.scoring.judge import JudgeTask, Judging, add_judge_scores
    from areno.scoring.judge_readers import EndpointJudge

    groups: dict[str, list[int]] = {}  # prompt -> its samples
    for index, record in enumerate(records):
        groups.setdefault(str(record.record["prompt"]), []).append(index)
    tasks = [JudgeTask(groups[str(prompt)], prompt) for prompt in (record.record["prompt"] for record in records)]
    with EndpointJudge(judge) as reader, Judging(judge, reader, tasks.__getitem__) as judging:
        started = time.monotonic()
        judging.add(dict(enumerate(records)))
        found = judging.collect_outcomes()
        seconds = time.monotonic() - started
    return add_judge_scores(records, outcomes, [found[index] for index in range(len(records))], judge.weight), seconds


def _reward_config(arguments: argparse.Namespace) -> Any:
    from areno.config.reward import RewardOnlyConfig
    from areno.launch.hints import setting_hint
    from areno.schema.build import build

    functions = [word for word in arguments.functions if not word.startswith("reward.") or "=" not in word]
    given = {"weights": arguments.weights, "workers": arguments.workers, "timeout_s": arguments.timeout_s}
    given = {name: value for name, value in given.items() if value is not None}
    settings = _reward_settings(word for word in arguments.functions if word not in functions)
    judge = settings.get("judge")
    if not functions and not (isinstance(judge, dict) and {judge.get("path"), judge.get("base_url")} - {None}):
        text = "is missing; name a file or a built-in reward, or set {}"
        raise ConfigError(Problem("FUNCTION", text, Key("reward.judge.base_url")))
    if functions:
        # One function is the reward itself, as in reward.fn=reward.py. Several functions are its parts.
        given = {"fn": functions[0] if len(functions) == 1 else functions, "workers": 2, **given}
    config = build(RewardOnlyConfig, {"reward": {**given, **settings}}, [], setting_hint).reward
    if config.judge.path is not None:
        text = "is {}, which only a run loads; serve it (areno serve) and set {}"
        raise ConfigError(Problem("reward.judge.path", text, config.judge.path, Key("reward.judge.base_url")))
    return config


def _reward_settings(words: Iterator[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    assert isinstance(found, dict)
    return found.get("reward", {})


def _rows_to_score(path: str, step: int | None) -> list[Any]:
    """Return the recorded samples of a run's step, the last by default, or the rows of a data file."""
    from areno.data.sources import read_rows
    from areno.tracking.reader import RunReader

    folder = Path(path).expanduser()
    if folder.is_dir() and ((folder / "config.yaml").exists() or (folder / "logs").is_dir()):
        return _recorded_samples(RunReader(folder), step)
    if step is not None:
        raise ConfigError([Problem("--step", f"is {step}, but {path} is not the folder of a run")])
    with keys_renamed({"train_dataset.path": "--data"}.get):
        found = read_rows(path)
        rows = [found[number] for number in range(len(found))]
    if not rows:
        raise DataError([Problem("--data", f"{path} has no rows")])
    return rows


def _recorded_samples(run: RunReader, step: int | None) -> list[Any]:
    steps = run.sampled_steps()
    if not steps:
        raise ArenoError("{} has no samples; it was started with rollout.dump_n_samples=0", run.path)
    for at in reversed(steps) if step is None else [step]:
        if samples := run.samples(at):
            return samples
    raise DataError(
        Problem("--data", f"{run.path} has no samples {'in its files' if step is None else f'of step {step}'}")
    )


def _reward_record(row: Any, where: str) -> Any:
    """Return the RewardRecord of a row with prompt and completion, each a text or a list of messages as in TRL."""
    from areno.schema.values import format_value as shown
    from areno.types import RewardRecord

    if not isinstance(row, Mapping) or not {"prompt", "completion"} <= row.keys():
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise DataError([Problem("--data", f"{where}: needs prompt and completion; it has {has}")])
    for name in ("prompt", "completion"):
        if not _is_text_or_messages(row[name]):
            text = f"{where}: {name} is {shown(row[name])}; text or a list of messages is expected"
            raise DataError([Problem("--data", text)])
    asked, said = _as_messages(row["prompt"], "user"), _as_messages(row["completion"], "assistant")
    texts = {name: row[name] if isinstance(row[name], str) else "" for name in ("prompt", "completion")}
    final = str(said[-1].get("content") or "") if said else ""
    tokens = row.get("tokens")
    return RewardRecord(
        prompt=texts["prompt"] or str(asked[-1].get("content") or "" if asked else ""),
        completion=texts["completion"] or final,
        final_answer=final,
        messages=[*asked, *said],
        rendered_completion=texts["completion"] or final,
        tokens=list(tokens) if isinstance(tokens, list) else [],
        solutions=row.get("solutions"),
        record=row,
        step=step if isinstance(step := row.get("step"), int) else 0,
    )


def _count_tokens(records: Sequence[Any], folder: str) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("--tokenizer", f"{folder} has no tokenizer: {error}")]) from error
    for record in records:
        record.tokens = record.tokens or tokenizer.encode(record.completion, add_special_tokens=False)


def _is_text_or_messages(said: Any) -> bool:
    return isinstance(said, str) or (isinstance(said, list) and all(isinstance(message, Mapping) for message in said))


def _as_messages(said: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else [dict(message) for message in said]


def _print_errors(outcomes: Sequence[Any]) -> int:
    """Print why samples have no reward, with the error messages of the first few, and return the exit code."""
    failed = [(number, outcome) for number, outcome in enumerate(outcomes) if outcome.value is None]
    for number, outcome in failed[:_SHOWN_ERRORS]:
        print(f"\nsample {number}: {outcome.status}\n{outcome.message}", file=sys.stderr)
    if failed:
        counts = Counter(outcome.status for _, outcome in failed)
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"\n{len(failed)} of {len(outcomes)} samples have no reward: {told}", file=sys.stderr)
    return int(bool(failed))
