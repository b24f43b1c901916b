"""Checks of the log-probabilities and values of rows, which transformers computes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.small_model import have_same_weights
from areno.checks.steps.policy_rows import sampled_steps
from areno.checks.steps.probes import seen_rows
from areno.checks.steps.step_formula import PairFormula, field_of, formula_of, mask_of
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Tensors, Update, WatchedRun
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.files.paths import existing_path
from areno.recipes import distill

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

LOGPROB_ERROR = 1e-4  # of log-probabilities and values in fp32, which are right to 1e-5

Row = np.ndarray
Expected = Callable[[int], list[Row]]
"""Computes what numbers of an update would be under an assumption. The argument is the index of the update."""


def _compare(
    name: str, what: str, found: Callable[[int], list[Row]], n: int, expected: Expected, others: dict[str, Expected]
) -> Iterator[Finding]:
    """Compare rows of numbers of each of `n` updates with those expected.

    If they differ, say which of `others` they are, a dictionary of texts.
    """
    largest = 0.0
    for index in range(n):
        numbers = found(index)
        apart = largest_distance(numbers, expected(index))
        largest = max(largest, apart)
        if apart > LOGPROB_ERROR:
            said = f"{what} of update {index + 1} differ from transformers by up to {apart:.2g}"
            if other := other_length(numbers, expected(index)):
                said = f"{what} of update {index + 1} are not those of the completion: {other}"
            reason = next((text for text, other in others.items() if _agrees(numbers, other, index)), "")
            yield red(name, f"{said}: {reason}" if reason else said)
            return
    yield green(name, f"{what} equal those of transformers, to {largest:.1g}")


def _agrees(numbers: list[Row], other: Expected, index: int) -> bool:
    try:
        return largest_distance(numbers, other(index)) <= LOGPROB_ERROR
    except LookupError:
        return False


def largest_distance(found: Sequence[Row], expected: Sequence[Row]) -> float:
    """Return the largest distance of two numbers of a row. Infinite if a row has more numbers than the other."""
    if any(len(one) != len(other) for one, other in zip(found, expected, strict=True)):
        return math.inf
    return max(
        (float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True) if len(one)), default=0.0
    )


def other_length(found: Sequence[Row], expected: Sequence[Row]) -> str:
    """Say which row has another number of numbers than is expected, "" if none has."""
    pairs = enumerate(zip(found, expected, strict=True))
    other = next(((n, len(one), len(two)) for n, (one, two) in pairs if len(one) != len(two)), None)
    return "" if other is None else f"row {other[0]} has {other[1]} in place of {other[2]}"


def shifted_rows(rows: Sequence[Row], found: Sequence[Row], by: int) -> list[Row]:
    """Move rows by some tokens. What comes in from outside of the row counts as equal to what is found."""
    out = []
    for row, own in zip(rows, found, strict=True):
        moved = np.roll(row, by)
        edge = slice(None, by) if by > 0 else slice(by, None)
        if len(row) == len(own):
            moved[edge] = own[edge]
        out.append(moved)
    return out


class _Logprobs:
    """Log-probabilities, by transformers, of the trained tokens of the rows of each update of the actor."""

    def __init__(self, run: WatchedRun, rows: Callable[[int], list[tuple[list[int], Tensor]]], temperature: float):
        self._run, self._rows, self.temperature = run, rows, temperature

    def of(self, weights: Callable[[int], Tensors], temperature: float | None = None, model: str = "actor") -> Expected:
        def compute(index: int) -> list[Row]:
            own, shape = {name: value.double() for name, value in weights(index).items()}, self._run.models[model]
            with torch.no_grad():
                numbers = [
                    shape.logprobs(own, tokens, self._at(temperature), mask) for tokens, mask in self._rows(index)
                ]
            return [each[mask].numpy() for each, (_, mask) in zip(numbers, self._rows(index), strict=True)]

        return compute

    def _at(self, temperature: float | None) -> float:
        return self.temperature if temperature is None else temperature


def rollout_logprobs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the rollout samples from the weights of its version, with adapters, at its temperature."""
    run, steps = found.run, list(sampled_steps(found.run))
    if not steps:
        return
    updates = run.of()

    def rows(index: int) -> list[tuple[list[int], Tensor]]:
        return [
            (np.asarray(row.tokens).tolist(), torch.as_tensor(steps[index].wanted_mask(number)))
            for number, row in enumerate(steps[index].rows)
        ]

    def sampled(index: int) -> list[Row]:
        return [steps[index].sampled_logprobs(number) for number in range(len(steps[index].rows))]

    temperature = sampling_temperature(run.config)
    others = {turn.temperature for turns in run.episodes.turns.values() for turn in turns} - {temperature}
    if others:
        yield not_checked("rollout-logprobs", "the agents sample at temperatures of their own")
        return
    table = _Logprobs(run, rows, temperature)
    expected = table.of(lambda index: updates[index].before)
    yield from _compare(
        "rollout-logprobs",
        "log-probabilities of the rollout",
        sampled,
        len(steps),
        expected,
        {
            "they belong to the token before (off by one)": lambda i: shifted_rows(expected(i), sampled(i), 1),
            "they belong to the token after (off by one)": lambda i: shifted_rows(expected(i), sampled(i), -1),
            "they are at temperature 1": table.of(lambda index: updates[index].before, 1.0),
            "the adapters are left out of the rollout": table.of(lambda index: _without_adapters(run)),
            "the rollout has stale weights, those of the step before": table.of(
                lambda index: updates[index - 1].before if index else _none()
            ),
        },
    )
    if run.episodes.turns and run.config.agent.train_tool_results:
        return  # of which the rows have log-probabilities, too
    of_rows = [[field_of(row, "logprobs").numpy() for row in step.rows] for step in steps]
    for index, numbers in enumerate(of_rows):
        if largest_distance(numbers, sampled(index)) > LOGPROB_ERROR:
            text = f"rows of update {index + 1} do not have the log-probabilities of their samples"
            if other := other_length(numbers, sampled(index)):
                yield red("rollout-logprobs", f"{text}, as the loss mask is another: {other}")
                continue
            for shift, word in ((1, "before"), (-1, "after")):
                if largest_distance(numbers, shifted_rows(sampled(index), numbers, shift)) <= LOGPROB_ERROR:
                    text += f": they belong to the token {word} (off by one)"
            yield red("rollout-logprobs", text)


