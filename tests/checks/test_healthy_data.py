"""Healthy data of many kinds, in which `areno check` finds nothing red: labels, code, web pages, proteins, scripts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checked import red
from tests.helpers.checked_rows import dpo, sentences, sft

pytestmark = pytest.mark.slow

Row = dict[str, Any]
N = 200


def rows_of(prompt: str, response: str, every: int = 1) -> list[Row]:
    """Rows of which each, or each of `every`, has these texts. {n} in them is a number, and {said} are sentences."""
    plain = ("What is {n} plus {n}?", "We add both. {said}")
    forms = [(prompt, response) if n % every == 0 else plain for n in range(N)]
    return [
        {
            "prompt": asked.replace("{n}", str(n)),
            "response": said.replace("{n}", str(n)).replace("{said}", sentences(n)),
        }
        for n, (asked, said) in enumerate(forms, 100)
    ]


def drawn(letters: str, most: int) -> Iterator[str]:
    chance = random.Random(1)
    return ("".join(chance.choices(letters, k=chance.randrange(70, most))) for _ in range(N))


def labelled(*labels: str) -> list[Row]:
    return [{**row, "response": labels[n % len(labels)]} for n, row in enumerate(rows_of("What of {n}: {said}", ""))]


SHOWN = "Write a page about {n}."
HEALTHY: dict[str, list[Row]] = {
    "a label none": labelled("none", "against", "favor"),
    "a label None": labelled("None", "Against", "Favor"),
    "None where the prompt asks for it": [
        {**row, "response": "None" if n % 5 == 0 else row["response"]}
        for n, row in enumerate(rows_of("Which drug is in {n}? Say None if there is none.", "{said}"))
    ],
    "a form with None": rows_of("{n}\nAllergies: None\nAnswer in one sentence.", "{said}", 3),
    "code with braces": rows_of("Print {n}.", '```python\ndef f(text):\n    print(f"{n}: {text}")\n```\n{said}', 20),
    "code with braces, not fenced": rows_of("Print {n}.", 'text = "{n}"\nreturn f"{text} and {n}"'),
    "prompts of one length": rows_of(
        f"Write a Python function with the number {{n}} that prints a text. {SHOWN}", "{said}"
    ),
    "code in one line": rows_of(
        "Print {n}.", "using System; Console.WriteLine(a.Length); Console.Write(b.Count); Console.Read({n});", 20
    ),
    "a line break that is named": rows_of('Split {n} on \\n or \\t characters, and "\\n" in quotes.', "{said}", 40),
    "a line break in inline code": rows_of("What is `{n}\\nA`?", "It is ``{n}\\nB``, not `&amp;`. {said}", 40),
    "JSON": [
        {**row, "response": json.dumps({"text": f"Voil\u00e0:\n{row['response']}\nSo.", "note": None})}
        for row in rows_of("Extract {n} as JSON.", "{said}")
    ],
    "quotes in a command": rows_of("Say {n} in a shell.", 'echo "{n} is \\"it\\""'),
    "pages in a fence": rows_of(SHOWN, "```html\n<div>\n  <p>{said}</p>\n</div>\n```"),
    "pages": rows_of(SHOWN, "<!DOCTYPE html>\n<html>\n<body>\n<p>{said}</p>\n</body>\n</html>"),
    "entities that are asked about": rows_of("How do I write &amp; and &lt; in page {n}?", "{said}", 40),
    "proteins": [
        {"prompt": f"Go on: {n}", "response": text} for n, text in enumerate(drawn("ACDEFGHIKLMNPQRSTVWY", 90))
    ],
    "genes": [{"prompt": f"Go on: {n}", "response": text} for n, text in enumerate(drawn("acgt", 90))],
    "molecules": [
        {"prompt": f"Go on: {n}", "response": f"C{text}"} for n, text in enumerate(drawn("CCccccNO()=1", 90))
    ],
    "paths": rows_of("Where is {n}?", "src/library/something/interesting/another_folder/with/many/words/file_{n}.py"),
    "users who write twice": [
        {"messages": [*talk[:1], *([{"role": "user", "content": f"And {n}?"}] if n % 8 == 0 else []), *talk[1:]]}
        for n, row in enumerate(rows_of("What is {n}?", "{said}"))
        for talk in [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]]
    ],
    "Khmer": rows_of(
        "\u179f\u17bd\u179f\u17d2\u178f\u17b8\u200b\u1796\u17b7\u1797\u1796 {n}",
        "\u1794\u17b6\u1791\u200b\u1785\u17b6\u179f. {said}",
    ),
}


@pytest.mark.parametrize("rows", HEALTHY.values(), ids=HEALTHY)
def test_nothing_is_red_in_healthy_rows(rows: list[Row], tmp_path: Path) -> None:
    found = sft(tmp_path, rows=rows)
    assert not red(found), [each.line for each in found if each.verdict == "red"]


def paired(chosen: str, rejected: str) -> list[Row]:
    def text(form: str, n: int, first: int) -> str:
        return (
            form.replace("{n}", str(n)).replace("{said}", sentences(first + n)).replace("{more}", sentences(first - n))
        )

    return [
        {"prompt": f"Tell me of {n}, as JSON.", "chosen": text(chosen, n, 2000), "rejected": text(rejected, n, 8000)}
        for n in range(N)
    ]


PAIRS = {
    "refusals": paired("I'm sorry, but I can't help with that. {said}", "Sure, here is how. {said}"),
    "short refusals": paired("I can't help with {n}.", "{said}"),
    "paragraphs": paired("{said}\n\n**Note** {more}", "{said} {more}"),
    "JSON": paired('{"answer": {n}, "why": "{said}"}', "The answer is {n}. {said}"),
    "code": paired("```json\n{n}\n```", "Sure, this is it: {n}. {said}"),
    "another language": paired(
        "La r\u00e9ponse est le {n} de la liste. {said}", "This is the one of that list: {n}. {said}"
    ),
    "mostly longer": paired("{said} {more}", "{said}")[:187] + paired("{said}", "{said} {more}")[187:],
}


@pytest.mark.parametrize("rows", PAIRS.values(), ids=PAIRS)
def test_nothing_is_red_in_healthy_pairs(rows: list[Row], tmp_path: Path) -> None:
    found = dpo(tmp_path, rows)
    assert not red(found), [each.line for each in found if each.verdict == "red"]
