"""Text and messages to tokens, through the tokenizer's chat template.

One rule for prompts: messages always go through the chat template; a plain text goes through it as one user message if
the tokenizer has a template, and is encoded as it is (special tokens such as BOS added) if it has none.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areno.api.row_forms import split_pair
from areno.api.types import Message, PairItem, PromptItem
from areno.engine.types import TrainSequence
from areno.errors import DataError

Prompt = str | Sequence[Message]

_END_MARK = "\ue000areno-end\ue001"  # private-use characters: no template or content has them


def render_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> str:
    """The text a model is given to continue. Raises DataError for messages without a chat template."""
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt
        raise DataError(
            "messages need a tokenizer with a chat template; "
            "set tokenizer_path to one that has it, or give the prompt as text"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return _render(tokenizer, messages, enable_thinking, tools, add_generation_prompt=True)


def encode_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> list[int]:
    """Token ids of `render_generation_prompt`. The one rule for prompts stands at the top of this file."""
    text = render_generation_prompt(tokenizer, prompt, enable_thinking, tools)
    return tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)


def prompt_item(
    tokenizer: Any,
    row: Mapping[str, Any],
    index: int,
    enable_thinking: bool | None = None,
    *,
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
) -> PromptItem:
    """One RL row, encoded."""
    prompt = row[prompt_key]
    text = render_generation_prompt(tokenizer, prompt, enable_thinking, _tools(row))
    plain = isinstance(prompt, str)
    return PromptItem(
        prompt=prompt if plain else text,
        text=text,
        tokens=tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None),
        messages=None if plain else [dict(message) for message in prompt],
        solutions=row.get(solutions_key),
        record=row,
        index=index,
    )


def sft_sequence(tokenizer: Any, row: Mapping[str, Any], enable_thinking: bool | None = None) -> TrainSequence:
    """One supervised row: {prompt, response} trains on the response and its end, {messages} on every assistant turn."""
    if row.get("response") is not None:
        return _answer(tokenizer, row["prompt"], row["response"], enable_thinking, _tools(row))
    return _conversation(tokenizer, list(row["messages"]), 0, enable_thinking, _tools(row))


def pair_item(tokenizer: Any, row: Mapping[str, Any], index: int) -> PairItem:
    """One DPO row. Answers are encoded as those of supervised rows; turns in the prompt are not trained on."""
    prompt, *answers = split_pair(row)
    tools = _tools(row)
    if isinstance(answers[0], str):
        pair = [_answer(tokenizer, prompt, answer, None, tools) for answer in answers]
    else:
        pair = [_conversation(tokenizer, [*prompt, *answer], len(prompt), None, tools) for answer in answers]
    for name, sequence in zip(("chosen", "rejected"), pair, strict=True):
        if all((sequence.prompt_mask or [])[1:]):
            raise DataError(f"the answer in field {name} has no token to train on")
    return PairItem(chosen=pair[0], rejected=pair[1], index=index)


def _answer(tokenizer: Any, prompt: Prompt, answer: str, thinking: bool | None, tools: Any) -> TrainSequence:
    """A prompt and its answer, which is trained on, with its end."""
    tokens = encode_generation_prompt(tokenizer, prompt, thinking, tools)
    response = tokenizer.encode(answer, add_special_tokens=False)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token; set tokenizer_path to one that has")
    return _sequence(tokenizer, [(tokens, False), ([*response, tokenizer.eos_token_id], True)])


def _conversation(tokenizer: Any, messages: list[Any], first: int, thinking: bool | None, tools: Any) -> TrainSequence:
    """A conversation, of which the assistant's turns are trained on from message number `first` on."""
    return _sequence(tokenizer, _conversation_pieces(tokenizer, messages, first, thinking, tools))


