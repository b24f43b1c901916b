"""Tool calls and reasoning in what models write: real conversations, real templates, every way to cut a text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from areno.files.paths import data_root
from areno.server.parsers import (
    PARSERS,
    ParsedMessage,
    ToolCallParser,
    join_deltas,
    parser_for_template,
)
from tests.helpers.tokenizers import shared_tokenizer, trl_templates

DATA = Path(__file__).parents[3] / "shared/data/toolcall"
FAMILIES = ["hermes", "qwen3_coder", "llama3_json", "pythonic", "glm4_moe"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "bool"},
                "parts": {"type": "array", "items": {"type": "string"}},
                "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F", 7]},
            },
        },
    },
}
TOOLS = [WEATHER, {"name": "now", "parameters": {}}]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Zürich 🌧", "days": 3},
    {},
    {"city": 'a "quoted" \\ name\nwith </parameter> and </tool_call> in it', "exact": True, "share": 0.5},
    {"parts": ["]", "[x(", "'"], "options": {"deep": {"er": [1, None, {"k": "}"}]}}},
    {"options": None, "unit": "F"},
    {"unit": 7, "days": -2},
]


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def in_pieces(parser: ToolCallParser, pieces: list[str], **how: Any) -> ParsedMessage:
    stream = parser.stream(**how)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    for delta in deltas:
        assert [delta.content, delta.reasoning_content, delta.tool_call].count(None) == 2
    return join_deltas(deltas + stream.finish())


def written(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as a model of this family writes them."""
    if family == "hermes":
        lines = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)
    if family == "llama3_json":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if family == "pythonic":
        shown = (f"{name}({', '.join(f'{key}={value!r}' for key, value in each.items())})" for name, each in calls)
        return f"[{', '.join(shown)}]"
    blocks = []
    for name, arguments in calls:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        if family == "glm4_moe":
            parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
            blocks.append(f"<tool_call>{name}\n{parts}</tool_call>")
            continue
        parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>")
    return "\n".join(blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_come_back_whole_however_the_text_is_cut(family: str) -> None:
    parser = PARSERS[family]
    expected = [("get_weather", arguments) for arguments in ARGUMENTS] + [("now", {})]
    before = "" if family in ("llama3_json", "pythonic") else "Let me look.\n\n"
    text = f"<think>\nHm, <tool_call> or not?\n</think>\n\n{before}{written(family, expected)}"
    whole = parser.parse(text, TOOLS, message_id="m")
    assert calls_of(whole) == expected
    assert whole.reasoning_content == "Hm, <tool_call> or not?"
    assert whole.content == (before.strip() or None)
    assert [call.id for call in whole.tool_calls] == [f"call_m_{number}" for number in range(len(expected))]
    for cut in range(len(text) + 1):
        assert in_pieces(parser, [text[:cut], text[cut:]], tools=TOOLS, message_id="m") == whole
        # Cut off there, it still is the same at once as by the character.
        cut_off = parser.parse(text[:cut], TOOLS, message_id="m")
        if cut % 7 == 0:
            assert in_pieces(parser, list(text[:cut]), tools=TOOLS, message_id="m") == cut_off
        assert calls_of(cut_off) == expected[: len(cut_off.tool_calls)]


def test_text_streams_while_it_cannot_become_a_call() -> None:
    stream = PARSERS["hermes"].stream()
    said = [
        "".join(delta.content or "" for delta in stream.feed(piece)) for piece in ("a < b, ", "<tool", "s>", " x\n")
    ]
    assert said == ["a < b,", "", " <tools>", " x"]
    assert [delta.content for delta in stream.finish()] == ["\n"]


PIECES = {
    "hermes": '<tool_call> </tool_call> {"name":"f", "arguments":{ "a": 1 }} " \\ < {',
    "qwen3_coder": "<tool_call> </tool_call> <function=f> </function> <parameter=a> </parameter> < > x = 1.5",
    "glm4_moe": "<tool_call> f</tool_call> <arg_key> a</arg_key> <arg_value> </arg_value> < > x = 1.5",
    "llama3_json": '<|python_tag|> {"name":"f", "parameters":{ "a": 1 }} ; " \\u00 [ {',
    "pythonic": '<|python_start|> <|python_end|> [ ] f( ) a= 1 \' """ , { } \\x4 ( - None',
}
# One call of each family amid text.
AMID = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "qwen3_coder without tags": "<function=now>\n</function>",
    "glm4_moe": "<tool_call>now\n</tool_call>",
    "glm4_moe without line breaks": "<tool_call>now</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {}}',
    "pythonic": "<|tool_call_start|>[now()]<|tool_call_end|>",
}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("I look it up.\n\n@\nNow the second.", "I look it up.\n\n\nNow the second."),
        ("a @ b", "a  b"),
        ("a@ b @\n@\tc\n", "a b \n\tc"),
        ("a @\n@\n ", "a"),
        (" @ b", "b"),
        ("a\n<tool @\n b", "a\n<tool \n b"),
        ("<think>\nHm.\n</think>\n\n@\n\nb", "b"),
    ],
)
@pytest.mark.parametrize("family", AMID)
def test_space_between_the_texts_around_calls_stays(family: str, text: str, content: str) -> None:
    parser, written = PARSERS[family.split()[0]], text.replace("@", AMID[family])
    whole = parser.parse(written, TOOLS, message_id="m")
    assert (whole.content, len(whole.tool_calls)) == (content, text.count("@"))
    assert in_pieces(parser, list(written), tools=TOOLS, message_id="m") == whole


