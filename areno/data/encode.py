"""Encode rows as token ids: a prompt, a supervised row or a preference pair.

A row is first rendered as a `Draft`: its texts, and the function that makes the item from their token ids. So
`encode_rows` can encode the texts of many rows by a single call of the tokenizer, which then uses all CPU cores.

Messages always go through the chat template. A plain text becomes one user message if the tokenizer has a template.
Without a template, the text itself is encoded, with the special tokens that the tokenizer adds (such as BOS).
Control tokens inside messages are encoded as ordinary text, see control_tokens.py. `decode` and `decode_all` turn
tokens into text faster than transformers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic

import numpy as np

from areno.data.chat_template import Prompt, assistant_spans, render, render_generation_prompt
from areno.data.control_tokens import BREAK, control_tokens, note_unknown
from areno.data.messages import check_rendered, template_messages
from areno.data.row_schema import (
    Tie,
    is_trained,
    json_problem,
    labelled_answer,
    prompt_and_answers,
    ranked_answers,
    with_text,
)
from areno.errors import DataError, Key
from areno.types import AnswersItem, Item, PairItem, PromptItem, TrainSequence

# Fewer tokens are decoded by one thread, in about 1 ms. Several threads share the cores with torch, which can make the
# result 1 ms late.
_MIN_TOKENS_FOR_THREADS = 2048

Pieces = list[tuple[list[int], bool]]
"""(token ids, whether the tokens are trained) for consecutive pieces of a row."""

Text = tuple[str, bool]
"""(text rendered by `areno.data.chat_template`, whether the tokenizer adds its special tokens, such as BOS)."""


@dataclass(slots=True)
class Draft(Generic[Item]):
    """A rendered row whose texts are not encoded yet.

    Attributes:
        texts: The texts to encode. A control token with a break becomes ordinary text.
        finish: Function that makes the item from the token ids of each text.
    """

    texts: list[Text]
    finish: Callable[[list[list[int]]], Item]

    def encode(self, tokenizer: Any) -> Item:
        """Encode the texts one by one, and return the item.

        Args:
            tokenizer: Tokenizer that the row was rendered for.

        Raises:
            DataError: The row has no valid item, such as a pair with an answer that has no token to train on.
        """
        return self.finish([_encode_text(tokenizer, text) for text in self.texts])


def encode_rows(
    tokenizer: Any, rows: Sequence[Any], indices: Sequence[int], draft: Callable[[Any, int], Draft[Item]]
) -> list[Item | Exception]:
    """Encode many rows by a few calls of the tokenizer.

    The items are equal to those of rows that are encoded one by one.

    Args:
        tokenizer: Tokenizer of the transformers library.
        rows: The rows.
        indices: Index of each row in its dataset.
        draft: Function (row, index) that renders a row.

    Returns:
        For each row the item, or the exception of a row that cannot be encoded.
    """
    drafts = [_result_of(draft, row, index) for row, index in zip(rows, indices, strict=True)]
    texts = [text for each in drafts if isinstance(each, Draft) for text in each.texts]
    try:
        encoded = iter(encode_texts(tokenizer, texts))
    except Exception:  # one text cannot be encoded, so each row is encoded by itself
        return [each if isinstance(each, Exception) else _result_of(each.encode, tokenizer) for each in drafts]
    return [
        each if isinstance(each, Exception) else _result_of(each.finish, [next(encoded) for _ in each.texts])
        for each in drafts
    ]


def _result_of(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the exception that the function raises."""
    try:
        return function(*args)
    except Exception as error:
        return error


def encode_texts(tokenizer: Any, texts: Sequence[Text]) -> list[list[int]]:
    """Encode texts together. The Rust backend of a tokenizer encodes them on all CPU cores.

    Args:
        tokenizer: Tokenizer of the transformers library.
        texts: The texts.

    Returns:
        The token ids of each text.
    """
    found = _encoded(tokenizer, texts)
    for (text, _), tokens in zip(texts, found, strict=True):
        note_unknown(tokenizer, text, tokens)
    return found


def _encoded(tokenizer: Any, texts: Sequence[Text]) -> list[list[int]]:
    if not _encodes_by_backend(type(tokenizer)):
        return [_encode_text(tokenizer, text) for text in texts]
    out: list[list[int]] = [[] for _ in texts]
    for special in (False, True):
        places = [at for at, (text, adds_special) in enumerate(texts) if adds_special == special and BREAK not in text]
        for at, tokens in zip(places, _encode_batch(tokenizer, [texts[at][0] for at in places], special), strict=True):
            out[at] = tokens
    for at, (text, _) in enumerate(texts):
        if BREAK in text:
            out[at] = _encode_text(tokenizer, texts[at])
    return out