def _sequence(tokenizer: Any, pieces: list[tuple[list[int], bool]]) -> TrainSequence:
    return TrainSequence(
        tokens=[token for piece, _ in pieces for token in piece],
        prompt_mask=[not trained for piece, trained in pieces for _ in piece],
        eos_token_id=tokenizer.eos_token_id or 0,
    )


def _tools(row: Mapping[str, Any]) -> Any:
    """The row's tool descriptions; many data sets hold them as JSON text."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except json.JSONDecodeError as error:
        raise DataError(f"field tools is text, but not JSON: {error.msg}") from error


def _render(tokenizer: Any, messages: list[Any], thinking: bool | None, tools: Any, **options: Any) -> str:
    if thinking is not None:
        options["enable_thinking"] = thinking
    try:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except TypeError:
            if thinking is None:
                raise
            # Some tokenizers bring a method of their own that does not know the switch; there it has no meaning.
            del options["enable_thinking"]
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:  # whatever the template's author raises
        raise DataError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error


def _conversation_pieces(
    tokenizer: Any, messages: list[Any], first: int, thinking: bool | None, tools: Any
) -> list[tuple[list[int], bool]]:
    """A conversation as (tokens, trained) pieces, encoded apart, as prompt and completion are in a rollout.

    Assistant turns before message number `first` are not trained on.
    """
    if tokenizer.chat_template is None:
        raise DataError("messages need a tokenizer with a chat template; set tokenizer_path to one that has it")
    if re.search(r"\{%-?\s*generation\b", tokenizer.chat_template):
        return _pieces_by_template(tokenizer, messages, first, tools)
    text = _render(tokenizer, messages, None, tools, add_generation_prompt=False)
    earlier = sum(message["role"] == "assistant" for message in messages[:first])
    pieces = []
    at = 0
    for start, end in assistant_spans(tokenizer, messages, text, thinking, tools)[earlier:]:
        pieces += [(text[at:start], False), (text[start:end], True)]
        at = end
    pieces.append((text[at:], False))
    return [(tokenizer.encode(piece, add_special_tokens=False), trained) for piece, trained in pieces if piece]


def _pieces_by_template(tokenizer: Any, messages: list[Any], first: int, tools: Any) -> list[tuple[list[int], bool]]:
    """The template itself marks what the assistant says ({% generation %})."""

    def turns(messages: list[Any]) -> list[tuple[list[int], bool]]:
        encoded = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return [([t for t, _ in run], bool(on)) for on, run in itertools.groupby(marked, key=lambda pair: pair[1])]

    # Templates may shorten earlier turns once others follow, so turns are counted, and not their tokens.
    earlier = sum(trained for _, trained in turns(messages[:first])) if first else 0
    seen = itertools.count()
    return [(tokens, trained and next(seen) >= earlier) for tokens, trained in turns(messages)]


def assistant_spans(
    tokenizer: Any, messages: list[Any], text: str, thinking: bool | None = None, tools: Any = None
) -> list[tuple[int, int]]:
    """Where in `text`, the rendered conversation, the assistant's turns stand: (first, past the end-of-turn token).

    Templates may render a message differently once others follow it (Qwen3 drops earlier reasoning), so places are
    found by marks put behind the contents. Raises DataError where one cannot be found for certain: a wrong span would
    train on the wrong words.
    """
    contents = _content_ends(tokenizer, messages, text, tools)
    end_token = _end_of_turn(tokenizer, messages, tools)
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _turn_start(tokenizer, messages[:turn], text, contents.get(turn - 1), thinking, tools)
        if start is None or start < (spans[-1][1] if spans else 1) or start > contents.get(turn, start):
            raise DataError(
                f"where messages[{turn}] begins cannot be found in the chat template's output; "
                "give the rows as {prompt, response}"
            )
        content_end = contents.get(turn, start)
        later = [end for other, end in contents.items() if other > turn]
        end_at = text.find(end_token, content_end, min(later, default=len(text))) if end_token else -1
        if end_at < 0 and turn not in contents:
            raise DataError(f"where messages[{turn}], which has no text, ends cannot be found; leave it out")
        if message.get("tool_calls") and not text[start : max(content_end, end_at)].strip():
            raise DataError(f"the chat template leaves out the tool calls of messages[{turn}]; use one that has tools")
        spans.append((start, end_at + len(end_token) if end_at >= 0 else content_end))
    return spans


def _end_of_turn(tokenizer: Any, messages: list[Any], tools: Any) -> str:
    """The special token that the template puts behind an assistant's text; the tokenizer's own end where it has none.

    The two differ in base models (Qwen2.5: <|im_end|> and <|endoftext|>), and a turn must teach the former.
    """
    texts = [i for i, message in enumerate(messages) if _is_answer(message)]
    if texts:
        turn = messages[texts[-1]]
        marked = [*messages[: texts[-1]], {**turn, "content": _mark(turn["content"], texts[-1])}]
        behind = _render(tokenizer, marked, None, tools, add_generation_prompt=False).split(_END_MARK)[-1].lstrip()
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        if found := [token for token in special if behind.startswith(token)]:
            return max(found, key=len)
    return tokenizer.eos_token or ""


def _is_answer(message: Any) -> bool:
    """An assistant's message that is text and nothing after it."""
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(str(message["content"]).strip())