COMMON = ["<think>", "</think>", "\n", " ", "word", "\u00e9", "\U0001f600", "\x00", "\ud800", "1e999", "NaN", "[" * 60]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_and_truncated_texts(family: str) -> None:
    """No exception; arguments are JSON; every cut gives the same; nothing but space and tags of calls is lost."""
    rng, parser, n_calls = random.Random(family), PARSERS[family], 0
    pieces = PIECES[family].split()
    calls = [("f", {"a": 1}), ("get_weather", ARGUMENTS[2]), ("f", {})]
    for _ in range(3_000):
        if rng.random() < 0.4:
            text = "".join(rng.choices(pieces * 3 + COMMON, k=rng.randrange(1, 16)))
        else:
            text = rng.choice(["", "<think>\nx\n</think>\n\n"]) + written(
                family, rng.sample(calls, rng.randrange(1, 4))
            )
            for _ in range(rng.randrange(3)):
                at = rng.randrange(len(text) + 1)
                text = text[:at] + rng.choice(pieces + COMMON) + text[at + rng.randrange(3) :]
            text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.5 else text
        how: dict[str, Any] = {
            "tools": rng.choice([None, None, TOOLS, [{"name": "f"}], [], ["none", {"function": 3}, {"name": None}]]),
            "in_reasoning": rng.random() < 0.2,
            "message_id": "m",
        }
        whole = parser.parse(text, **how)
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(5)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert in_pieces(parser, parts, **how) == whole, text
        n_calls += len(whole.tool_calls)
        if not whole.tool_calls:
            kept = (whole.reasoning_content or "") + (whole.content or "")
            tagless = text.replace("<think>", "", 1).replace("</think>", "", 1)
            assert len(kept.replace("\n", "")) >= len(tagless.replace("\n", "").lstrip()), text
    assert n_calls > 300


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"} and more</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("glm4_moe", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"),
        ("glm4_moe", "<tool_call>f\n<arg_key>a</arg_key>\n1\n</tool_call>"),
        ("glm4_moe", "<tool_call>f\n<arg_key></arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("glm4_moe", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("glm4_moe", "<tool_call>a call</tool_call>"),
        ("glm4_moe", "<tool_call></tool_call>"),
        ("llama3_json", 'The answer: {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "f", "parameters": '),
        ("llama3_json", '<|python_tag|>import os; os.system("true")'),
        ("pythonic", "[1] says so"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=__import__('os').system('true'))]"),
        ("pythonic", "[f(a=1+1)]"),
        ("pythonic", "[f(a=[x for x in ()])]"),
        ("pythonic", "[f(a=f'{1}')]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a={1: 2})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=1)] is how it is called"),
        ("pythonic", "[f(a=" + "(" * 5_000 + ")" * 5_000 + ")]"),
        ("text", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ],
)
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    assert PARSERS[family].parse(text) == ParsedMessage(content=text)