def _encode_text(tokenizer: Any, text: Text) -> list[int]:
    """Return the token ids of one text."""
    words, adds_special = text
    if adds_special:
        return tokenizer.encode(words)
    if BREAK in words:
        return control_tokens(tokenizer).encode(words)
    return tokenizer.encode(words, add_special_tokens=False)


def _encode_batch(tokenizer: Any, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
    """Return the token ids of texts without breaks, by the Rust backend of the tokenizer."""
    if not texts:
        return []
    # transformers encodes the first text, and so turns off the truncation and padding of the backend.
    first = tokenizer.encode(texts[0], add_special_tokens=adds_special)
    rest = tokenizer.backend_tokenizer.encode_batch_fast(list(texts[1:]), add_special_tokens=adds_special)
    return [first, *(each.ids for each in rest)]


@cache
def _encodes_by_backend(kind: type) -> bool:
    """Return whether a tokenizer class inherits the encoding of PreTrainedTokenizerFast without changes."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast
    return issubclass(kind, own) and kind.encode is own.encode and kind._encode_plus is own._encode_plus


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
    text = render_generation_prompt(tokenizer, prompt, enable_thinking, tools)
    return _encode_text(tokenizer, (text, tokenizer.chat_template is None))


def prompt_draft(
    tokenizer: Any,
    row: Mapping[str, Any],
    index: int,
    enable_thinking: bool | None = None,
    *,
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
) -> Draft[PromptItem]:
    """Render a row with a prompt, for reinforcement learning.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form: a prompt (text or messages), and optionally solutions and tools.
        index: Index of the row in its dataset.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.
        prompt_key: Name of the field with the prompt.
        solutions_key: Name of the field with the reference solutions.

    Returns:
        The draft of a PromptItem, which has the prompt with its token ids, its solutions and the row.

    Raises:
        DataError: The row cannot be rendered with the chat template.
    """
    prompt, plain = row[prompt_key], isinstance(row[prompt_key], str)
    rendered = rendered_prompt(tokenizer, prompt, enable_thinking, tools_of(row))
    text = rendered.replace(BREAK, "")

    def finish(tokens: list[list[int]]) -> PromptItem:
        return PromptItem(
            prompt=prompt if plain else text,
            text=text,
            tokens=tokens[0],
            messages=None if plain else with_text(prompt, template_messages(tokenizer, prompt)),
            solutions=row.get(solutions_key),
            record=row,
            index=index,
        )

    return Draft([(rendered, tokenizer.chat_template is None)], finish)


def sft_draft(tokenizer: Any, row: Mapping[str, Any], enable_thinking: bool | None = None) -> Draft[TrainSequence]:
    """Render a row for supervised fine-tuning.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: {prompt, response} or {messages}. The trained tokens are the response and its end token, or every assistant
            turn of the messages.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.

    Returns:
        The draft of a TrainSequence with token ids and prompt_mask.

    Raises:
        DataError: The row cannot be rendered with the chat template, or the assistant turns cannot be found in the
            rendered text.
    """
    if row.get("response") is not None:
        return _answer(tokenizer, row["prompt"], row["response"], enable_thinking, tools_of(row))
    return _conversation(tokenizer, row["messages"], 0, enable_thinking, tools_of(row))


def pair_draft(tokenizer: Any, row: Mapping[str, Any], index: int) -> Draft[PairItem]:
    """Render a row with a chosen and a rejected answer, for DPO.

    Both answers are rendered as in `sft_draft`, except that assistant turns in the prompt are not trained.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form, with the fields prompt, chosen and rejected. The prompt may be absent if chosen and
            rejected are conversations that begin with it.
        index: Index of the row in its dataset.

    Returns:
        The draft of a PairItem. Its `finish` raises DataError if an answer has no token to train on, and Tie if both
        answers have the same tokens.

    Raises:
        DataError: The row is not a pair, or cannot be rendered with the chat template.
    """
    prompt, *answers = prompt_and_answers(row)
    tools = tools_of(row)
    if isinstance(answers[0], str):
        pair = [_answer(tokenizer, prompt, answer, None, tools) for answer in answers]
    else:
        pair = [_conversation(tokenizer, [*prompt, *answer], len(prompt), None, tools) for answer in answers]
    chosen, rejected = pair
    n_first = len(chosen.texts)

    def finish(tokens: list[list[int]]) -> PairItem:
        found = {"chosen": chosen.finish(tokens[:n_first]), "rejected": rejected.finish(tokens[n_first:])}
        for name, sequence in found.items():
            if np.all(sequence.prompt_mask[1:]):  # type: ignore[index]
                raise DataError(f"the answer in field {name} has no token to train on")
        if _are_equal(found["chosen"], found["rejected"]):
            raise Tie("fields chosen and rejected have the same tokens, so none is preferred")
        return PairItem(**found, index=index)

    return Draft([*chosen.texts, *rejected.texts], finish)


def labelled_draft(tokenizer: Any, row: Mapping[str, Any], index: int) -> Draft[AnswersItem]:
    """Render a row with one labelled answer, for KTO.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form, with the fields prompt, response and label.
        index: Index of the row in its dataset.

    Returns:
        The draft of an AnswersItem with one row, whose reward is 1 for a desirable answer and 0 otherwise. Its `finish`
        raises DataError if the answer has no token to train on.

    Raises:
        DataError: The row has another form, or cannot be rendered with the chat template.
    """
    prompt, answer, label = labelled_answer(row)
    return _answers_draft(tokenizer, prompt, [answer], tools_of(row), [float(label)], index)


def ranked_draft(tokenizer: Any, row: Mapping[str, Any], index: int) -> Draft[AnswersItem]:
    """Render a row with ranked answers, for a reward model.

    Args:
        tokenizer: Tokenizer of the transformers library.
        row: A row in areno's form, see `row_schema.ranked_answers`.
        index: Index of the row in its dataset.

    Returns:
        The draft of an AnswersItem with a row for each answer, the best first. The reward of a row is the rating of the
        answer. The `returns` of its tokens are the answer's level: the difference between the levels of two answers is
        the margin of their comparison.

    Raises:
        DataError: The row has another form, or cannot be rendered with the chat template.
    """
    found = ranked_answers(row)
    draft = _answers_draft(tokenizer, found.prompt, found.answers, tools_of(row), found.ratings, index)

    def finish(tokens: list[list[int]]) -> AnswersItem:
        item = draft.finish(tokens)
        pairs = itertools.combinations(item.rows, 2)
        if all(one.reward == other.reward or _are_equal(one, other) for one, other in pairs):
            raise Tie("no answer is preferred to one with other tokens")
        for sequence, level in zip(item.rows, found.levels, strict=True):
            sequence.returns = np.full(len(sequence.tokens), level, np.float32)  # type: ignore[arg-type]
        return item

    return Draft(draft.texts, finish)


def _are_equal(one: TrainSequence, other: TrainSequence) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.prompt_mask, other.prompt_mask)  # type: ignore[arg-type]


def _answers_draft(
    tokenizer: Any, prompt: Any, answers: Sequence[Any], tools: Any, ratings: Sequence[float], index: int
) -> Draft[AnswersItem]:
    """Render a prompt with several answers, each a text or a list of messages. `ratings` are the rows' rewards."""
    as_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    drafts = [
        _answer(tokenizer, prompt, answer, None, tools)
        if isinstance(answer, str)
        else _conversation(tokenizer, [*as_messages, *answer], len(as_messages), None, tools)
        for answer in answers
    ]
    ends = list(itertools.accumulate(len(draft.texts) for draft in drafts))

    def finish(tokens: list[list[int]]) -> AnswersItem:
        rows = []
        for number, (draft, start, end) in enumerate(zip(drafts, [0, *ends], ends, strict=False)):
            sequence = draft.finish(tokens[start:end])
            if np.all(sequence.prompt_mask[1:]):  # type: ignore[index]
                raise DataError(f"answer {number} has no token to train on")
            sequence.reward = ratings[number]
            rows.append(sequence)
        return AnswersItem(rows=rows, index=index)

    return Draft([text for draft in drafts for text in draft.texts], finish)


def rendered_prompt(tokenizer: Any, prompt: Prompt, thinking: bool | None, tools: Any) -> str:
    """Render a prompt as `render_generation_prompt` does, and check that each of its messages is rendered."""
    if not isinstance(prompt, str):
        prompt = template_messages(tokenizer, prompt)
        check_rendered(tokenizer, prompt, tools, thinking, True)
    return render_generation_prompt(tokenizer, prompt, thinking, tools)


def _answer(tokenizer: Any, prompt: Prompt, answer: str, thinking: bool | None, tools: Any) -> Draft[TrainSequence]:
    """Render a prompt and its answer as a training row, in which the answer and its end token are trained."""
    rendered = rendered_prompt(tokenizer, prompt, thinking, tools)
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end-of-sequence token; set {} to one that has it", Key("tokenizer_path"))

    def finish(tokens: list[list[int]]) -> TrainSequence:
        return _sequence(end, [(tokens[0], False), ([*tokens[1], end], True)])

    return Draft([(rendered, tokenizer.chat_template is None), (answer, False)], finish)


def _sequence(end: int, pieces: Pieces) -> TrainSequence:
    """Concatenate pieces of a conversation into a training row. `end` is the end-of-sequence id, or 0."""
    tokens = np.array([token for piece, _ in pieces for token in piece], dtype=np.int64)
    prompt_mask, at = np.ones(len(tokens), dtype=bool), 0
    for piece, trained in pieces:
        prompt_mask[at : at + len(piece)] = not trained
        at += len(piece)
    return TrainSequence(tokens=tokens, prompt_mask=prompt_mask, eos_token_id=end)


def tools_of(row: Mapping[str, Any]) -> Any:
    """Return the tools of a row, parsed if the row holds them as JSON text.

    Args:
        row: A row of a dataset.

    Returns:
        The tools. None if the row has none.

    Raises:
        DataError: The tools are text, but not JSON.
    """
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"field tools is text, but not JSON: {json_problem(error)}") from error


