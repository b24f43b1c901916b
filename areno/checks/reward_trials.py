"""Checks of a reward by single kinds of answers: cut at a stop string, long, or wrong with the right one inside."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areno.checks.inputs.answer_forms import reference_text, shown_form
from areno.checks.inputs.findings import Finding, examples, green, not_checked, red, shortened
from areno.checks.inputs.known_answers import NOISE, Asked, KnownAnswers, Trial, Values, mean_of, number_of
from areno.checks.wrong_answers import TRIALS as WRONG
from areno.config.rollout import GenerationConfig
from areno.types import PromptItem, RewardOutcome

Score = Callable[[Sequence[Asked]], Sequence[RewardOutcome]]
_FILLER = "First we read the question again, and then we work it out step by step. "
_MOST_FILLERS = 6
_MOST_LOST = 0.1  # of the answers
_MOST_TOLD = 0.5  # of the prompts that may end with their answer, more than end with that of another row
_MOST_OF_TRAIT = 0.8  # of the rows that fail, or that have a trait
_LEAST_TOLD, _FEW_TOLD, _OFTEN_OTHERS = 5, 0.01, 4  # prompts, share of the prompts, times as often as others
_ASKED = ("?", "=")  # ends of a question
_AROUND = ".,:;!?()[]{}*'\"<>/。"  # words
_SPACED = {"\\boxed{": " \\boxed ", "####": " #### ", "<": " <", ">": "> ", "\uff1a": ": "}
_LABEL_WORDS = 3  # before an answer, as in "the answer is 42"
_LABELS = {"answer", "solution", "correct", "label", "gold", "truth", "####", "\\boxed"}
_LABELS |= {"antwort", "lösung", "réponse", "respuesta", "risposta", "resposta", "ответ", "答案", "답", "정답"}
_SENTENCE = "The answer is {}."
_SHOWN = 3
_TRAITS: Mapping[str, Callable[[str], bool]] = {
    "have a comma": lambda text: "," in text,
    "are negative": lambda text: text.startswith("-"),
    "have a decimal point": lambda text: "." in text and number_of(text) is not None,
    "have a percent sign": lambda text: "%" in text,
    "have a currency": lambda text: any(sign in text for sign in "$€£"),
    "have a slash": lambda text: "/" in text,
    "have a backslash": lambda text: "\\" in text,
    "have a space": lambda text: " " in text,
    "have letters": lambda text: any(char.isalpha() for char in text),
}


def try_answers(known: KnownAnswers, score: Score) -> Iterator[Finding]:
    trials = [trial for make in (_stop_trial, _long_trial, *WRONG) for trial in make(known)]
    asked = [answer for trial in trials for answer in trial.answers]
    outcomes = list(score(asked))
    lost = [(text, outcome) for (_, text), outcome in zip(asked, outcomes, strict=True) if outcome.value is None]
    if lost:
        shown = [f"{text[:60]!r}: {outcome.status}: {_last_line(outcome.message)}" for text, outcome in lost[:_SHOWN]]
        text = f"{known.where}{len(lost)} of {len(asked)} longer or wrong answers have no reward"
        yield red("reward-failures", text, shown)
    values = iter(outcomes)
    judged = [list(trial.judge([next(values).value for _ in trial.answers])) for trial in trials]
    yield from judged.pop()  # what is scored last says whether rewards are repeatable, on which the others rest
    yield from itertools.chain.from_iterable(judged)


def _last_line(message: str) -> str:
    return [*message.strip().splitlines(), ""][-1]


# -- stop strings -----


def _stop_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Cut reference answers as sampling cuts them."""
    if not known.settings.stop and not known.settings.stop_token_ids:
        return
    cut: dict[tuple[str, int], tuple[str, str]] = {}  # (form, prompt) -> (text that is left, what cut it)
    for form, texts in known.forms.items():
        for number, text in enumerate(texts):
            found = sampled_part(known.tokenizer, known.settings, text)
            if found is not None and known.is_right(form, number):
                cut[form, number] = found

    def judge(values: Values) -> Iterator[Finding]:
        lost: dict[str, list[int]] = {}
        for (form, number), value in zip(cut, values, strict=True):
            if value is not None and value < (known.rewards[form][number] or 0.0):
                lost.setdefault(form, []).append(number)
        n_right = {form: sum(known.is_right(form, n) for n in range(len(known.items))) for form in known.forms}
        right = [form for form in known.forms if n_right[form] > len(known.items) / 2]
        wrong = [form for form in right if len(lost.get(form, ())) > _MOST_LOST * n_right[form]]
        # A rollout may well stop in the middle of some forms, if it can give its answer in another.
        meant = [form for form in wrong if _cuts_marker(form, cut[form, lost[form][0]][1], known.templates)]
        if wrong and (meant or len(wrong) == len(right)):
            form = (meant or wrong)[0]
            number = lost[form][0]
            left, by = cut[form, number]
            setting = "stop" if by in (known.settings.stop or ()) else "stop_token_ids"
            text = f"{known.where}gconfig.{setting} ends {len(lost[form])} of {n_right[form]} right answers too early"
            shown = [f"row {known.items[number].index}: {known.forms[form][number]!r} ends at {by!r}: {left!r}"]
            yield red("reward-stop", text, shown)
        else:
            yield green("reward-stop", f"{known.where}reference answers are right up to the stop strings of gconfig")

    yield Trial([(known.items[number], text) for (_, number), (text, _) in cut.items()], judge)