def test_an_answer_in_json_is_no_call_unless_it_names_a_tool() -> None:
    answer = '{"name": "Ada", "parameters": {"age": 36}}'
    parser = PARSERS["llama3_json"]
    assert parser.parse(answer, TOOLS).content == answer
    assert parser.parse(answer, []).content == answer
    assert calls_of(parser.parse(answer.replace("Ada", "now"), TOOLS)) == [("now", {"age": 36})]
    assert PARSERS["pythonic"].parse("[find(a=1)]", TOOLS).content == "[find(a=1)]"


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning(family: str) -> None:
    parser = PARSERS[family]
    assert parser.parse("<think>\na\n\nb\n</think>\n\nc") == ParsedMessage("c", "a\n\nb")
    assert parser.parse("a\n</think>\n\nc", in_reasoning=True) == ParsedMessage("c", "a")
    assert parser.parse("a\n", in_reasoning=True) == ParsedMessage(None, "a")
    assert parser.parse("<think>\n\n</think>\n\nc") == ParsedMessage("c", None)
    assert parser.parse("a <think> b </think>") == ParsedMessage("a <think> b </think>")
    assert parser.parse("") == ParsedMessage("")
    assert parser.parse(" \n") == ParsedMessage(" \n")


def test_values_in_xml_have_the_types_of_the_schema() -> None:
    def value(key: str, text: str) -> Any:
        call = f"<function=get_weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        [(_, arguments)] = calls_of(PARSERS["qwen3_coder"].parse(call, TOOLS))
        return arguments[key]

    cases = [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("days", "5", 5),
        ("days", "5.0", 5),
        ("days", "soon", "soon"),
    ]
    cases += [("days", "true", True), ("share", "5", 5), ("exact", "True", True), ("parts", '["a"]', ["a"])]
    cases += [("options", "None", None), ("options", '{"a": 1}', {"a": 1}), ("unit", "C", "C"), ("unit", "7", 7)]
    cases += [
        ("other", "5", "5"),
        ("share", "1e999", "1e999"),
        ("parts", "[NaN]", "[NaN]"),
        ("city", "\n a \n", "\n a \n"),
    ]
    for key, text, expected in cases:
        assert value(key, text) == expected, (key, text)


@pytest.mark.parametrize("seed", range(3))
def test_literals_of_python_are_read_as_python_reads_them(seed: int) -> None:
    rng = random.Random(seed)

    def literal(depth: int) -> Any:
        kind = rng.randrange(5 if depth > 3 else 8)
        if kind == 0:
            return rng.choice([True, False, None])
        if kind == 1:
            return rng.randrange(-(10**9), 10**9)
        if kind == 2:
            return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20)
        if kind < 5:
            return "".join(rng.choices("ab'\"\\\n\t\r\x00\x1f\u2028é\U0001f600 {}[](),=", k=rng.randrange(8)))
        if kind == 5:
            return tuple(literal(depth + 1) for _ in range(rng.randrange(4)))
        if kind == 6:
            return [literal(depth + 1) for _ in range(rng.randrange(4))]
        return {f"k{i}'": literal(depth + 1) for i in range(rng.randrange(4))}

    for _ in range(300):
        arguments = {f"a{i}": literal(0) for i in range(rng.randrange(4))}
        text = written("pythonic", [("f", arguments)])
        assert calls_of(PARSERS["pythonic"].parse(text)) == [("f", json.loads(json.dumps(arguments)))], text


# Real conversations, real templates -----------------------------------------------------------------------------------