def _conversation(
    tokenizer: Any, messages: list[Any], first: int, thinking: bool | None, tools: Any
) -> Draft[TrainSequence]:
    """Render a conversation as a training row. The assistant turns from message index `first` on are trained.

    Trained text and other text are encoded separately, because in a rollout prompt and completion are separate, too.
    """
    if tokenizer.chat_template is None:
        text = "messages need a tokenizer with a chat template; set {} to one that has it"
        raise DataError(text, Key("tokenizer_path"))
    control, end = control_tokens(tokenizer), tokenizer.eos_token_id or 0
    turns = [at >= first and is_trained(each) for at, each in enumerate(messages) if each["role"] == "assistant"]
    messages = template_messages(tokenizer, messages)
    check_rendered(tokenizer, messages, tools)
    messages, tools = control.escape_messages(messages), control.escape(tools)
    if re.search(r"\{%-?\s*generation\b", tokenizer.chat_template):
        whole = _sequence(end, _pieces_by_template(tokenizer, messages, turns, tools))
        return Draft([], lambda _: whole)
    text = render(tokenizer, messages, tools)
    pieces, at = [], 0
    for (start, stop), trained in zip(assistant_spans(tokenizer, messages, text, thinking, tools), turns, strict=True):
        if trained:
            pieces += [(text[at:start], False), (text[start:stop], True)]
            at = stop
    pieces = [(piece, trained) for piece, trained in [*pieces, (text[at:], False)] if piece]

    def finish(tokens: list[list[int]]) -> TrainSequence:
        return _sequence(end, [(found, trained) for found, (_, trained) in zip(tokens, pieces, strict=True)])

    return Draft([(piece, False) for piece, _ in pieces], finish)


def _pieces_by_template(tokenizer: Any, messages: list[Any], trained_turns: list[bool], tools: Any) -> Pieces:
    """Encode a conversation whose chat template marks the assistant's text with {% generation %}.

    Returns:
        (token ids, whether the tokens are trained) for consecutive pieces of the conversation. Marked text is trained
        if its turn is.
    """

    def turns(messages: list[Any]) -> Pieces:
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

    marked = iter(trained_turns)
    return [(tokens, is_marked and next(marked, True)) for tokens, is_marked in turns(messages)]


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
    """Decode rows of token ids to texts, as `tokenizer.batch_decode` does. Many tokens are decoded on all CPU cores.

    Args:
        tokenizer: Tokenizer of the transformers library.
        token_rows: Token ids of each row.
        skip_special_tokens: Whether to leave out special tokens.

    Returns:
        One text per row.
    """
    if _is_plain(tokenizer):
        backend = tokenizer.backend_tokenizer
        if sum(map(len, token_rows)) < _MIN_TOKENS_FOR_THREADS:
            return [backend.decode(tokens, skip_special_tokens=skip_special_tokens) for tokens in token_rows]
        return backend.decode_batch(list(token_rows), skip_special_tokens=skip_special_tokens)
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