def _without_adapters(run: WatchedRun) -> Tensors:
    return {} if "lora_A" in "".join(run.start()) else _none()


def _none() -> Any:
    raise LookupError


def training_logprobs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the training pass computes the policy's log-probabilities, at the temperature of sampling."""
    run, updates = found.run, found.run.of()
    if run.models["actor"].head != "lm":
        return
    of_updates = [list(seen_rows(update)) for update in updates]

    def rows(index: int) -> list[tuple[list[int], Tensor]]:
        return [(np.asarray(row.tokens).tolist(), mask_of(row)) for row, _ in of_updates[index]]

    def seen(index: int) -> list[Row]:
        return [each.outputs[mask_of(row).numpy()].astype(np.float64) for row, each in of_updates[index]]

    wanted = sampling_temperature(found.run.config)
    table = _Logprobs(run, rows, wanted)
    expected = table.of(lambda index: updates[index].before)
    yield from _compare(
        "training-logprobs",
        f"log-probabilities of training (temperature {wanted:g})",
        seen,
        len(updates),
        expected,
        {
            "they are at temperature 1 and not at that of sampling": table.of(lambda i: updates[i].before, 1.0),
            "they belong to the token before (off by one)": lambda i: shifted_rows(expected(i), seen(i), 1),
            "they belong to the token after (off by one)": lambda i: shifted_rows(expected(i), seen(i), -1),
            "the adapters are left out": table.of(lambda index: _without_adapters(run)),
        },
    )


def sampling_temperature(config: Any) -> float:
    return config.gconfig.logprob_temperature if isinstance(config, PolicyExperimentConfig) else 1.0


def reference_logprobs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the reference is the model that the settings name: it starts at a KL of 0 and does not move."""
    run, updates = found.run, found.run.of()
    if any(row.ref_logprobs is None for row in updates[0].given):
        formula = formula_of(run.config, updates[0])
        if isinstance(formula, PairFormula) and formula.objective.kind in ("sigmoid", "robust", "ipo"):
            yield red(
                "reference-logprobs",
                "the loss compares with a reference, but the rows have no log-probabilities of one",
            )
        return

    def rows(index: int) -> list[tuple[list[int], Tensor]]:
        return [(np.asarray(row.tokens).tolist(), mask_of(row)) for row in updates[index].given]

    def given(index: int) -> list[Row]:
        return [field_of(row, "ref_logprobs").numpy() for row in updates[index].given]

    table = _Logprobs(run, rows, sampling_temperature(found.run.config))
    own = run.config.ref.path is not None and not _is_same(run.config)
    model = "ref" if own else "actor"

    def weights(index: int) -> Tensors:
        return run.frozen["ref"] if own else run.start()

    expected = table.of(weights, model=model)
    yield from _compare(
        "reference-logprobs",
        "log-probabilities of the reference",
        given,
        len(updates),
        expected,
        {
            "the reference is the live policy": table.of(lambda i: updates[i].before if i else _none()),
            "they are at temperature 1 and not at that of sampling": table.of(weights, 1.0, model),
            "they belong to the token before (off by one)": lambda i: shifted_rows(expected(i), given(i), 1),
            "they belong to the token after (off by one)": lambda i: shifted_rows(expected(i), given(i), -1),
        },
    )
    if own:
        yield not_checked("reference-kl", "ref.path names another model than the policy, so the KL does not start at 0")
        return
    apart = [_meanlargest_distance(given(index), update) for index, update in enumerate(updates)]
    if apart[0] > LOGPROB_ERROR:
        yield red("reference-kl", f"the KL to the reference starts at {apart[0]:.2g} per token and not at 0")
    elif min(apart[1:], default=1.0) <= LOGPROB_ERROR:
        yield red("reference-kl", "after an update the reference is still equal to the policy: it is the live policy")
    else:
        yield green("reference-kl", "the KL to the reference is 0 at the start, and is not 0 after an update")


def _meanlargest_distance(reference: list[Row], update: Update) -> float:
    policy = [seen.outputs[mask_of(row).numpy()] for row, seen in seen_rows(update)]
    return float(np.mean(np.abs(np.concatenate(reference) - np.concatenate(policy))))


def _is_same(config: Any) -> bool:
    return config.ref.path == config.actor.path


def critic_values(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the values of GAE are a forward pass of the critic as it is in that step."""
    run, updates, critics = found.run, found.run.of(), found.run.of("critic")
    if not critics:
        return

    def values(weights: Callable[[int], Tensors]) -> Expected:
        def compute(index: int) -> list[Row]:
            own = {name: value.double() for name, value in weights(index).items()}
            model = run.models["critic"]
            with torch.no_grad():
                return [
                    model.values(own, np.asarray(row.tokens).tolist())[mask_of(row)].numpy()
                    for row in updates[index].given
                ]

        return compute

    def given(index: int) -> list[Row]:
        return [field_of(row, "values").numpy() for row in updates[index].given]

    expected = values(lambda index: critics[index].before)
    yield from _compare(
        "critic-values",
        "values of the critic",
        given,
        len(updates),
        expected,
        {
            "they are of the critic one step before": values(lambda i: critics[i - 1].before if i else _none()),
            "they are of the critic after its update": values(lambda i: critics[i].after),
            "they belong to the state one token later (off by one)": lambda i: shifted_rows(expected(i), given(i), -1),
            "they belong to the state one token earlier (off by one)": lambda i: shifted_rows(expected(i), given(i), 1),
        },
    )


