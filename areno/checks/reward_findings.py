"""What the rewards of answers whose worth is known say about a reward: failures, a constant, or the wrong order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from areno.checks.inputs.answer_forms import reference_text, shown_form, templates_of
from areno.checks.inputs.findings import Finding, examples, green, not_checked, quoted, red
from areno.checks.inputs.talks import without_think_tags
from areno.types import PromptItem, RewardOutcome, RewardRecord

AGAIN = "with a second <think>"
_MARKS = ("\\boxed", "####", "<answer>")  # in a prompt, they ask for one of these forms
_OTHER_MARKS = ("</", "JSON", "json", '":')  # and these for another
_SHORT = 40  # characters of a reference answer that one of the forms makes right
_MOST_GIVEN = 0.5  # of the prompts
_MOST_CHOICES = 5


@dataclass(frozen=True)
class Tried:
    """The rewards of one kind of answer, for each prompt. None: the function gave none."""

    kind: str
    values: list[float | None]

    @property
    def mean(self) -> float:
        known = [value for value in self.values if value is not None]
        return statistics.fmean(known) if known else math.nan


@dataclass(frozen=True)
class Answers:
    """The completions of a source that are scored: kind of answer -> a completion for each prompt."""

    items: list[PromptItem]
    texts: dict[str, list[str]]
    forms: list[Tried] = field(default_factory=list)  # rewards of the reference answers in each form
    best: str = ""  # the form with the largest rewards


def failures_finding(where: str, records: Sequence[RewardRecord], outcomes: Sequence[RewardOutcome]) -> Finding:
    lost = [(record, outcome) for record, outcome in zip(records, outcomes, strict=True) if outcome.value is None]
    text = f"{where}{len(lost)} of {len(records)} answers have no reward"
    if not lost:
        return green("reward-failures", f"{where}each of {len(records)} answers has a reward")
    details = [
        f"{quoted(record.completion)}: {outcome.status}: {outcome.message.strip().splitlines()[-1]}"
        for record, outcome in lost
    ]
    return red("reward-failures", text, examples(details))


def repeated_finding(
    where: str, records: Sequence[RewardRecord], first: Sequence[RewardOutcome], again: Sequence[RewardOutcome]
) -> Finding:
    faults = [
        f"{quoted(record.completion)}: {one.value} and {other.value}"
        for record, one, other in zip(records, first, again, strict=True)
        if one.value != other.value
    ]
    if faults:
        text = (
            f"{where}{len(faults)} of {len(records)} answers get another reward in a second process, in another order"
        )
        of_prompts: dict[tuple[int, ...], set[tuple[float | None, float | None]]] = {}
        for record, one, other in zip(records, first, again, strict=True):
            of_prompts.setdefault(tuple(record.prompt_tokens), set()).add((one.value, other.value))
        if len(of_prompts) < len(records) and all(len(pairs) == 1 for pairs in of_prompts.values()):
            text += ". All answers to a prompt get the reward of the first that is scored: is it cached by prompt?"
        return red("reward-repeatable", text, examples(faults))
    return green("reward-repeatable", f"{where}two processes give each of {len(records)} answers the same reward")


def _knows_form(answers: Answers, is_chat: bool) -> bool:
    """Whether a right answer has one of the forms that were tried: the prompts name it, or the rows have solutions.

    If the prompts of a chat model ask for no form, no other form is meant. But a reference that stands in its prompt,
    such as the target of a puzzle, is not the answer.
    """
    if any(each.kind not in templates_of(answers.items) for each in answers.forms):
        return True
    texts = [without_think_tags(item.text) for item in answers.items]
    if any(mark in text for mark in _MARKS for text in texts):
        return True
    n_given = sum(reference_text(item) in item.text for item in answers.items)
    choices = {reference_text(item) for item in answers.items}
    are_listed = len(choices) <= _MOST_CHOICES and all(each in item.text for each in choices for item in answers.items)
    is_given = n_given > _MOST_GIVEN * len(answers.items) and not (are_listed and len(choices) > 1)
    return is_chat and not is_given and not any(mark in text for mark in _OTHER_MARKS for text in texts)


def signal_finding(where: str, tried: Sequence[Tried], answers: Answers, is_chat: bool) -> Finding:
    """Report a constant reward. It is meant if no answer that was tried can be right, as far as this is known."""
    values = {value for each in (*tried, *answers.forms) for value in each.values if value is not None}
    if not values:
        return not_checked("reward-signal", f"{where}no answer has a reward")
    if len(values) > 1:
        text = f"{where}rewards go from {min(values):g} to {max(values):g}"
        return green("reward-signal", text, shown_means(tried))
    [value] = values
    text = f"{where}every answer gets {value:g}: {', '.join(each.kind for each in tried)}"
    if not any(each.kind == "reference" for each in tried):
        return not_checked("reward-signal", f"{text}; the rows have no reference answers to try")
    short = all(len(reference_text(item)) <= _SHORT for item in answers.items)
    if not short or (value <= 0 and not _knows_form(answers, is_chat)):
        return not_checked("reward-signal", f"{text}; the reference may not be in the form of a right answer")
    if value <= 0:
        text += f". So does the right answer in each form: {', '.join(shown_form(each.kind) for each in answers.forms)}"
    return red("reward-signal", text)


def continuation_finding(where: str, tried: Sequence[Tried]) -> Iterator[Finding]:
    """Compare right answers that go on from an opened <think> with those that open it again."""
    means = {each.kind: each.mean for each in tried}
    if AGAIN not in means:
        return
    floor, name = max(means["empty"], means["noise"]), "reward-continuation"
    if means["reference"] <= floor < means[AGAIN]:
        text = f"{where}prompts end with <think>, and a right answer that goes on from there gets "
        text += f"{means['reference']:.3g}; only one that opens <think> again gets {means[AGAIN]:.3g}"
        yield red(name, text, shown_means(tried))
    elif means["reference"] > floor:
        yield green(name, f"{where}a right answer that goes on from the <think> of its prompt gets a reward")


def shown_means(tried: Sequence[Tried]) -> list[str]:
    return [f"{each.kind}: {each.mean:.3g} on average" for each in tried]


def reference_finding(where: str, tried: Sequence[Tried], forms: Sequence[Tried]) -> Iterator[Finding]:
    means, name = {each.kind: each.mean for each in tried}, "reward-reference"
    if "reference" not in means:
        yield not_checked(name, f"{where}the rows have no reference answers")
        return
    reference, shown = means["reference"], shown_means(tried)
    of_rows = max(means["of the next row"], means["of the row before"])
    others = {kind: means[kind] for kind in ("cut off", "empty", "noise")}
    best = max(others, key=others.__getitem__)
    worst = min(forms, key=lambda each: each.mean)
    if of_rows > reference:
        text = f"{where}the answer of a row beside it gets {of_rows:.3g}, the answer of the row itself {reference:.3g}"
        yield red("reward-row", text, shown)
        return
    yield green("reward-row", f"{where}no answer of a row beside it gets more than the row's own")
    if reference > others[best]:
        text = f"{where}reference answers get {reference:.3g}, answers that are {best} {others[best]:.3g}"
        yield green(name, text, shown)
    elif best != "cut off" and others[best] == reference > of_rows:
        text = f"{where}an answer that is {best} gets {reference:.3g}, as much as the right one, and a wrong answer"
        yield red("reward-noise", f"{text} {of_rows:.3g}", shown)
    elif worst.mean < min(means["empty"], means["noise"]):
        told = f"gets {worst.mean:.3g}, noise {means['noise']:.3g}"
        yield red(name, f"{where}the reference answer as {shown_form(worst.kind)} {told}", shown)
    elif reference < others[best]:
        text = f"{where}an answer that is {best} gets {others[best]:.3g}, the reference answer {reference:.3g}"
        yield red(name, text, shown)
    else:
        text = f"{where}no form in which the reference answer was tried gets more than an answer that is {best}"
        yield not_checked(name, text, shown)