def _content_ends(tokenizer: Any, messages: list[Any], text: str, tools: Any) -> dict[int, int]:
    """Message number -> where in `text` its content ends. Has all of the assistant, others where possible."""
    with_text = [i for i, message in enumerate(messages) if message.get("content") and str(message["content"]).strip()]
    of_assistant = [i for i in with_text if messages[i]["role"] == "assistant"]
    for numbers in (with_text, of_assistant):
        marked = [dict(message) for message in messages]
        for number in numbers:
            marked[number]["content"] = _mark(marked[number]["content"], number)
        pieces = _render(tokenizer, marked, None, tools, add_generation_prompt=False).split(_END_MARK)
        if len(pieces) == len(numbers) + 1 and "".join(pieces) == text:
            return dict(zip(numbers, itertools.accumulate(len(piece) for piece in pieces), strict=False))
    raise DataError(
        "the chat template rewrites assistant messages, so the trained words cannot be found in its output; "
        "give the rows as {prompt, response}"
    )


def _mark(content: Any, number: int) -> str:
    if not isinstance(content, str):
        raise DataError(f"messages[{number}].content is a list; only text can be trained on")
    # Before trailing space: many templates trim it.
    body = content.rstrip()
    return body + _END_MARK + content[len(body) :]


def _turn_start(
    tokenizer: Any, before: list[Any], text: str, content_end: int | None, thinking: bool | None, tools: Any
) -> int | None:
    """Where in `text` the turn that follows the messages `before` starts, or None.

    content_end: where the content of the last of them ends, if that is known.
    """
    if not before:
        return None
    prompts = [_render(tokenizer, before, switch, tools, add_generation_prompt=True) for switch in {thinking, None}]
    fitting = [len(prompt) for prompt in prompts if text.startswith(prompt)]
    if fitting:
        return max(fitting)
    if content_end is None:
        return None
    # What stands between the last content and the turn: as much as the generation prompt has of it. The prompt may open
    # more than this turn has, such as an empty block of reasoning where the turn has a full one; then the rest is the
    # turn's own.
    marked = [*before[:-1], {**before[-1], "content": _mark(before[-1]["content"], len(before) - 1)}]
    history, *tails = (
        _render(tokenizer, marked, switch, tools, add_generation_prompt=opened).split(_END_MARK)[-1]
        for switch, opened in [(None, False), (None, True), (thinking, True)]
    )
    after = text[content_end:]
    shared = max(_shared_length(tail, after) for tail in tails)
    return content_end + shared if after.startswith(history) and shared > len(history) else None


def _shared_length(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
