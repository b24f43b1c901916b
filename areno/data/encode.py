"""Encode rows as token ids: a prompt, a supervised row or a preference pair.

Messages always go through the chat template. A plain text becomes one user message if the tokenizer has a template.
Without a template, the text itself is encoded, with the special tokens that the tokenizer adds (such as BOS).
Control tokens inside messages are encoded as ordinary text, see control_tokens.py. `decode` and `decode_all` turn
tokens into text faster than transformers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from areno.data.chat_template import Prompt, assistant_spans, render, render_generation_prompt
from areno.data.control_tokens import BREAK, control_tokens
from areno.data.row_schema import json_problem, prompt_and_answers, with_text
from areno.errors import DataError, Key
from areno.types import PairItem, PromptItem, TrainSequence


def encode_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> list[int]:
    """Encode a prompt, up to the start of the assistant's next turn.

    Args:
        tokenizer: Tokenizer of the transformers library.
        prompt: A text or a list of chat messages.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.
        tools: Tool definitions in OpenAI's format. None for a prompt without tools.

    Returns:
        The token ids.

    Raises:
        DataError: Messages are given but the tokenizer has no chat template, or the template raises an error for the
            messages.
    """
    return _encode_prompt(tokenizer, render_generation_prompt(tokenizer, prompt, enable_thinking, tools))


def _encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a rendered prompt."""
    return tokenizer.encode(text) if tokenizer.chat_template is None else control_tokens(tokenizer).encode(text)


def prompt_item(
    tokenizer: Any,
    row: Mapping[str, Any],
    index: int,
    enable_thinking: bool | None = None,
    *,
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
) -> PromptItem:
    """Encode a row with a prompt, for reinforcement learning.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form: a prompt (text or messages), and optionally solutions and tools.
        index: Index of the row in its dataset.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.
        prompt_key: Name of the field with the prompt.
        solutions_key: Name of the field with the reference solutions.

    Returns:
        The prompt with its token ids, its solutions and the row.

    Raises:
        DataError: The row cannot be rendered with the chat template.
    """
    prompt = _prompt(row[prompt_key])
    rendered = render_generation_prompt(tokenizer, prompt, enable_thinking, _tools(row))
    text, plain = rendered.replace(BREAK, ""), isinstance(prompt, str)
    return PromptItem(
        prompt=prompt if plain else text,
        text=text,
        tokens=_encode_prompt(tokenizer, rendered),
        messages=None if plain else prompt,
        solutions=row.get(solutions_key),
        record=row,
        index=index,
    )


def sft_sequence(tokenizer: Any, row: Mapping[str, Any], enable_thinking: bool | None = None) -> TrainSequence:
    """Encode a row for supervised fine-tuning.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: {prompt, response} or {messages}. The trained tokens are the response and its end token, or every assistant
            turn of the messages.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.

    Returns:
        The row with token ids and prompt_mask.

    Raises:
        DataError: The row cannot be rendered with the chat template, or the assistant turns cannot be found in the
            rendered text.
    """
    if row.get("response") is not None:
        return _answer(tokenizer, _prompt(row["prompt"]), row["response"], enable_thinking, _tools(row))
    return _conversation(tokenizer, with_text(row["messages"]), 0, enable_thinking, _tools(row))


def pair_item(tokenizer: Any, row: Mapping[str, Any], index: int) -> PairItem:
    """Encode a row with a chosen and a rejected answer, for DPO.

    Both answers are encoded as in `sft_sequence`, except that assistant turns in the prompt are not trained.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form, with the fields prompt, chosen and rejected. The prompt may be absent if chosen and
            rejected are conversations that begin with it.
        index: Index of the row in its dataset.

    Returns:
        The two training rows and the index.

    Raises:
        DataError: The row is not a pair, cannot be rendered with the chat template, or an answer has no token to
            train on.
    """
    prompt, *answers = prompt_and_answers(row)
    tools = _tools(row)
    if isinstance(answers[0], str):
        pair = [_answer(tokenizer, _prompt(prompt), answer, None, tools) for answer in answers]
    else:
        pair = [_conversation(tokenizer, [*prompt, *answer], len(prompt), None, tools) for answer in answers]
    for name, sequence in zip(("chosen", "rejected"), pair, strict=True):
        if all((sequence.prompt_mask or [])[1:]):
            raise DataError(f"the answer in field {name} has no token to train on")
    return PairItem(chosen=pair[0], rejected=pair[1], index=index)


def _prompt(prompt: Any) -> Any:
    """Return a text prompt unchanged, or a list of messages with every content joined to one text."""
    return prompt if isinstance(prompt, str) else with_text(prompt)


def _answer(tokenizer: Any, prompt: Prompt, answer: str, thinking: bool | None, tools: Any) -> TrainSequence:
    """Encode a prompt and its answer as a training row, in which the answer and its end token are trained."""
    tokens = encode_generation_prompt(tokenizer, prompt, thinking, tools)
    response = tokenizer.encode(answer, add_special_tokens=False)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token; set {} to one that has it", Key("tokenizer_path"))
    return _sequence(tokenizer, [(tokens, False), ([*response, tokenizer.eos_token_id], True)])


