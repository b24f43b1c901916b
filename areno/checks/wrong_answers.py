"""Checks of a reward by answers that are wrong although they look like the right one, and right ones among numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areno.checks.inputs.answer_forms import REASONING, shown_form
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.known_answers import NOISE, KnownAnswers, Trial, Values, mean_of, number_of

_MOST = 0.1  # of the wrong answers of a kind
_SHOWN = 3
_SHORT = 40  # characters of a reference answer
_SENTENCE = "The answer is {}."
_PLAIN = ("{}", _SENTENCE, "Answer: {}")  # forms in which the rest of the text may have other numbers
_PROSE = (
    "We look at each choice. Both could be right, but the words do not decide between them, and no reason is known."
)
_LEAST_WORK = 20  # characters of a worked solution beside its result
_OTHERS = 4  # other answers in a list
_NEAR = 0.03  # of a number
_REFUSAL = "I am sorry, but I cannot answer this question."
_ECHO, _MOST_ECHOED = "the text of the prompt", 0.6  # which may well end with the right answer
_WHOLE, _CLOSE = "the number without its decimals", 0.05
_OTHER_SIGN = "the number with the other sign"
_TOLERATED = ("the number plus or minus 1", "the number plus or minus 3 %")
_ESTIMATE = ("estimat", "approximat", "roughly", "predict", "forecast")
_LEAST_NUMBERS = 2  # in a prompt whose answer is worked out, not known or judged


@dataclass(frozen=True)
class _Wrong:
    number: int  # of the prompt
    kind: str
    form: str  # whose reward for the right answer is compared
    text: str


def _wrong_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Try wrong answers in the forms in which the right one has its largest reward, and in a sentence."""
    forms: dict[str, None] = dict.fromkeys([_best_form(known), _SENTENCE])
    tried = [
        _Wrong(number, kind, form, text)
        for form in forms
        if form in known.forms
        for number in range(len(known.references))
        if known.is_right(form, number)
        for kind, text in dict(_wrong_texts(known, number, form)).items()
    ]

    def judge(values: Values) -> Iterator[Finding]:
        if not tried:
            yield not_checked("reward-wrong", f"{known.where}no short answer gets a reward")
            return
        yield from _findings(known, tried, values)

    yield Trial([(known.items[each.number], each.text) for each in tried], judge)


def _best_form(known: KnownAnswers) -> str:
    return max(known.templates, key=lambda each: mean_of(known.rewards[each]) if each in known.forms else float("-inf"))


def _findings(known: KnownAnswers, tried: Sequence[_Wrong], values: Values) -> Iterator[Finding]:
    counts = Counter(each.kind for each in tried)
    full: dict[str, list[str]] = {}
    for each, value in zip(tried, values, strict=True):
        if value is not None and value >= (known.rewards[each.form][each.number] or 0.0):
            said = f"row {known.items[each.number].index}: {each.text!r} gets {value:g}"
            full.setdefault(each.kind, []).append(f"{said}, right is {known.references[each.number]}")
    wrong = {
        kind: details
        for kind, details in full.items()
        if len(details) > (_MOST_ECHOED if kind == _ECHO else _MOST) * counts[kind]
    }
    meant = _TOLERATED * _is_measured(known)
    meant += (_OTHER_SIGN,) * (not any(reference.startswith("-") for reference in known.references))
    doubts = [kind for kind in wrong if kind in meant]
    faults = [kind for kind in wrong if kind not in doubts]
    if faults:
        most = max(faults, key=lambda kind: len(wrong[kind]) / counts[kind])
        text = (
            f"{known.where}{len(wrong[most])} of {counts[most]} wrong answers get the reward of the right one: {most}"
        )
        text += f"; so do others: {', '.join(kind for kind in faults if kind != most)}" * (len(faults) > 1)
        yield red("reward-wrong", text, [line for kind in faults for line in wrong[kind][:_SHOWN]])
    elif doubts:
        text = f"{known.where}{doubts[0]} gets the reward of the right answer. Is this tolerance meant?"
        yield not_checked("reward-wrong", text, [line for kind in doubts for line in wrong[kind][:_SHOWN]])
    else:
        text = f"{known.where}{len(tried)} wrong answers that look like the right one do not get its reward"
        yield green("reward-wrong", text, [f"{count}: {kind}" for kind, count in counts.items()])


def _is_measured(known: KnownAnswers) -> bool:
    """Whether a number near the right one may be right: most have decimals, or are to be known or estimated."""
    numbers = [at for at, reference in enumerate(known.references) if number_of(reference) is not None]
    prompts = [known.items[at].prompt for at in numbers]
    traits = [
        ["." in known.references[at] for at in numbers],
        [any(word in prompt.lower() for word in _ESTIMATE) for prompt in prompts],
        [_n_numbers(prompt) < _LEAST_NUMBERS for prompt in prompts],
    ]
    return any(sum(trait) > len(numbers) / 2 for trait in traits)


def _n_numbers(text: str) -> int:
    return len("".join(char if char.isdecimal() else " " for char in text).split())


