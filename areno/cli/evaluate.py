"""The command `areno evaluate`, which scores a checkpoint or model folder on data with the settings of a run."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import flags_unused_by_greedy
from areno.config.run import EvaluatorConfig, SaverConfig, StatsLoggerConfig
from areno.errors import ArenoError, ConfigError, Problem, keys_renamed
from areno.files.paths import existing_path
from areno.report.terminal import print_tables


def without_training(config: PolicyExperimentConfig, model: str) -> PolicyExperimentConfig:
    """Return settings that only evaluate a model: no checkpoints, no states to resume from, no tracking services."""
    from areno.plan.lora import with_model

    console = "lines" if config.stats_logger.console in ("auto", "live") else config.stats_logger.console
    return replace(
        config,
        actor=with_model(config.actor, model),
        evaluator=EvaluatorConfig(),
        recover=replace(config.recover, mode="off"),
        saver=SaverConfig(),
        stats_logger=StatsLoggerConfig(console=console),
    )


def evaluate_model(config: PolicyExperimentConfig, folder: Path, step: int = 0) -> Mapping[str, float]:
    """Sample and score every validation set, write logs/ and eval/<step>.jsonl, and return the metrics."""
    from areno.trainers.loop import PolicyEvaluation

    with PolicyEvaluation(config, run_dir=folder) as evaluation:
        evaluation.run.progress.step = step
        try:
            return evaluation.evaluate()
        finally:
            evaluation.run.progress.step = 0  # nothing was trained, so the log reports no stopped run


_FLAGS_OF_DRAWS = flags_unused_by_greedy()
_FLAGS = {
    "actor.path": "FOLDER",
    "valid_dataset.path": "--data",
    "train_dataset.path": "--data",
    "reward.fn": "--reward",
    "valid_dataset.max_rows": "--max-rows",
    "eval_gconfig.n_samples": "--n-samples",
    "engine.device": "--device",
    "eval_gconfig.max_new_tokens": "--max-new-tokens",
    "gconfig.max_new_tokens": "--max-new-tokens",
    "trial_name": "--output",
    "cluster.fileroot": "--output",
    **{f"eval_gconfig.{name}": flag for name, flag in _FLAGS_OF_DRAWS.items()},
}
_OF_ANY_REWARD = ("fn", "timeout_s", "workers")
_TASK, _RECIPE = "prompts", "gspo"  # for models of runs without rewards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Samples answers of a checkpoint to the rows of valid_dataset, scores them with the reward of its run, prints "
        "the means and keeps every answer. A checkpoint of SFT or DPO, or any other model folder, needs --data and "
        "--reward, or the settings of another run."
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        help="folder of a checkpoint, of a run (its last checkpoint is evaluated), or of any model",
    )
    add("--run", metavar="RUN", help="folder of the run whose settings are used (default: the run of the checkpoint)")
    add("--data", metavar="DATA", help="file, folder or hub dataset to evaluate on (default: valid_dataset of the run)")
    add(
        "--reward",
        metavar="FN",
        help="the whole reward: file.py[:function] or a built-in one (default: that of the run)",
    )
    add("--max-rows", metavar="N", help="evaluate only the first N rows")
    add(
        "--n-samples",
        type=int,
        metavar="N",
        help="answers per prompt. With more than one, the answers are sampled, and pass@k is measured",
    )
    for name, flag in _FLAGS_OF_DRAWS.items():
        add(flag, dest=name, metavar=name[0].upper(), help=f"{name} of sampling")
    add("--max-new-tokens", metavar="N", help="maximum number of tokens of an answer")
    add("--device", choices=["auto", "cpu", "cuda"], help="device type (default: the device of the run)")
    add(
        "-o",
        "--output",
        metavar="FOLDER",
        help="new folder to write the answers to (default: in evaluations/ in the folder of the run)",
    )
    add("--json", action="store_true", help="print the output as JSON")
    add("settings", nargs="*", default=[], metavar="key=value", help="any other setting of a run")


def run(arguments: argparse.Namespace) -> int:
    own = {line.partition("=")[0].lstrip("+") for line in arguments.settings}  # errors quote these keys
    with keys_renamed(lambda key: None if key in own else _FLAGS.get(key)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from areno.run.resume import shown_path
    from areno.tracking import run_folder
    from areno.tracking.run_log import RunLog

    of_run, model, step = _find_model(arguments.folder)
    of_run = Path(arguments.run).expanduser() if arguments.run else of_run
    settings = [*_overrides(arguments), *arguments.settings]
    config, recipe = _evaluation_config(of_run, model, arguments, settings)
    config = without_training(config, model)
    output = _output_folder(arguments.output, of_run, model)
    folder = run_folder.make_run_folder(output)
    assert folder is not None
    folder.write_description(config, settings, recipe)
    try:
        with RunLog(own_process=True):
            scalars = evaluate_model(config, output, step)
    except BaseException:
        folder.discard()
        raise
    if arguments.json:
        print(json.dumps({"model": model, "answers": str(output / "eval"), **scalars}, indent=2))
    else:
        print_tables(_scalar_table(scalars))
        files = sorted((output / "eval").rglob("*.jsonl"))
        print("\n".join(f"answers:      {shown_path(file)}" for file in files))
        print(f"look at them: areno report {shlex.quote(shown_path(output))}")
    return 0


def _find_model(named: str) -> tuple[Path | None, str, int]:
    """Return (folder of the run, model folder or hub id, training step) of the model that the command line names.

    The folder of the run is None, and the step is 0, if they are not known.
    """
    from areno.tracking.reader import RunReader
    from areno.tracking.run_folder import has_description

    folder = Path(named).expanduser()
    if has_description(folder) or (folder / "logs").is_dir():
        latest = RunReader(folder).latest_checkpoint()
        if latest is None:
            raise ArenoError("{} has no checkpoint yet; name a model folder, with --run {}", folder, folder)
        folder = latest
    if folder.is_file():
        raise ConfigError(Problem("FOLDER", "{} is a file; a run, a checkpoint or a model folder is expected", folder))
    if not folder.is_dir():  # a hub id, or an error that is raised when the model is opened
        return None, named, 0
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        text = "{} is neither the folder of a run nor that of a model: it has no config.json or adapter_config.json"
        raise ConfigError(Problem("FOLDER", text, folder))
    of_run = next((parent for parent in folder.resolve().parents if has_description(parent)), None)
    number = folder.resolve().name.removeprefix("step-")
    return of_run, str(folder), int(number) if number.isdecimal() else 0


def _overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the settings that the command-line flags stand for, each as key=value."""
    of_draws = {name: vars(arguments)[name] for name in _FLAGS_OF_DRAWS}
    if arguments.data is not None:
        yield from (f"valid_dataset.path={_quoted(arguments.data)}", "valid_dataset.loader=null")
        yield "valid_dataset.sets=null"
    for key, value in {
        "reward.fn": arguments.reward and _quoted(arguments.reward),
        "valid_dataset.max_rows": arguments.max_rows,
        "eval_gconfig.n_samples": arguments.n_samples,
        **{f"eval_gconfig.{name}": value for name, value in of_draws.items()},
        "eval_gconfig.max_new_tokens": arguments.max_new_tokens,
        "engine.device": arguments.device,
    }.items():
        if value is not None:
            yield f"{key}={value}"
    if (arguments.n_samples or 1) > 1 or any(value is not None for value in of_draws.values()):
        yield "eval_gconfig.greedy=false"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _evaluation_config(
    of_run: Path | None, model: str, arguments: argparse.Namespace, settings: list[str]
) -> tuple[Any, str]:
    """Compose the settings of the run or, if it has no rewards, of the default task. Returns (config, algorithm)."""
    from areno.api.algorithms import algorithm_of, get_algorithm
    from areno.config.policy_experiments import PolicyExperimentConfig
    from areno.launch.compose import load, mention_version
    from areno.schema.build import with_current_names
    from areno.tracking.run_folder import has_description, settings_of

    algorithm = get_algorithm(_RECIPE)
    if of_run is not None:
        if not has_description(of_run):
            raise ConfigError(Problem("--run", "{} is not the folder of a run: it has no config.yaml", of_run))
        algorithm = algorithm_of(of_run)
    if of_run is not None and issubclass(algorithm.config, PolicyExperimentConfig):
        given = with_current_names(algorithm.config, settings_of(of_run))
        groups = [] if given.get("valid_dataset") or not arguments.data else ["valid_dataset=default"]
        uses = {line.partition(".")[0] for line in settings}
        if "eval_gconfig" in uses and not given.get("eval_gconfig"):  # the run evaluates with gconfig
            groups.append("eval_gconfig=greedy")
            groups += [f"eval_gconfig.{name}=${{gconfig.{name}}}" for name in given["gconfig"]]
        if arguments.reward is not None:  # it is the whole reward, without the models and weights of the run
            named = [line.partition("=")[0].split(".") for line in settings]
            kept = [*_OF_ANY_REWARD, arguments.reward, *(key[1] for key in named if key[0] == "reward")]
            groups += [f"~reward.{name}" for name in given.get("reward") or {} if name not in kept]
        with mention_version(of_run):
            config = load(algorithm.config, "config", [*groups, *settings], of_run, sources=True)
    else:
        if missing := [
            Problem(f"--{name}", "missing; {} is no checkpoint of a run with rewards", model)
            for name in ("data", "reward")
            if vars(arguments)[name] is None
        ]:
            if existing_path(model) is None:
                text = "there is no folder {}; a model of the hub needs --data and --reward"
                raise ConfigError(Problem("FOLDER", text, model))
            raise ConfigError(missing)
        algorithm = get_algorithm(_RECIPE)
        rows = [f"actor.path={_quoted(model)}", f"train_dataset.path={_quoted(arguments.data)}"]
        rows += ["gconfig.max_new_tokens=1", f"eval_gconfig.max_new_tokens={arguments.max_new_tokens or 1024}"]
        groups = ["valid_dataset=default", "eval_gconfig=greedy"]
        config = load(algorithm.config, _TASK, [*groups, *rows, *settings], sources=True)
    if config.valid_dataset is None:
        raise ConfigError(Problem("--data", "missing; the run of {} evaluates nothing itself", model))
    return config, algorithm.name


def _output_folder(named: str | None, of_run: Path | None, model: str) -> Path:
    if named is not None:
        return Path(named).expanduser()
    base = (of_run or Path("outputs")).absolute() / "evaluations"
    name = Path(model).resolve().name
    return next(
        path
        for number in range(1, 10**6)
        if not (path := base / (name if number == 1 else f"{name}-{number}")).exists()
    )


def _scalar_table(scalars: Mapping[str, float]) -> Any:
    from rich.table import Table

    table = Table("", "value", border_style="bright_black")
    table.columns[1].justify = "right"
    for name, value in scalars.items():
        table.add_row(_TITLES.get(name, name), f"{value:.6g}")
    return table


_TITLES = {
    "rewards_mean": "mean reward",
    "accuracy": "accuracy",
    "response_len_mean": "mean length in tokens",
    "truncated": "cut off at the length limit",
    "num_sequences": "answers",
}