def teacher_weights(subject: Subject) -> Iterator[Finding]:
    """Whether the teacher is another model than the actor: else there is nothing to learn from it."""
    config = subject.config
    teacher = config.teacher if isinstance(config, PolicyExperimentConfig) else None
    if teacher is None or teacher.follows_actor:
        return
    is_alone = isinstance(config, distill.DistillConfig) or not teacher.rl_loss_weight
    for role, path in teacher.paths.items():
        key, own = teacher.path_key(role), config.actor.path
        folders = [existing_path(each) for each in (path or own, own)]
        known = [folder for folder in folders if folder is not None]
        same = (path or own) == own or (len(known) == 2 and have_same_weights(known[0], known[1]))
        if not same:
            yield green("teacher-weights", f"{key} has other weights than actor.path")
        elif teacher.prompt_key is not None or not is_alone:
            why = "its prompts are others" if teacher.prompt_key is not None else "it holds the policy at its start"
            yield green("teacher-weights", f"{key} has the weights of actor.path, but {why}")
        else:
            text = f"{key} ({path}) has the weights of actor.path ({own})"
            yield red("teacher-weights", f"{text}: teacher and student agree, and nothing is learned")


def teacher_logprobs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the log-probabilities of a teacher are its own, after the prompt that it reads."""
    run, updates = found.run, found.run.of()
    teacher = run.config.teacher if isinstance(run.config, PolicyExperimentConfig) else None
    if teacher is None or any(row.teacher_logprobs is None for row in updates[0].given):
        return
    wanted = sampling_temperature(run.config)

    def scored(temperature: float = wanted, own_prompt: bool = True, role: str = "") -> Expected:
        def compute(index: int) -> list[Row]:
            out = list[Row]()
            for row in updates[index].given:
                name, mask, prompt = role or row.teacher or teacher.role, mask_of(row), row.teacher_prompt
                weights = updates[index].before if name == "actor" else run.frozen[name]
                start = 0
                if prompt is not None and own_prompt:
                    start = row.response_start or int(mask.int().argmax())
                tokens = [*(prompt if start and prompt is not None else ()), *np.asarray(row.tokens)[start:].tolist()]
                in_double = {key: value.double() for key, value in weights.items()}
                with torch.no_grad():
                    numbers = run.models[name].logprobs(in_double, tokens, temperature)
                out.append(numbers[len(tokens) - len(mask) + start :][mask[start:]].numpy())
            return out

        return compute

    def given(index: int) -> list[Row]:
        return [field_of(row, "teacher_logprobs").numpy() for row in updates[index].given]

    expected = scored()
    yield from _compare(
        "teacher-logprobs",
        "log-probabilities of the teacher",
        given,
        len(updates),
        expected,
        {
            "they are those after the prompt of the student": scored(own_prompt=False),
            "they are those of the student": scored(role="actor"),
            "they are at temperature 1 and not at that of sampling": scored(1.0),
            "they belong to the token before (off by one)": lambda i: shifted_rows(expected(i), given(i), 1),
            "they belong to the token after (off by one)": lambda i: shifted_rows(expected(i), given(i), -1),
        },
    )


_OF_STEPS = (rollout_logprobs, training_logprobs, reference_logprobs, critic_values, teacher_logprobs)
CHECKS = [teacher_weights, *map(of_two_steps, _OF_STEPS)]