def _wrong_texts(known: KnownAnswers, number: int, form: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of wrong answers to a prompt."""
    reference = known.references[number]
    others = _other_answers(known, number)
    if others:
        yield "the answer of another row", form.format(others[0])
    value = number_of(reference)
    if len(reference) <= _SHORT and not _words(reference) & _words(_REFUSAL):
        yield "a refusal", _REFUSAL
    if reference not in known.items[number].prompt:
        yield _ECHO, known.items[number].prompt
    if value is not None:
        for kind, text in _wrong_numbers(reference, value):
            yield kind, form.format(text)
        if form in _PLAIN:
            later = form.format(_far(reference, 1))
            yield "another number after the right one", f"{reference} is not the answer. {later}"
    elif others and len(reference) <= _SHORT and _is_plain(reference):
        if not _words(reference) & _words(_PROSE):
            yield "words without an answer", _PROSE
        if len(others) > 1:
            listed = [others[0], reference, *filter(_is_plain, others[1:_OTHERS])]
            yield "a list of answers", form.format(", ".join(listed))
        if form in _PLAIN:
            yield "another answer after the right one", f"{reference} is not the answer. {form.format(others[0])}"


def _other_answers(known: KnownAnswers, number: int) -> list[str]:
    """Return the different answers of other rows, of which no word is in the row's own.

    The next row's is the first. Of numbers it is the farthest, as the next one may be right within a tolerance.
    """
    own, n = known.references[number], len(known.references)
    value, found = number_of(own), dict[str, None]()
    for other in (known.references[(number + step) % n] for step in range(1, n)):
        is_other = number_of(other) != value if value is not None else not _words(own) & _words(other)
        if is_other and len(other) <= max(_SHORT, len(own)):
            found[other] = None
    if value is not None:
        return sorted(found, key=lambda other: -abs((number_of(other) or 0.0) - value))
    return list(found)


def _is_plain(text: str) -> bool:
    """Whether a text has only words, so that no formula of several numbers can be meant."""
    return all(char.isalnum() or char in " -'." for char in text)


def _words(text: str) -> set[str]:
    return set("".join(char if char.isalnum() else " " for char in text.lower()).split())


def _wrong_numbers(reference: str, value: float) -> Iterator[tuple[str, str]]:
    longer = f"{reference}1" if reference.startswith("-") else f"1{reference}"
    yield "another number that has its digits", longer
    whole = int(value)
    yield "a list of numbers", ", ".join([_far(reference, 1), _far(reference, 2), reference, _far(reference, 3)])
    if value:
        yield _OTHER_SIGN, reference[1:] if reference.startswith("-") else f"-{reference}"
        yield "ten times the number", _times(reference, 10)
        yield "a hundred times the number", _times(reference, 100)
    yield _TOLERATED[0], _plus(reference, 1 if whole % 2 else -1)
    near = _times(reference, 1 + (_NEAR if whole % 2 else -_NEAR))
    if abs((number_of(near) or 0.0) - value) > (1 if "." not in reference else 0):
        yield _TOLERATED[1], near
    if "." in reference and abs(whole - value) > _CLOSE * abs(value):
        yield _WHOLE, str(whole)
    if len(digits := reference.lstrip("-")) > 1 and digits.isdigit():
        yield "the number without its last digit", reference[:-1]


def _n_decimals(reference: str) -> int:
    return len(reference.partition(".")[2])


def _plus(reference: str, step: int) -> str:
    return f"{(number_of(reference) or 0.0) + step:.{_n_decimals(reference)}f}"


def _far(reference: str, steps: int) -> str:
    """Return a number that no tolerance takes for the right one."""
    return _plus(reference, steps * (10 + abs(int(number_of(reference) or 0.0))))


def _times(reference: str, factor: float) -> str:
    return f"{(number_of(reference) or 0.0) * factor:.{_n_decimals(reference)}f}"


def _right_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Try right answers after sentences with other numbers, if the reward reads answers out of a text at all."""
    form = _best_form(known)
    form = form if form != "{}" and form in known.forms else _SENTENCE
    numbers = [
        number
        for number in range(len(known.references))
        if form in known.forms and known.is_right(form, number) and number_of(known.references[number]) is not None
    ]
    numbers = [] if form.startswith("<") and REASONING not in form else numbers  # nothing may stand before it
    texts = [_with_numbers(form, known.forms[form][number]) for number in numbers]

    def judge(values: Values) -> Iterator[Finding]:
        lost = [
            (number, text)
            for number, text, value in zip(numbers, texts, values, strict=True)
            if value is not None and value <= known.worthless[number]
        ]
        if len(lost) > len(numbers) / 2:
            text = f"{known.where}{len(lost)} of {len(numbers)} right answers get no reward after a sentence with other"
            shown = [f"row {known.items[number].index}: {text!r}" for number, text in lost[:_SHOWN]]
            yield red("reward-steps", f"{text} numbers, so that a worked solution would not", shown)
        elif numbers:
            yield green("reward-steps", f"{known.where}right answers are read after sentences with other numbers")

    yield Trial([(known.items[number], text) for number, text in zip(numbers, texts, strict=True)], judge)


def _with_numbers(form: str, text: str) -> str:
    """Return a text with a sentence before the answer: in its reasoning, if the form has one."""
    said = "There are 3 of one kind and 5 of another."
    return text.replace(REASONING, said) if REASONING in form else f"{said}\n\n{text}"


def _noise_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Look for prompts whose worthless answers get the largest reward of a right one."""

    def judge(values: Values) -> Iterator[Finding]:
        best = known.rewards.get(known.best, [])
        top = max((value for value in best if value is not None), default=0.0)
        if not best or top <= min(known.worthless):
            return
        full = [number for number, value in enumerate(known.worthless) if value >= top]
        text = f"{known.where}{len(full)} of {len(best)} prompts give noise or an empty answer a full reward"
        if len(full) > _MOST * len(best):
            shown = [f"row {known.items[n].index}: right is {known.references[n]!r}" for n in full[:_SHOWN]]
            yield red("reward-noise", text, shown)
        else:
            yield green("reward-noise", text)

    yield Trial([], judge)


def _form_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Compare what the form of an answer earns with what it earns to be right."""
    form = _best_form(known)
    numbers = [n for n in range(len(known.items)) if form in known.forms and known.is_right(form, n)]

    def judge(values: Values) -> Iterator[Finding]:
        if not numbers or form == "{}":
            return
        right, empty = mean_of([known.rewards[form][n] for n in numbers]), mean_of(values)
        floor = statistics.fmean(known.worthless[n] for n in numbers)
        text = f"{known.where}{shown_form(form)} with noise in it gets {empty:.3g}, with the right answer {right:.3g}"
        text += f", and noise without it {floor:.3g}"
        if floor < empty < right and empty - floor > right - empty:
            yield red("reward-form", f"{text}: the form alone earns more than to be right")
        else:
            yield green("reward-form", text)

    yield Trial([(known.items[n], form.format(NOISE)) for n in numbers], judge)


def _space_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Try right answers between white space, if they are right without any mark."""
    numbers = [n for n in range(len(known.items)) if _best_form(known) == "{}" and known.is_right("{}", n)]
    texts = [f" {known.forms['{}'][n]}\n" for n in numbers]

    def judge(values: Values) -> Iterator[Finding]:
        pairs = zip(numbers, values, strict=True)
        lost = [n for n, value in pairs if value is not None and value <= known.worthless[n]]
        if len(lost) > len(numbers) / 2:
            text = f"{known.where}a right answer with a space before it and a line break after it gets no reward"
            text += f": {texts[0]!r}. "
            if len(set(known.references)) <= len(known.references) / 2:
                yield not_checked("reward-space", f"{text}Must the label of a class stand alone? Else strip both texts")
            else:
                yield red("reward-space", f"{text}Strip both texts before they are compared")
        elif numbers:
            yield green("reward-space", f"{known.where}white space around right answers does not matter")

    yield Trial([(known.items[n], text) for n, text in zip(numbers, texts, strict=True)], judge)


def _again_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Score right answers again, after all others."""
    first = known.rewards.get(known.best, [])

    def judge(values: Values) -> Iterator[Finding]:
        other = [n for n, (one, again) in enumerate(zip(first, values, strict=False)) if one != again]
        if other:
            text = f"{known.where}after other answers, {len(other)} of {len(first)} right answers get another reward"
            shown = [f"row {known.items[n].index}: {first[n]} and {values[n]}" for n in other[:_SHOWN]]
            yield red("reward-repeatable", f"{text}: it depends on what was scored before", shown)

    yield Trial(list(zip(known.items, known.forms[known.best], strict=True)) if first else [], judge)


def _final_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Try the final answers of references that are whole worked solutions."""
    finals = [_final_answer(reference) for reference in known.references]
    if (
        not all(finals)
        or "{}" not in known.forms
        or sum(known.is_right("{}", n) for n in range(len(finals))) < len(finals) / 2
    ):
        return
    tried = [(number, form.format(final)) for number, final in enumerate(finals) for form in known.templates]

    def judge(values: Values) -> Iterator[Finding]:
        right = {
            number
            for (number, _), value in zip(tried, values, strict=True)
            if value is not None and value > known.worthless[number]
        }
        text = f"{known.where}the final answers of {len(finals)} references, such as {finals[0]!r}"
        if len(right) < len(finals) / 2:
            why = "get no reward in any form: only the whole reference is right, which no model would write"
            yield red("reward-final", f"{text}, {why}", [repr(known.references[0][-100:])])
        else:
            yield green("reward-final", f"{text}, are right")

    yield Trial([(known.items[number], text) for number, text in tried], judge)


def _final_answer(reference: str) -> str:
    """Return what a worked solution marks as its result, "" if it marks none."""
    if "####" in reference:
        final = reference.rpartition("####")[2].strip()
    else:
        final = reference.rpartition("\\boxed{")[2].partition("}")[0] if "\\boxed{" in reference else ""
    return final if len(final) + _LEAST_WORK < len(reference) else ""


TRIALS = (_final_trial, _wrong_trial, _right_trial, _noise_trial, _form_trial, _space_trial, _again_trial)
