"""The command `areno replay`, which recomputes recorded steps of a run, or a recorded sample under a checkpoint."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from areno.errors import ConfigError, Problem
from areno.report.terminal import print_tables

if TYPE_CHECKING:
    from areno.report.replayed_tokens import Replay, ReplayedToken

_SHOWN_CHARS = 200  # shown from the end of the prompt and from the beginning of the completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Computes steps of a run again, and says which bits differ. Without --step, it lists the steps that can be "
        "computed again. With --step N, it starts from the nearest earlier state of the run, takes the recorded "
        "samples and rewards, trains up to step N, and compares rewards, advantages, losses, metrics and weights with "
        "the record. With --sample, it computes one recorded sample again, under a checkpoint of its run. For each "
        "token it prints the log-probability then (when it was sampled) and now (under the checkpoint), the importance "
        "ratio of the two, the advantage, the token's part in the loss, and the gradient of the loss by its "
        "log-probability: below 0, training makes the token more likely. The loss is that of the sample as a step of "
        "its own. For an agent, it first prints the reward and the advantage of each turn. In a run with a teacher, it "
        "also prints the log-probability of each token under the teacher."
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of the run")
    add("--step", type=int, metavar="N", help="step to compute again, or step in which the sample was recorded")
    device = "device type (default: that of the run; for a sample, cuda if available)"
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help=device)
    add("--json", action="store_true", help="print the output as JSON")
    change = parser.add_argument_group("A change of settings").add_argument
    help = "compute the step with and without these settings, such as actor.eps_clip=0.3, and compare the two"
    change("--change", nargs="+", metavar="KEY=VALUE", default=[], help=help)
    help = "draw the samples of the step again, so that settings of the rollout may change, too"
    change("--resample", action="store_true", help=help)
    sample = parser.add_argument_group("One sample").add_argument
    sample("--sample", type=int, metavar="N", help="number of the sample in the step, counted from 0")
    help = "number of the row in an agent's sample, counted from 0 (default 0)"
    sample("--row", type=int, default=0, metavar="N", help=help)
    help = "checkpoint: its step, latest, best, or a model folder (default: the checkpoint nearest to the step)"
    sample("--checkpoint", metavar="STEP|FOLDER", help=help)
    sample("--prompt", action="store_true", help="also show the tokens of the prompt")


def run(arguments: argparse.Namespace) -> int:
    if arguments.sample is not None:
        return _replay_sample(arguments)
    only = {"--row": arguments.row, "--checkpoint": arguments.checkpoint, "--prompt": arguments.prompt}
    if given := [name for name, value in only.items() if value]:
        raise ConfigError(Problem(name, "is for one sample; name it with --sample N") for name in given)
    if arguments.step is None and arguments.change:
        raise ConfigError(Problem("--change", "needs the step that is computed with it; add --step N"))
    if arguments.resample and not arguments.change:
        raise ConfigError(Problem("--resample", "needs a change of settings; add --change KEY=VALUE"))
    if arguments.change:
        return _compare_change(arguments)
    return _list_steps(arguments) if arguments.step is None else _replay_step(arguments)


def _list_steps(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from areno.report.terminal import right_aligned
    from areno.run.recorded_run import RecordedRun, ranges_text
    from areno.tracking.reader import RunReader

    recorded = RecordedRun(RunReader(arguments.run).path)
    found = recorded.replayable()
    if arguments.json:
        steps = [{"step": step, "from": base.step, "computes": step - base.step} for step, base in found.items()]
        print(json.dumps({"recorded": recorded.records.steps(), "replayable": steps}, indent=2))
        return 0
    if not found:
        recorded.base_of(max(recorded.records.steps(), default=1))  # says why
    table = Table("steps", "from", right_aligned("computed steps"))
    for base in dict.fromkeys(found.values()):
        steps = [step for step, other in found.items() if other == base]
        few, most = steps[0] - base.step, steps[-1] - base.step
        table.add_row(ranges_text(steps), str(base), str(few) if few == most else f"{few} to {most}")
    print_tables(table)
    newest = max(found)
    if (error := recorded.error_of(newest)) is not None:
        print(f"Step {newest} ended the run with {error}")
    print(f"To compute a step again: areno replay {arguments.run} --step N")
    return 0


def _replay_step(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from areno.report.replayed_steps import replay_steps
    from areno.report.terminal import cell_text, right_aligned
    from areno.tracking.reader import RunReader
    from areno.tracking.run_log import RunLog

    with RunLog(own_process=True, console="quiet"):
        base, steps = replay_steps(RunReader(arguments.run), arguments.step, arguments.device)
    differing = [step for step in steps if not step.is_equal]
    if arguments.json:
        from areno.report.page import without_nan

        print(json.dumps(without_nan({"from": base.step, "steps": [asdict(step) for step in steps]}), indent=2))
        return 1 if differing else 0
    last = steps[-1]
    n_steps = f"{len(steps)} step{'s' if len(steps) > 1 else ''}"
    print(f"step {last.step}, computed again from {base} ({n_steps}) on {_devices_text(last.devices)}")
    if last.devices != last.recorded_devices:
        print(f"The run computed it on {_devices_text(last.recorded_devices)}, where sums may have another order.")
    if last.recorded_error is not None:
        print(f"In the run, the step ended with {last.recorded_error}")
        print("It did so here, too." if last.has_equal_end else f"Here, it ended with {last.error or 'no error'}")
    if not differing:
        what = "its weights and its moments" if last.error is None else "up to its error"
        print(f"Every bit is equal: all {last.n_compared} results of the step, {what}.")
        return 0
    if differing[0] is not last:
        print(f"The first step that differs is step {differing[0].step}: areno replay --step {differing[0].step}")
    if not last.differences:
        return 1
    table = Table("differs", *map(right_aligned, ("values", "of", "largest difference")))
    for each in last.differences:
        table.add_row(each.name, *map(cell_text, (each.n_different, each.n, each.largest)))
    print_tables(table)
    return 1


def _compare_change(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from areno.report.changed_steps import compare_change
    from areno.report.terminal import cell_text, right_aligned
    from areno.tracking.reader import RunReader
    from areno.tracking.run_log import RunLog

    with RunLog(own_process=True, console="quiet"):
        found = compare_change(
            RunReader(arguments.run), arguments.step, arguments.change, arguments.device, arguments.resample
        )
    if arguments.json:
        from areno.report.page import without_nan

        print(json.dumps(without_nan(asdict(found)), indent=2))
        return 0
    print(f"step {found.step}, with and without {', '.join(found.changes)}")
    if not found.is_as_recorded:
        print("Without the change, not every bit is that of the record: see areno replay --step without --change.")
    if not found.has_difference:
        print("No difference: every bit of the step is equal with the change.")
        return 0
    values = Table("result (mean)", *map(right_aligned, ("without", "with the change", "different", "of")))
    for each in found.values:
        values.add_row(each.name, *map(cell_text, (each.without, each.changed, each.n_different, each.n)))
    updates = Table("update", *map(right_aligned, ("norm", "with the change", "difference", "cosine")))
    parameters = Table("parameter", right_aligned("norm of the difference"))
    for update in found.updates:
        norms = (update.norm_without, update.norm_changed, update.norm_difference)
        updates.add_row(update.role, *map(cell_text, (*norms, update.cosine)))
        for name, norm in update.parameters:
            parameters.add_row(f"{update.role} {name}", cell_text(norm))
    print_tables(values, updates, parameters)
    return 0


def _devices_text(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{len(devices)} x {devices[0]}"


def _replay_sample(arguments: argparse.Namespace) -> int:
    from areno.report.replayed_tokens import replay
    from areno.tracking.reader import RunReader
    from areno.tracking.run_log import RunLog

    if arguments.step is None:
        raise ConfigError(Problem("--sample", "needs the step in which it was recorded; add --step N"))
    with RunLog(own_process=True, console="quiet"):
        found = replay(
            RunReader(arguments.run),
            arguments.step,
            arguments.sample,
            checkpoint=arguments.checkpoint,
            row=arguments.row,
            device=arguments.device,
        )
    if arguments.json:
        from areno.report.page import without_nan

        data = without_nan(asdict(found) | {"checkpoint": str(found.checkpoint)})
        print(json.dumps(data, ensure_ascii=False, indent=2, default=str))
        return 0
    for name, text in _summary_lines(found, arguments.step, arguments.sample).items():
        print(f"{name:<12} {text}")
    print_tables(*([_turn_table(found)] if len(found.turns) > 1 else []), _token_table(found, arguments.prompt))
    return 0


def _summary_lines(found: Replay, step: int, number: int) -> dict[str, str]:
    from areno.report.terminal import cell_text

    sample = found.sample
    prompt, completion = (repr(sample.get(name) or "")[1:-1] for name in ("prompt", "completion"))
    differences = [abs(token.log_ratio) for token in found.tokens if token.trained and token.log_ratio is not None]
    lines = {
        "sample": f"{number} of step {step}",
        "prompt": prompt if len(prompt) <= _SHOWN_CHARS else f"... {prompt[-_SHOWN_CHARS:]}",
        "completion": completion if len(completion) <= _SHOWN_CHARS else f"{completion[:_SHOWN_CHARS]} ...",
        "reward": f"{cell_text(sample.get('reward'))} ({sample.get('status')})",
        "checkpoint": str(found.checkpoint),
    }
    if found.checkpoint_step is not None:
        lines["checkpoint"] += f" (after step {found.checkpoint_step})"
    if found.versions is not None:
        oldest, newest = found.versions
        lines["sampled"] = f"by weights of {oldest if oldest == newest else f'{oldest} to {newest}'} updates"
    if differences:
        mean = sum(differences) / len(differences)
        lines["then, now"] = f"log-probabilities differ by {mean:.2g} on average, {max(differences):.2g} at most"
    if found.loss is not None:
        lines["loss"] = cell_text(found.loss)
    if found.missing:
        lines["not known"] = "; ".join(found.missing)
    return lines


def _turn_table(found: Replay) -> Any:
    from rich.table import Table

    from areno.report.terminal import cell_text, right_aligned

    table = Table(*map(right_aligned, ("turn", "reward", "advantage", "trained tokens")))
    for turn in found.turns:
        table.add_row(*map(cell_text, (turn.turn, turn.reward, turn.advantage, turn.trained)))
    return table


def _token_table(found: Replay, with_prompt: bool) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from areno.report.terminal import cell_text, right_aligned

    has_teacher = any(token.teacher is not None for token in found.tokens)
    numbers = ("then", "now", "ratio", "advantage", "loss", "gradient", *(["teacher"] if has_teacher else []))
    of_turns = len(found.turns) > 1
    first_columns = right_aligned(""), *([right_aligned("turn")] if of_turns else []), "token", "trained"
    table = Table(*first_columns, *map(right_aligned, numbers))
    first = next((index for index, token in enumerate(found.tokens) if token.trained), 0)
    for index, token in enumerate(found.tokens):
        if with_prompt or index >= first:
            values = (token.then, token.now, _probability_ratio(token), token.advantage, token.loss, token.gradient)
            values += (token.teacher,) if has_teacher else ()
            trained = "yes" if token.trained else "no"
            place = [str(index), *([cell_text(token.turn)] if of_turns else [])]
            table.add_row(*place, escape(repr(token.text)), trained, *map(cell_text, values))
    return table


def _probability_ratio(token: ReplayedToken) -> float | None:
    return None if token.log_ratio is None else math.exp(min(token.log_ratio, 700.0))