def real_conversations() -> list[tuple[list[Any], list[dict[str, Any]]]]:
    """(tools, assistant messages with a call or reasoning) of each row."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    found = []
    for row in json.loads((DATA / "glaive_toolcall_en_demo.json").read_text(encoding="utf-8")):
        calls = [json.loads(turn["value"]) for turn in row["conversations"] if turn["from"] == "function_call"]
        found.append((json.loads(row["tools"]) if row["tools"] else [], [{"calls": [call]} for call in calls]))
    for line in (DATA / "reason_tool_use_demo_50.jsonl").open(encoding="utf-8"):
        row, turns = json.loads(line), []
        for message in row["messages"]:
            if message["role"] == "assistant":
                parts = {"reasoning": "", "text": "", "tool_call": []}
                for part in message["content"]:
                    parts[part["type"]] += [part["value"]] if part["type"] == "tool_call" else part["value"]
                calls = [json.loads(call) for call in parts["tool_call"]]
                turns.append({"calls": calls, "content": parts["text"], "reasoning_content": parts["reasoning"]})
        found.append((json.loads(row["tools"]), turns))
    return found


def _type_of(tools: list[Any], name: str, key: str) -> str:
    """What the schemas say of an argument; a string where they say nothing."""
    functions = {each["name"]: each["parameters"] for each in (tool.get("function", tool) for tool in tools)}
    properties = functions.get(name, {}).get("properties", functions.get(name, {}))
    return properties.get(key, {}).get("type", "string")


def template_of(name: str, tokenizer_of: Any) -> tuple[Any, str]:
    """A tokenizer with a real chat template: one of those beside the checkout, or one that trl carries."""
    if name in ("qwen3", "minimind"):
        tokenizer = shared_tokenizer(name)
    else:
        if name not in trl_templates():
            pytest.skip("trl, which has the template, is not installed")
        tokenizer = tokenizer_of("tiny")
        tokenizer.chat_template = trl_templates()[name]
    return tokenizer, tokenizer.chat_template


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("qwen3", "hermes"),
        ("minimind", "hermes"),
        ("qwen2_5", "hermes"),
        ("qwen3_6", "qwen3_coder"),
        ("nemotron_3_nano", "qwen3_coder"),
        ("llama3_1", "llama3_json"),
        ("llama3_2", "llama3_json"),
        ("lfm2_2_5", "pythonic"),
        ("glm4moe", "glm4_moe"),
    ],
)
def test_real_calls_as_real_templates_render_them(template: str, family: str, tokenizer_of: Any) -> None:
    tokenizer, text = template_of(template, tokenizer_of)
    parser = parser_for_template(text)
    assert parser.name == family
    user, marks = {"role": "user", "content": "hi"}, ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
    n_calls = n_loose = 0
    for tools, turns in real_conversations():
        for turn in turns:
            calls = turn["calls"][:1] if family == "llama3_json" else turn["calls"]
            if family == "pythonic" and {"'", "\\"} & set(json.dumps([call["arguments"] for call in calls])):
                continue  # this template escapes nothing in strings
            message: dict[str, Any] = {"role": "assistant", "content": turn.get("content", "")}
            if calls:
                message["content"] = ""
                message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            if family != "llama3_json" and (reasoning := turn.get("reasoning_content", "").strip()):
                message["reasoning_content"] = reasoning
            asked = tokenizer.apply_chat_template(
                [user], tools=tools or None, tokenize=False, add_generation_prompt=True
            )
            shown = tokenizer.apply_chat_template([user, message], tools=tools or None, tokenize=False)
            answer = (
                shown[asked.rindex("assistant") + len("assistant") :]
                .removeprefix("<|end_header_id|>")
                .removeprefix("|>")
                .lstrip()
            )
            for mark in marks:
                answer = answer.split(mark)[0]
            found = parser.parse(answer, tools or None)
            expected = [(call["name"], dict(call["arguments"])) for call in calls]
            for name, arguments in expected if family in ("qwen3_coder", "glm4_moe") else []:
                # XML does not tell a number from a string; the schema must say that it is none.
                loose = {key for key in arguments if _type_of(tools, name, key)[:3] == "str"}
                loose = {key for key in loose if not isinstance(arguments[key], str)}
                arguments.update({key: json.dumps(arguments[key]) for key in loose})
                n_loose += len(loose)
            assert calls_of(found) == expected, answer
            assert (found.content or "").strip() == message["content"].strip()
            n_calls += len(expected)
    assert n_calls > 200
    assert n_loose < 10


def test_which_parser_a_template_asks_for(tokenizer_of: Any) -> None:
    assert parser_for_template(tokenizer_of("phi3-v").chat_template).name == "text"
    assert parser_for_template(None).name == "text"
    assert PARSERS["hermes"] is parser_for_template(tokenizer_of("tiny").chat_template)
    assert set(FAMILIES) < PARSERS.keys()


def test_nothing_of_the_parsers_can_execute_what_it_reads() -> None:
    for path in (data_root() / "areno/server/parsers").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not any(f"{name}(" in source for name in ("eval", "exec", "compile", "__import__")), path