def _cuts_marker(form: str, by: str, templates: Sequence[str]) -> bool:
    """Whether a stop string stands before the answer in its form, as a mark of the answer, or in a worked solution."""
    if form not in templates:
        return bool(by.strip())
    before, _, after = form.partition("{}")
    return bool(by.strip()) and by.strip() in before and by.strip() not in after


def sampled_part(tokenizer: Any, settings: GenerationConfig, text: str) -> tuple[str, str] | None:
    """Return (the part of a text that sampling leaves, what ended it). None if nothing does before its end."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for n in range(max(1, settings.min_new_tokens), len(tokens)):
        part = tokenizer.decode(tokens[:n], skip_special_tokens=settings.skip_special_tokens)
        by = next((stop for stop in settings.stop or () if stop in part), None)
        if by is None and tokens[n - 1] in (settings.stop_token_ids or ()):
            by = tokenizer.decode(tokens[n - 1 : n])
        if by is not None:
            return part, by
    return None


# -- long answers -----


def _long_trial(known: KnownAnswers) -> Iterator[Trial]:
    """Compare right answers after many words with answers that have no worth, and with wrong ones as long."""
    n_items, right = len(known.items), known.forms[known.best]
    rooms = [known.settings.max_new_tokens - len(known.tokenizer.encode(text)) for text in right]
    n_fillers = min(_MOST_FILLERS, max(0, min(rooms)) // max(1, len(known.tokenizer.encode(_FILLER))))
    worked = [form for form in known.forms if form not in known.templates]
    answers: list[Asked] = []
    for form in worked:
        texts = known.forms[form]
        answers += zip(known.items, [*texts[1:], texts[0]], strict=True)
    if n_fillers:
        for texts in (right, [NOISE] * n_items):
            answers += [(item, n_fillers * _FILLER + text) for item, text in zip(known.items, texts, strict=True)]

    def judge(values: Values) -> Iterator[Finding]:
        means = [mean_of(values[start : start + n_items]) for start in range(0, len(values), n_items)]
        pairs = [(mean_of(known.rewards[form]), mean, form) for form, mean in zip(worked, means, strict=False)]
        reference, n_words = mean_of(known.rewards[known.best]), n_fillers * len(_FILLER.split())
        if n_fillers:
            pairs.append((means[-2], means[-1], f"after {n_words} more words"))
        for found, wrong, name in pairs:
            # A reward may not read every form. This one does, as it tells right from wrong.
            if wrong < found < known.floor:
                text = f"{known.where}the right answer {name} gets {found:.3g}, "
                text = text if name.startswith("after") else text.replace(name, f"as {shown_form(name)}")
                yield red("reward-length", f"{text}an answer that is empty or noise {known.floor:.3g}")
                return
        if n_fillers and _reads_texts(known) and means[-2] <= known.floor < reference:
            text = f"{known.where}the right answer after {n_words} more words gets {means[-2]:.3g}"
            yield red("reward-length", f"{text}, and {reference:.3g} without them: is a part of the text cut off?")
            return
        if n_fillers and means[-1] > max(reference, known.floor):
            text = f"{known.where}noise after {n_words} more words gets {means[-1]:.3g}, the right answer"
            yield red("reward-length", f"{text} {reference:.3g}")
        elif pairs:
            yield green("reward-length", f"{known.where}long right answers get no less than an empty one or noise")

    yield Trial(answers, judge)


def _reads_texts(known: KnownAnswers) -> bool:
    """Whether the reward reads an answer out of a sentence, so that more words before it should not matter."""
    return _SENTENCE in known.forms and mean_of(known.rewards[_SENTENCE]) > known.floor


# -- single rows -----


def has_trait(text: str) -> bool:
    """Whether an answer has something that a reward may not read, such as the comma of 1,000."""
    return any(trait(text) for trait in _TRAITS.values())


def each_row(
    where: str,
    items: Sequence[PromptItem],
    references: Sequence[str],
    floor: float,
    outcomes: Sequence[RewardOutcome],
    prompts: Sequence[PromptItem],
) -> Iterator[Finding]:
    """Look for rows whose reference answer gets no more than a worthless one, while most get the same larger reward."""
    values, name, n = [outcome.value for outcome in outcomes], "reward-each-row", len(items)
    known = [value for value in values if value is not None]
    if not known or not n:
        return
    [(top, count)] = Counter(known).most_common(1)
    if top <= floor or count < n / 2:
        return  # rewards are graded, or right answers have another form
    yield from _told_answers(where, items, references, prompts)
    failing = [at for at, value in enumerate(values) if value is None or value <= floor]
    if not failing:
        yield green(name, f"{where}the reference answers of {n} rows get the reward of a right answer, {top:g}")
        return
    rows = ", ".join(f"{items[at].index} ({shortened(references[at], 20)})" for at in failing[:_SHOWN])
    more = ", ..." * (len(failing) > _SHOWN)
    text = f"{where}the reference answers of {len(failing)} of {n} rows get no reward: rows {rows}{more}"
    raised = [outcomes[at].message.strip() for at in failing if outcomes[at].value is None]
    if raised:
        yield red(name, text, examples(message.splitlines()[-1] for message in raised if message))
        return
    for trait, has in _TRAITS.items():
        own = [at for at, reference in enumerate(references) if has(reference)]
        both = sum(at in own for at in failing)
        if both > 1 and both >= _MOST_OF_TRAIT * len(failing) and both >= _MOST_OF_TRAIT * len(own) and len(own) < n:
            yield red(name, f"{text}. {both} of the {len(own)} answers that {trait} are among them")
            return
    yield green(name, text)


def _told_answers(
    where: str, items: Sequence[PromptItem], references: Sequence[str], rows: Sequence[PromptItem]
) -> Iterator[Finding]:
    """Look for prompts with their own right answer, at the end or after a word. It may be the task to copy it.

    It is not if a label such as "Answer:" tells it, or if it follows on the question.
    """
    found = [*_told_at_end(where, items, references), *_told_after(where, rows)]
    yield min(found, key=lambda each: ("red", "not checked", "green").index(each.verdict))


def _told_at_end(where: str, items: Sequence[PromptItem], references: Sequence[str]) -> Iterator[Finding]:
    """Look for prompts that end with their own right answer. The same end of all prompts is left out."""
    texts = [item.text for item in items]
    n_same = 0
    while len(texts) > 1 and len({text[-1 - n_same :][:1] for text in texts}) == 1 and n_same < min(map(len, texts)):
        n_same += 1
    ends = [text[: len(text) - n_same].rstrip(" \n.") for text in texts]
    pairs = list(zip(ends, references, strict=True))
    own = statistics.fmean(end.endswith(answer) for end, answer in pairs)
    others = statistics.fmean(ends[at].endswith(references[at - 1]) for at in range(len(ends)))
    text = f"{where}{own:.0%} of {len(ends)} prompts end with their own right answer (by chance: {others:.0%})"
    if own - others <= _MOST_TOLD:
        yield green("told-answers", text)
        return
    before = [end.removesuffix(answer).rstrip() for end, answer in pairs if end.endswith(answer)]
    is_told = statistics.fmean(end.endswith(_ASKED) or _word_before([*_words(end), ""])[1] for end in before) > 0.5
    shown = [f"row {item.index}: {end[-40:]!r}" for item, end in zip(items[:_SHOWN], ends, strict=False)]
    yield _told(is_told, text, shown)


def _told_after(where: str, rows: Sequence[PromptItem]) -> Iterator[Finding]:
    """Look for a word that stands before the right answer wherever it stands before one of the answers at all."""
    given = Counter(reference_text(item).strip() for item in rows)
    own, others, by_chance = (
        dict[tuple[str, bool], list[PromptItem]](),
        Counter[tuple[str, bool]](),
        defaultdict[Any, float](float),
    )
    for item in rows:
        words, after = _words(item.prompt), dict[tuple[str, bool], set[str]]()
        for place in range(1, len(words)):
            if (answer := words[place].strip(_AROUND)) in given and answer:
                after.setdefault(_word_before(words[: place + 1]), set()).add(answer)
        for word, answers in after.items():
            by_chance[word] += 1 - sum(given[answer] for answer in answers) / len(rows)
            if reference_text(item).strip() in answers:
                own.setdefault(word, []).append(item)
            else:
                others[word] += 1
    least = max(_LEAST_TOLD, _FEW_TOLD * len(rows))
    telling = [
        word
        for word, found in own.items()
        # By chance, an instruction such as "yes or no" tells the right answer as often as most rows have it.
        if min(len(found), by_chance[word]) > max(least, _OFTEN_OTHERS * others[word])
        and len({reference_text(item) for item in found}) > 1
    ]
    if telling:
        word = max(telling, key=lambda each: (each[1], len(own[each])))
        text = f"{where}in {len(own[word])} of {len(rows)} prompts, their own right answer stands after {word[0]!r}"
        shown = [f"row {item.index}: {item.prompt[-80:]!r}" for item in own[word][:_SHOWN]]
        yield _told(word[1], f"{text}, and that of another row in {others[word]}", shown)


def _told(is_told: bool, text: str, shown: Sequence[str]) -> Finding:
    if is_told:
        return red("told-answers", f"{text}: the model would only copy it", shown)
    return not_checked("told-answers", f"{text}. Is it the task to copy it?", shown)


def _words(text: str) -> list[str]:
    for mark, spaced in _SPACED.items():
        text = text.replace(mark, spaced)
    return text.split()


def _word_before(words: Sequence[str]) -> tuple[str, bool]:
    """Return (the label of the last word, True), or (the word before it, False) if its sentence has no label there."""
    for word in reversed(words[-1 - _LABEL_WORDS : -1]):
        if word.endswith((".", "!", "?", ";", ",")):
            break
        if _LABELS & set(word.strip(_AROUND).lower().replace("-", "_").split("_")):
            return word.strip(_AROUND), True
    return words[-2].strip(_AROUND) if len(words) > 1 else "", False
