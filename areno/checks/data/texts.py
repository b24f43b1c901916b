"""Checks of marks in texts: of a chat template, of other templates, and tokens that end an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from areno.checks.inputs.findings import Finding, NotChecked, examples, green, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import answers_of, markers_of, text_of, text_of_row

_EXAMPLES = 3
_MOST_MARKED = 0.05  # of the rows: a few may well write about templates
_LEAST, _MOST_TOKENS = 3, 0.01  # rows, and share of the rows, with a control token, which texts hardly have
_BAR = "\uff5c"  # of DeepSeek's tokens
_TOKENS = ("im_start", "im_end", "system", "user", "assistant", "start_header_id", "end_header_id", "eot_id", "return")
_TOKENS += ("begin_of_text", "end_of_text", "endoftext", "end", "start", "message", "channel", "START_OF_TURN_TOKEN")
_TOKENS = (*(f"<|{name}|>" for name in _TOKENS), *(f"<{_BAR}{name}{_BAR}>" for name in ("User", "Assistant")))
_TOKENS += ("[INST]", "[/INST]", "<<SYS>>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "<bos>", "<eos>")
_TOKENS += ("<pad>", "[PAD]", "<unk>", "[UNK]", "<|pad|>", "<|eot|>")
_PHRASES = ("### Instruction:", "### Response:", "\nAssistant:", "\nHuman:", "ASSISTANT:", "\n### User:")
_PHRASES += ("\n### Assistant:",)
_FOREIGN = (*_TOKENS, *_PHRASES)


def template_markers(subject: Subject) -> Iterator[Finding]:
    """Look for messages that a chat template has already rendered: this run's own, or another."""
    if subject.tokenizer.chat_template is None:
        raise NotChecked("the tokenizer has no chat template: texts are encoded as they are")
    own, ends = markers_of(subject.tokenizer), set(end_texts(subject))
    for dataset in subject.datasets:
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        found: dict[str, list[int]] = {}
        for row in rows:
            texts = [text_of_row(subject.kind, row.row, is_asked) for is_asked in (True, False)]
            of_texts = [{mark for mark in (*own, *_FOREIGN) if mark in text} for text in texts]
            for mark in of_texts[0] | (of_texts[1] - ends):  # see end_tokens for those in answers
                found.setdefault(mark, []).append(row.index)
        whole = {mark: at for mark, at in found.items() if mark in own}
        marked = whole or found
        # The longest of the marks that most rows have says most.
        mark = max(marked, key=lambda each: (len(marked[each]), len(each)), default="")
        n = len(marked.get(mark, ()))
        most = _MOST_MARKED * len(rows) if mark in _PHRASES else max(_LEAST, _MOST_TOKENS * len(rows))
        text = f"{dataset.key}: the messages of {n} of {len(rows)} rows contain {mark!r}"
        if n > most:
            why = "they are already rendered, and the chat template would be around them twice"
            if not whole:
                why = "they are written for another chat template than that of the tokenizer"
            first = [row for row in rows if row.index in marked[mark][:_EXAMPLES]]
            shown = [f"row {row.index}: {_around(text_of_row(subject.kind, row.row), mark)}" for row in first]
            yield red("template-markers", f"{text}: {why}", shown)
        elif n:
            yield green("template-markers", f"{text}, the first is row {marked[mark][0]}")
        else:
            yield green("template-markers", f"{dataset.key}: no message contains marks of a chat template")


def end_tokens(subject: Subject) -> Iterator[Finding]:
    """Look for answers that have a token at which the rollout stops before their end, or the text of one."""
    if subject.kind in ("prompt", "prm"):
        return
    texts = end_texts(subject)
    for dataset in subject.datasets:
        faults, n_answers, sides = list[str](), 0, Counter[int]()
        for row in subject.sample_of(dataset):
            if row.item is None:
                continue
            for number, turns in enumerate(answers_of(subject.kind, row.row)):
                for answer in turns:
                    n_answers += 1
                    said = text_of(answer.message)
                    if mark := next((text for text in texts if text in said), ""):
                        sides[number] += 1
                        faults.append(f"row {row.index}: {_around(said, mark)}")
        names = ("chosen", "rejected")
        where = f" (all of them {names[next(iter(sides))]})" if subject.kind == "dpo" and len(sides) == 1 else ""
        text = f"{dataset.key}: {len(faults)} of {n_answers} answers{where} contain the text of a token that ends them"
        if len(faults) > max(_LEAST, _MOST_TOKENS * n_answers):
            yield red("end-tokens", f"{text}, so it is there twice", examples(faults))
        else:
            yield green("end-tokens", text, examples(faults))


def end_texts(subject: Subject) -> list[str]:
    found = [subject.tokenizer.decode([token], skip_special_tokens=False) for token in sorted(subject.end_ids)]
    return [text for text in found if text.strip()]


def _around(text: str, mark: str) -> str:
    at = text.find(mark)
    return repr(text[max(0, at - 30) : at + len(mark) + 30])
