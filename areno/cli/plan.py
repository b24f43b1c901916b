"""The command `areno plan`, which predicts the memory and the time of a training step, without a GPU or weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areno.cli.given_command import GivenCommand, split_command
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.errors import ConfigError, Key, Problem, keys_renamed

if TYPE_CHECKING:
    from rich.console import Console

    from areno.plan.forecast import Forecast
    from areno.plan.settings_that_fit import FittingChange

_ABOUT = """\
Predicts the memory and the time of each phase of a training step, for devices that need not be here. Reads the shapes
of models and no weights. Common hub ids are known without a download.

  areno plan --device h100-80gb areno train --algo gspo --ckpt Qwen/Qwen3-8B --dataset-path rows.jsonl
  areno plan --device h200 --devices 2 python -m areno.recipes.ppo --config-name=gsm8k actor.path=Qwen/Qwen3-4B
  areno plan --ckpt Qwen/Qwen3-8B                short for areno train --ckpt Qwen/Qwen3-8B

If the run does not fit, `areno plan` lists settings with which it does, and their prices."""
_WIDTH = 50  # columns of the longest bar
_LETTERS = {"weights": "W", "gradients": "G", "masters": "M", "moments": "O", "KV cache": "K", "activations": "A"}
_LETTERS["process"] = "P"
_LIMIT = " (the limit; see --answer-tokens)"
_COLORS = {"weights": "blue", "gradients": "cyan", "masters": "green", "moments": "yellow"}
_COLORS |= {"KV cache": "magenta", "activations": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.usage = "%(prog)s [options] COMMAND"
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118)
    kinds = "h100-80gb, h200, a100-40gb, a100-80gb, rtx-4090, l40s or cpu"
    parser.add_argument(
        "--device", metavar="NAME", help=f"kind of device: {kinds} (default: the devices of this machine)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices (default: engine.world_size, else 1, or without --device those of this machine)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="tokens of a prompt (default: the limit, at most 512)"
    )
    parser.add_argument("--answer-tokens", type=int, metavar="N", help="mean tokens of an answer (default: the limit)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    from areno.plan import hardware
    from areno.plan.forecast import forecast
    from areno.plan.settings_that_fit import fitting_changes

    for name in ("devices", "prompt_tokens", "answer_tokens"):
        if (value := vars(arguments)[name]) is not None and value < 1:
            raise ConfigError(Problem(f"--{name.replace('_', '-')}", f"is {value}; it must be at least 1"))
    here = [hardware.hardware_of(arguments.device)] if arguments.device else hardware.local_devices()
    given = split_command(arguments.command, "plan")
    config = _compose_config(given)
    names = given.names | {"engine.world_size": "--devices"}
    _check_options(arguments, config, names)
    n_devices = arguments.devices or config.engine.world_size or (len(here) if not arguments.device else 1)

    def predict(config: Any, n_devices: int) -> Forecast:
        return forecast(config, here[0], n_devices, arguments.prompt_tokens, arguments.answer_tokens)

    with keys_renamed(names.get):
        found = predict(config, n_devices)
        _check_lengths(found, arguments)
    ways = [] if found.fits else fitting_changes(found, predict)
    if arguments.json:
        print(json.dumps(plan_record(given.algorithm.name, found, ways), indent=2))
    else:
        _print_plan(given.algorithm.name, found, ways, is_limit=arguments.answer_tokens is None)
        if not arguments.device and not here[0].is_cuda:
            print("This plan is for the CPU of this machine. For a GPU, give its kind, such as --device h100-80gb.")
    return 0 if found.fits else 1


def _check_options(arguments: argparse.Namespace, config: Any, names: Mapping[str, str]) -> None:
    """Raise an error if an option of `areno plan` contradicts the settings of the run."""
    problems = []
    if arguments.devices and config.engine.world_size not in (None, arguments.devices):
        problems.append(
            Problem("--devices", f"is {arguments.devices}, but engine.world_size={config.engine.world_size}")
        )
    most = config.gconfig.max_new_tokens if isinstance(config, PolicyExperimentConfig) else None
    if most is not None and (arguments.answer_tokens or 0) > most:
        text = "is {}, but an answer has at most {} tokens ({})"
        values = (arguments.answer_tokens, most, Key("gconfig.max_new_tokens"))
        problems.append(Problem("--answer-tokens", text, *values).renamed(names.get))
    if problems:
        raise ConfigError(problems)


def _check_lengths(found: Forecast, arguments: argparse.Namespace) -> None:
    """Raise an error if the assumed lengths are more than the model or the settings of the run allow."""
    config, lengths = found.config, found.lengths
    context, most = (
        found.footprint.models[0].config.max_position_embeddings,
        config.train_dataset.max_length_or_unlimited,
    )
    row, limit = lengths.prompt + lengths.answer, Key("train_dataset.max_length")
    if row > context:
        named = {"--prompt-tokens": arguments.prompt_tokens, "--answer-tokens": arguments.answer_tokens}
        given = [f"{name} {value}" for name, value in named.items() if value is not None]
        text = "a prompt of {} and an answer of {} tokens are more than the {} tokens of the model's context{}"
        said = f" ({' and '.join(given)})" if given else ""
        raise ConfigError(Problem("", text, lengths.prompt, lengths.answer, context, said))
    if not isinstance(config, PolicyExperimentConfig):
        if row > most:
            text = "is {}, with answers of {} tokens, but a row has at most {} tokens ({})"
            raise ConfigError(Problem("--prompt-tokens", text, lengths.prompt, lengths.answer, most, limit))
    elif lengths.prompt > most and config.agent.fn is None:  # the prompts of an agent grow with its conversation
        raise ConfigError(
            Problem("--prompt-tokens", "is {}, but a prompt has at most {} tokens ({})", lengths.prompt, most, limit)
        )


def _compose_config(given: GivenCommand) -> Any:
    """Compose the configuration of a command. Data and rewards may be missing, because a plan does not need them."""
    algorithm = given.algorithm
    with keys_renamed(given.names.get):
        composition = given.compose()
        data = composition.data.setdefault("train_dataset", {})
        if not (data.get("path") or data.get("loader")):
            data["loader"] = "rows.py:given"
        fields = algorithm.config.__dataclass_fields__
        rewards: Any = composition.data.setdefault("reward", {}) if "reward" in fields else {"fn": "math"}
        agent, judge = composition.data.get("agent") or {}, rewards.get("judge") or {}
        sources = (rewards.get("fn"), rewards.get("path"), judge.get("path"), judge.get("base_url"), agent.get("fn"))
        if not any(sources):
            rewards["fn"] = "math"
        return composition.build(algorithm.config)


# -- output ------------------------------------------------------------------------------------------------------------


def plan_record(algorithm: str, found: Forecast, ways: Sequence[FittingChange]) -> dict[str, Any]:
    """Return a plan as plain values: bytes, seconds and tokens. Times are None if the run does not fit."""
    return {
        "algorithm": algorithm,
        "model": found.config.actor.path,
        "device": found.hardware.name,
        "device_bytes": found.hardware.memory,
        "usable_bytes": found.hardware.usable_bytes,
        "devices": found.n_devices,
        "prompt_tokens": found.lengths.prompt,
        "answer_tokens": found.lengths.answer,
        "fits": found.fits,
        "problems": found.problems,
        "rows": found.n_rows,
        "peak_bytes": found.peak_memory_bytes,
        "host_bytes": found.host_bytes,
        "record_bytes": found.record_bytes,
        "longest_row": None if found.longest_row is None else vars(found.longest_row),
        "step_seconds": found.step_seconds if found.fits else None,
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds if found.fits else None,
                "tokens": phase.n_tokens,
                "tokens_in_micro_batch": phase.budget,
                "peak_bytes": phase.peak_memory_bytes,
                "terms": phase.terms,
            }
            for phase in found.phases
        ],
        "ways": [
            {
                "changes": dict(way.changes),
                "price": way.price,
                "host_bytes": way.forecast.host_bytes,
                "peak_bytes": way.forecast.peak_memory_bytes,
                "step_seconds": way.forecast.step_seconds,
            }
            for way in ways
        ],
    }


def _print_plan(algorithm: str, found: Forecast, ways: Sequence[FittingChange], is_limit: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from areno.plan.settings_that_fit import command_line_of

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    hardware = found.hardware
    copies = f"{found.n_devices} x " if found.n_devices > 1 else ""
    memory = f"{hardware.memory / 2**30:.1f} GiB"
    if found.hardware.usable_bytes < hardware.memory:
        memory += f", of which {found.hardware.usable_bytes / 2**30:.1f} can be used"
    console.print(f"[bold]{algorithm}, {found.config.actor.path}, on {copies}{hardware.title} ({memory})[/bold]")
    console.print(f"models: {_models_text(found)}")
    console.print(f"a step: {_work_text(found, is_limit)}")
    console.print()
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "seconds", "tokens/s", "peak, GiB", "largest parts, GiB", "tokens in a micro-batch"):
        table.add_column(name, justify="right" if name in ("seconds", "tokens/s", "peak, GiB") else "left")
    for phase in found.phases:
        largest = sorted(phase.terms.items(), key=lambda pair: -pair[1])[:3]
        table.add_row(
            phase.name,
            f"{phase.seconds:.2f}" if found.fits else "-",
            _thousands_text(phase.n_tokens / phase.seconds) if found.fits else "-",
            f"{phase.peak_memory_bytes / 2**30:.1f}",
            ", ".join(f"{name} {n_bytes / 2**30:.1f}" for name, n_bytes in largest),
            "" if phase.budget is None else f"{phase.budget:,}",
        )
    console.print(table)
    console.print()
    _print_memory_chart(console, found)
    console.print()
    if found.fits:
        console.print(
            f"[bold green]It fits.[/bold green] A step takes about {found.step_seconds:.1f} s. The peak is "
            f"{found.peak_memory_bytes / 2**30:.1f} of {found.hardware.usable_bytes / 2**30:.1f} GiB."
            f"{_host_text(found)}"
        )
        if found.longest_row is not None:
            console.print(f"The longest row to train on: {found.longest_row.text}.")
        if found.record_bytes:
            budget = found.config.recorder.max_gib
            console.print(
                f"The record of a step for areno replay takes about {found.record_bytes / 2**20:.1f} MiB on disk: "
                f"{budget:g} GiB (recorder.max_gib) hold {int(budget * 2**30 / found.record_bytes):,} steps."
            )
        console.print("Not counted: evaluation, checkpoints, and rewards that take longer than the rollout.")
        return
    console.print(f"[bold red]It does not fit:[/bold red] {'; '.join(found.problems)}.")
    if not ways:
        console.print("No change of one or two settings makes it fit: choose a smaller model or a larger device.")
        return
    console.print("With one of these it fits:")
    for way in ways:
        console.print(f"  [bold]{command_line_of(way.changes)}[/bold]")
        figures = f"{way.forecast.step_seconds:.1f} s a step, peak {way.forecast.peak_memory_bytes / 2**30:.1f} GiB"
        console.print(f"      {'; '.join(filter(None, (figures, way.price)))}")


def _models_text(found: Forecast) -> str:
    names = []
    for model in found.footprint.models:
        how = f"trained by {model.optimizer.type}" if model.optimizer else "scores"
        names.append(f"{model.name} ({how}{', only adapters' if model.adapters else ''})")
    return ", ".join(names)


def _work_text(found: Forecast, is_limit: bool) -> str:
    config, lengths, n_rows = found.config, found.lengths, found.n_rows
    if not isinstance(config, PolicyExperimentConfig):
        return f"{n_rows:,} rows of {lengths.prompt + lengths.answer:,} tokens"
    n_samples, limit = config.gconfig.n_samples, _LIMIT if is_limit else ""
    samples = f"{config.rows_per_step:,} samples ({config.train_dataset.batch_size:,} prompts x {n_samples})"
    samples += f", {n_rows:,} of them trained" if n_rows < config.rows_per_step else ""
    return f"{samples}, prompts of {lengths.prompt:,} tokens, answers of {lengths.answer:,} tokens{limit}"


def _host_text(found: Forecast) -> str:
    kept = {"offload": found.host_bytes - found.host_bytes_of_inputs, "inputs of layers": found.host_bytes_of_inputs}
    parts = [f"{n_bytes / 2**30:.0f} GiB of host memory for {what}" for what, n_bytes in kept.items() if n_bytes]
    return f" It also takes {' and '.join(parts)}." if parts else ""


def _thousands_text(n: float) -> str:
    return f"{n / 1000:.1f}k" if n >= 1000 else f"{n:.0f}"


def _print_memory_chart(console: Console, found: Forecast) -> None:
    """Draw a bar of letters for the memory of each phase, and a line at the memory of the device."""
    from rich.text import Text

    scale = max(found.peak_memory_bytes, found.hardware.memory) / _WIDTH
    end = round(found.hardware.usable_bytes / scale)
    width = max(len(phase.name) for phase in found.phases)
    for phase in found.phases:
        bar, cells = Text(), 0
        for name, n_bytes in phase.terms.items():
            n = round(n_bytes / scale)
            bar.append(_LETTERS[name] * n, style=_COLORS.get(name, ""))
            cells += n
        bar.append(" " * (end - cells))
        bar = Text(phase.name.ljust(width) + " ") + bar[:end] + Text("|") + bar[end:]
        console.print(bar)
    used = {name for phase in found.phases for name in phase.terms}
    legend = ", ".join(f"{letter} {name}" for name, letter in _LETTERS.items() if name in used)
    console.print(f"{' ' * width} {legend}; | memory that can be used")
