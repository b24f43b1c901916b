"""The forms in which a right answer is tried: with a mark, after reasoning, or as a worked solution of the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from areno.types import PromptItem

_PLAIN = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "<answer>\\boxed{{{}}}</answer>")
_PLAIN += ("The answer is {}.", "Answer: {}")
REASONING = "I add."
_OPEN, _REASONED = "<think>\n", f"{REASONING}\n</think>\n\n"
_GAPS = ("", " ", "\n")  # between a tag and a text
_WORKED = ("answer", "solution", "response", "output", "completion", "reasoning")  # fields with a whole answer
_LEAST_WORK = 10  # characters of a worked solution beside its answer


def templates_of(items: Sequence[PromptItem]) -> tuple[str, ...]:
    """Return the forms that have a place for the answer. A completion goes on from its prompt.

    If the prompt has opened the reasoning, the completion does not open it again.
    """
    reasoned, tagged = [f"{_REASONED}{form}" for form in _PLAIN], _tagged_forms(items)
    if _opens_reasoning(items):
        forms = [*reasoned, *_PLAIN, *tagged]
    else:
        forms = [*_PLAIN, *(f"{_OPEN}{form}" for form in reasoned), "```python\n{}\n```", *tagged]
    return tuple(dict.fromkeys(forms))


def _tagged_forms(items: Sequence[PromptItem]) -> Iterator[str]:
    """Yield forms of the tags that all prompts name, such as <think> and <answer>, in one line and in lines."""
    prompts = [item.prompt for item in items]
    named = [part.partition(">")[0] for part in prompts[0].split("<")[1:]] if prompts else []
    tags = [tag for tag in named if tag.isalpha() and all(f"<{tag}>" in prompt for prompt in prompts)]
    last = "answer" if "answer" in tags else [*tags, ""][-1]
    first = "think" if _opens_reasoning(items) else next((tag for tag in tags if tag != last), "")
    if not last or last == "think":
        return
    for gap in _GAPS:
        for answer in ("{}", *["\\boxed{{{}}}"] * all("\\boxed" in prompt for prompt in prompts)):
            form = f"<{last}>{gap}{answer}{gap}</{last}>"
            yield form
            opened = "" if _opens_reasoning(items) else f"<{first}>{gap}"
            yield f"{opened}{REASONING}{gap}</{first}>{gap}{form}" if first else form


def shown_form(form: str) -> str:
    """Return a form as a message shows it."""
    text = form.format("...") if "{}" in form else form
    return "bare" if form == "{}" else f"'{text}'".replace("\n", "\\n")


def reference_text(item: PromptItem) -> str:
    given = item.solutions
    if isinstance(given, list | tuple) and given:
        given = given[0]
    return str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""


def reference_forms(items: Sequence[PromptItem]) -> dict[str, list[str]]:
    """Return form -> the reference answer of each prompt in this form. Empty without reference answers."""
    forms: dict[str, list[str]] = {}
    references = [reference_text(item) for item in items]
    if all(references):
        forms |= {form: [form.format(text) for text in references] for form in templates_of(items)}
    for name in dict.fromkeys([*_WORKED, *items[0].record]):
        worked = [text for item in items if isinstance(text := item.record.get(name), str) and text]
        if len(worked) == len(items) and (name in _WORKED or _are_worked(items, worked)):
            forms[name] = worked
    return forms


def reopened_forms(items: Sequence[PromptItem]) -> dict[str, list[str]]:
    """Return right answers that open the reasoning a second time. Empty if the prompts have not opened it."""
    references = [reference_text(item) for item in items]
    if not _opens_reasoning(items) or not all(references):
        return {}
    return {
        f"{_OPEN}{_REASONED}{form}": [f"{_OPEN}{_REASONED}{form}".format(text) for text in references]
        for form in _PLAIN
    }


def _opens_reasoning(items: Sequence[PromptItem]) -> bool:
    return bool(items) and all(item.text.rstrip().endswith(_OPEN.strip()) for item in items)


def _are_worked(items: Sequence[PromptItem], texts: Sequence[str]) -> bool:
    """Whether texts are longer than the reference answers, contain them, and are no part of the prompts."""
    references = [reference_text(item) for item in items]
    return all(
        reference and reference in text and len(text) > len(reference) + _LEAST_WORK and text not in item.text
        for item, reference, text in zip(items, references, texts, strict=True)
    )