def _sequence(tokenizer: Any, pieces: list[tuple[list[int], bool]]) -> TrainSequence:
    """Concatenate pieces of a conversation into a training row.

    Args:
        tokenizer: Tokenizer, whose end-of-sequence id is stored in the row.
        pieces: (token ids, whether the tokens are trained) for each piece.
    """
    return TrainSequence(
        tokens=[token for piece, _ in pieces for token in piece],
        prompt_mask=[not trained for piece, trained in pieces for _ in piece],
        eos_token_id=tokenizer.eos_token_id or 0,
    )


def _tools(row: Mapping[str, Any]) -> Any:
    """Return the tools of a row, parsed if the row holds them as JSON text. None if the row has none."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"field tools is text, but not JSON: {json_problem(error)}") from error


def _conversation(tokenizer: Any, messages: list[Any], first: int, thinking: bool | None, tools: Any) -> TrainSequence:
    """Encode a conversation as a training row. The assistant turns from message index `first` on are trained.

    Trained text and other text are encoded separately, because in a rollout prompt and completion are separate, too.
    """
    if tokenizer.chat_template is None:
        text = "messages need a tokenizer with a chat template; set {} to one that has it"
        raise DataError(text, Key("tokenizer_path"))
    control = control_tokens(tokenizer)
    messages, tools = control.escape_messages(messages), control.escape(tools)
    if re.search(r"\{%-?\s*generation\b", tokenizer.chat_template):
        return _sequence(tokenizer, _pieces_by_template(tokenizer, messages, first, tools))
    text = render(tokenizer, messages, tools)
    earlier = sum(message["role"] == "assistant" for message in messages[:first])
    pieces, at = [], 0
    for start, end in assistant_spans(tokenizer, messages, text, thinking, tools)[earlier:]:
        pieces += [(text[at:start], False), (text[start:end], True)]
        at = end
    pieces.append((text[at:], False))
    return _sequence(tokenizer, [(control.encode(piece), trained) for piece, trained in pieces if piece])


def _pieces_by_template(tokenizer: Any, messages: list[Any], first: int, tools: Any) -> list[tuple[list[int], bool]]:
    """Encode a conversation whose chat template marks the assistant's text with {% generation %}.

    Returns:
        (token ids, whether the tokens are trained) for consecutive pieces of the conversation. Marked text is trained
        if it belongs to the messages from index `first` on.
    """

    def turns(messages: list[Any]) -> list[tuple[list[int], bool]]:
        encoded = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        tokens, masks = encoded["input_ids"], encoded["assistant_masks"]
        if BREAK in (text := render(tokenizer, messages, tools)):
            is_assistant = bytearray(len(text))
            for (start, end), on in zip(encoded["offset_mapping"], masks, strict=True):
                is_assistant[start:end] = bytes([on]) * (end - start)
            tokens, places = control_tokens(tokenizer).encode_with_offsets(text)
            masks = [any(is_assistant[start:end]) for start, end in places]
        marked = zip(tokens, masks, strict=True)
        return [([t for t, _ in run], bool(on)) for on, run in itertools.groupby(marked, key=lambda pair: pair[1])]

    # Templates may shorten earlier turns if further turns follow, so turns are counted, not their tokens.
    earlier = sum(trained for _, trained in turns(messages[:first])) if first else 0
    seen = itertools.count()
    return [(tokens, trained and next(seen) >= earlier) for tokens, trained in turns(messages)]


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Decode token ids to text, special tokens included.

    Args:
        tokenizer: Tokenizer of the transformers library.
        tokens: Token ids.

    Returns:
        The text.
    """
    if _is_plain(tokenizer):  # transformers checks each token first, which takes as long as decoding
        return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    return tokenizer.decode(tokens, skip_special_tokens=False)


def decode_all(tokenizer: Any, token_rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
    """Decode rows of token ids to texts, like `tokenizer.batch_decode` but on all CPU cores.

    Args:
        tokenizer: Tokenizer of the transformers library.
        token_rows: Token ids of each row.
        skip_special_tokens: Whether to leave out special tokens.

    Returns:
        One text per row.
    """
    if _is_plain(tokenizer):
        return tokenizer.backend_tokenizer.decode_batch(list(token_rows), skip_special_tokens=skip_special_tokens)
    return tokenizer.batch_decode(list(token_rows), skip_special_tokens=skip_special_tokens)


def _is_plain(tokenizer: Any) -> bool:
    """Return whether the tokenizer's Rust backend decodes to the same text as transformers does."""
    return _decodes_by_backend(type(tokenizer)) and not tokenizer.clean_up_tokenization_spaces


@cache
def _decodes_by_backend(kind: type) -> bool:
    """Return whether a tokenizer class inherits the decoding of PreTrainedTokenizerFast without changes."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast
    return issubclass(kind, own) and kind._decode is own._decode and kind.decode is own.decode
