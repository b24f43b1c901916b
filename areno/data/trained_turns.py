"""Find the assistant's turns to train in conversations.

A turn is trained in the form in which the model writes it: after the prompt that the server sends for the messages
before it. If the rendered conversation has every turn in this form, it is one sequence. Some templates render a turn
differently once more messages follow (Qwen3 drops its reasoning). The setting `changed_turns` says what happens then.
"""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from areno.config.datasets import ChangedTurns
from areno.data.chat_template import END_THINK, THINK, render, with_content_parts
from areno.data.control_tokens import control_token_texts, control_tokens
from areno.data.messages import REASONING, template_messages, template_traits
from areno.data.row_schema import VARIABLES, common_prefix_length, is_trained
from areno.data.template_omissions import Omissions, check_rendered, content_and_reasoning, missing_text, reasoning_of
from areno.data.turn_ends import end_of_control_tokens, first_control_token, is_model_end_token, turn_ends
from areno.errors import DataError, Key

Spans = list[tuple[int, int]]
"""(start, end) of each trained part of a text, as character indices."""

_MARK = f"\ue000areno-end-{secrets.randbits(128)}\ue001"  # random, so that no message contains it
_NO_SWITCHES = {"messages", "tools", "add_generation_prompt"}
_AS_PAIRS = "give the rows as {prompt, response}"


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn, rendered as the last of its conversation."""

    prompt: str  # what the server sends for the messages before the turn
    answer: str  # what the model writes, with the token that ends the turn
    closing: str  # what the template writes after the turn

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.closing

    @property
    def span(self) -> tuple[int, int]:
        return len(self.prompt), len(self.prompt) + len(self.answer)


def training_texts(
    tokenizer: Any,
    messages: Sequence[Any],
    first: int = 0,
    thinking: bool | None = None,
    tools: Any = None,
    changed: ChangedTurns | None = "split",
) -> list[tuple[str, Spans]]:
    """Render a conversation as training sequences. Returns (text, spans to train) for each.

    The assistant's turns from message index `first` on are trained. `changed` is the setting changed_turns. None is for
    preference pairs: the result is a single text, and DataError is raised if the text lacks words of a trained turn.
    """
    if tokenizer.chat_template is None:
        text = "messages need a tokenizer with a chat template; set {} to one that has it"
        raise DataError(text, Key("tokenizer_path"))
    trained = [at for at in range(first, len(messages)) if is_trained(messages[at])]
    messages = template_messages(tokenizer, messages)
    kept_whole = () if changed == "as_rendered" else trained
    if changed != "as_rendered" and template_traits(tokenizer).drops_later_calls:
        for at, message in enumerate(messages):
            if at not in trained and len(message.get("tool_calls") or ()) > 1:
                text = "the chat template writes only the first tool call of messages[{}]; give each call a message of "
                raise DataError(text + "its own, followed by its result", at)
    left_out = check_rendered(tokenizer, messages, tools, thinking, False, kept_whole)
    talk = _Conversation(tokenizer, messages, thinking, tools, left_out)
    turn_of = talk.rendered_turn if changed == "as_rendered" else talk.complete_turn
    turns = {at: turn_of(at, talk.messages[at]) for at in trained}
    last = turns.get(len(messages) - 1)
    whole = last.text if last is not None else talk.render(talk.messages)
    if all(whole.startswith(turn.prompt + turn.answer) for turn in turns.values()):
        return [(whole, talk.generation_spans(len(messages), whole, {at: turn.span for at, turn in turns.items()}))]
    if len(trained) == 1 or changed == "last_turn":
        trained = trained[-1:]
    elif changed == "error":
        at = next(at for at, turn in turns.items() if not whole.startswith(turn.prompt + turn.answer))
        text = "the chat template writes messages[{}] differently once more messages follow, which {}=error forbids"
        raise DataError(text, at, Key("train_dataset.changed_turns"))
    elif changed != "split":
        text = talk.render(talk.messages)
        spans = talk.turn_spans(text)
        end = max(spans[at][1] for at in trained if at + 1 < len(messages))
        if text[:end] != whole[:end]:
            raise _no_start_error(len(messages) - 1)  # its prompt has another thinking mode
        if last is not None:
            spans[len(messages) - 1] = last.span
        for at in trained if changed is None else ():
            turn = whole[slice(*spans[at])]
            if missing := left_out.in_talk.get(at) or missing_text(talk.messages[at], turn, at):
                raise DataError(
                    f"{_omission_error(missing)} once more messages follow; end the answer with that message"
                )
        return [(whole, talk.generation_spans(len(messages), whole, {at: spans[at] for at in trained}))]
    return [(turns[at].text, talk.generation_spans(at + 1, turns[at].text, {at: turns[at].span})) for at in trained]


class _Conversation:
    """The messages of a row, with escaped control tokens, and methods that render them and find turns in the result."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Any],
        thinking: bool | None,
        tools: Any,
        left_out: Omissions | None,  # in this thinking mode
    ):
        control = control_tokens(tokenizer)
        self.tokenizer, self.messages, self._tools = tokenizer, control.escape_messages(messages), control.escape(tools)
        self._thinking, self._ends, self._left_out = thinking, turn_ends(tokenizer), left_out

    def render(self, messages: list[Any]) -> str:
        return render(self.tokenizer, messages, self._tools, self._thinking)

    def complete_turn(self, at: int, message: Any) -> Turn:
        """Return the turn of messages[at] with all its words. Raises DataError if the template leaves some out."""
        first = None
        for talk in self._in_thinking_modes():
            for found, missing in talk._turn_variants(at, message):
                if missing is None:
                    return found
                first = first or missing
        if first is None:
            raise self._no_prompt_error(at, message)
        raise DataError(f"{_omission_error(first)}; leave it out, or use a template that has it")

    def rendered_turn(self, at: int, message: Any) -> Turn:
        """Return the turn of messages[at] as the template writes it, even if words are missing."""
        if (
            found := next(
                filter(None, (talk._turn_after_prompt(at, message) for talk in self._in_thinking_modes())), None
            )
        ) is None:
            raise self._no_prompt_error(at, message)
        return found

    def _in_thinking_modes(self) -> Iterator[_Conversation]:
        """Yield the conversation in the thinking mode that is set. If no mode is set, yield it in each mode."""
        yield self
        for thinking in (True, False) if self._thinking is None else ():
            other = copy.copy(self)
            other._thinking, other._left_out = thinking, None
            yield other

    def _turn_variants(self, at: int, message: Any) -> Iterator[tuple[Turn, str | None]]:
        """Yield (turn, part that it lacks or None) for messages[at]: as rendered, then with reasoning in think tags."""
        if (found := self._turn_after_prompt(at, message)) is None:
            return
        yield found, self._omitted_part(at, message, found)
        content = message["content"]
        if self._ends.reads_reasoning or not (END_THINK in content or reasoning_of(message)):
            return
        # The server reads reasoning in think tags from models of any template.
        if END_THINK not in content:
            content = f"{THINK}\n{reasoning_of(message)}\n{END_THINK}\n\n{content}"
        tagged = {**{key: value for key, value in message.items() if key not in REASONING}, "content": content}
        if (found := self._turn_after_prompt(at, tagged)) is not None:
            yield found, self._omitted_part(at, tagged, found) or missing_text(message, found.answer, at)
        if not message.get("tool_calls"):  # the template drops what is in tags
            prompt = self._rendered_prompt(at, self._thinking)
            answer = _continuation_of_prompt(prompt, _split_answer_opening(prompt)[0] + content)
            if answer is not None:
                end = self._ends.end or self._substitute_end_token(at, message, "")
                closing = self._ends.closing[len(self._ends.end) :]
                yield Turn(prompt, answer + end, closing), missing_text(message, answer, at)

    def _omitted_part(self, at: int, message: Any, found: Turn) -> str | None:
        left_out = self._left_out
        if left_out is None or message is not self.messages[at]:
            talk = [*self.messages[:at], message]
            left_out = check_rendered(self.tokenizer, talk, self._tools, self._thinking, False, (at,))
        return left_out.as_last.get(at) or missing_text(message, found.answer, at)

    def _rendered_prompt(self, at: int, thinking: bool | None) -> str:
        return render(self.tokenizer, self.messages[:at], self._tools, thinking, True)

    def _turn_after_prompt(self, at: int, message: Any) -> Turn | None:
        """Return the text that messages[at] adds to its prompt. None if the rendered text does not begin so."""
        if not at:
            return None
        talk, prompt = [*self.messages[:at], message], self._rendered_prompt(at, self._thinking)
        text = self.render(talk)
        stop, end, closing = self._find_turn_end(text, at, message)
        answer = _continuation_of_prompt(prompt, text[:stop])
        if answer is None and self.messages[at - 1]["content"].strip():
            # Some templates write earlier messages differently after an answer, but not the text after the last one.
            (*_, before), (*_, after) = (
                self._split_after_contents(each, [at - 1], self._thinking, opened)
                for each, opened in ((self.messages[:at], True), (talk, False))
            )
            stop_after = len(after) - (len(text) - stop)
            if prompt.endswith(before) and text.endswith(after) and stop_after > 0:
                answer = _continuation_of_prompt(before, after[:stop_after])
        if answer is None:
            return None
        return Turn(prompt, answer + (end or self._substitute_end_token(at, message, text[:stop])), closing)

    def _no_prompt_error(self, at: int, message: Any) -> DataError:
        if not at or not (END_THINK in message["content"] or reasoning_of(message)):
            return _no_start_error(at)
        text = f"the chat template ends the reasoning in the prompt before messages[{at}], which has reasoning"
        switch = self._reasoning_switch(at, message)
        if switch == "enable_thinking":
            return DataError(f"{text}; set {{}} to true, or the row's {VARIABLES}.{switch}", Key(f"rollout.{switch}"))
        advice = f"set {VARIABLES}.{switch} of the row to true" if switch else f"change {VARIABLES} or the template"
        return DataError(f"{text}; {advice}, or leave the reasoning out")

    def _reasoning_switch(self, at: int, message: Any) -> str | None:
        """Return the name of a template variable that turns on reasoning in messages[at]. None if there is none."""
        from jinja2 import Environment

        mode = {} if self._thinking is None else {"enable_thinking": self._thinking}
        source = Environment().lex(self.tokenizer.chat_template)
        for name in sorted({value for _, kind, value in source if kind == "name"} - _NO_SWITCHES):
            how = {**mode, name: True}
            with suppress(DataError):  # names of other things may make the template fail
                prompt = render(self.tokenizer, self.messages[:at], self._tools, None, True, **how)
                text = render(self.tokenizer, [*self.messages[:at], message], self._tools, **how)
                if _continuation_of_prompt(prompt, text) is not None:
                    return name
        return None

    def _find_turn_end(self, text: str, at: int, message: Any) -> tuple[int, str, str]:
        """Find the end of messages[at], the last turn of `text`. Returns (end of its words, end tokens, rest)."""
        ends, is_call = self._ends, bool(message.get("tool_calls"))
        words = message["content"].rpartition(END_THINK)[2].strip()
        for closing, end in ((ends.call_closing, ends.call_end), (ends.closing, ends.end))[not is_call :]:
            stop = len(text) - len(closing)
            if text.endswith(closing) and (is_call or text[:stop].rstrip().endswith(words)) and (end or not ends.end):
                return stop, end, closing[len(end) :] if end else ""
        if not words:
            raise DataError(f"the end of messages[{at}], which has no text, cannot be found; leave it out")
        stop = self._content_ends(text, [*self.messages[:at], message], [at])[at]
        n_end = end_of_control_tokens(text[stop:], control_token_texts(self.tokenizer), 0)
        return stop, text[stop : stop + n_end], text[stop + n_end :] if n_end else ""

    def _substitute_end_token(self, at: int, message: Any, text: str) -> str:
        """Return the token with which to end a turn, since the template writes none: the next control token, or eos."""
        is_last = at + 1 == len(self.messages)
        role = self.messages[at + 1]["role"] if not is_last else "tool" if message.get("tool_calls") else "user"
        token = self._ends.end_token_before(role)
        if not token and text and not is_last and (more := self.render(self.messages[: at + 2])).startswith(text):
            token = first_control_token(more[len(text) :], control_token_texts(self.tokenizer))
        if is_last and not (token and is_model_end_token(self.tokenizer, token)):
            token = self.tokenizer.eos_token
        if not token:
            text = f"the chat template writes no token at the end of messages[{at}], so a model would not learn to stop"
            raise DataError(f"{text}; use a template that ends turns" + ("" if is_last else f", or {_AS_PAIRS}"))
        return token

    # -- the conversation as rendered ------------------------------------------------------------------------------

    def turn_spans(self, text: str) -> dict[int, tuple[int, int]]:
        """Find the assistant's turns in the rendered conversation. Raises DataError if the place of a turn is unclear.

        Returns:
            Index of the message -> (start, end) as character indices in `text`. The token that ends the turn is
            included.
        """
        numbers = [at for at, message in enumerate(self.messages) if message["content"].strip()]
        contents = self._content_ends(text, self.messages, numbers)
        names, found, before = control_token_texts(self.tokenizer), dict[int, tuple[int, int]](), 1
        for at, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            start = self._find_turn_start(at, text, contents.get(at - 1))
            if start is None or start < before or start > contents.get(at, start):
                raise _no_start_error(at)
            stop = contents.get(at, start)
            rest = text[stop : min((end for other, end in contents.items() if other > at), default=len(text))]
            wanted = (self._ends.call_end if message.get("tool_calls") else "", self._ends.end)
            ends = [rest.find(end) + len(end) for end in wanted if end and end in rest]
            n_end = ends[0] if ends else end_of_control_tokens(rest, names, 0)
            if not n_end and at not in contents:
                raise DataError(f"the end of messages[{at}], which has no text, cannot be found; leave it out")
            before = stop + n_end
            found[at] = start, before
        return found

    def _find_turn_start(self, at: int, text: str, content_end: int | None) -> int | None:
        """Return the index in `text` at which the turn of messages[at] starts, None if it cannot be found."""
        if not at:
            return None
        prompts = [self._rendered_prompt(at, switch) for switch in {self._thinking, None}]
        if fitting := [len(prompt) for prompt in prompts if text.startswith(prompt)]:
            return max(fitting)
        if content_end is None:
            return None
        # The text between the last content and the turn is the prefix shared with the generation prompt. The prompt may
        # add an empty block of reasoning that this turn does not have.
        history, *tails = (
            self._split_after_contents(self.messages[:at], [at - 1], switch, opened)[-1]
            for switch, opened in [(None, False), (None, True), (self._thinking, True)]
        )
        after = text[content_end:]
        shared = max(common_prefix_length(tail, after) for tail in tails)
        return content_end + shared if after.startswith(history) and shared > len(history) else None

    def _content_ends(self, text: str, messages: list[Any], numbers: list[int]) -> dict[int, int]:
        """Return {index of a message: index in `text` after its content}, for the messages in `numbers`.

        If not all ends can be found, only assistant messages are tried again. Raises DataError if that fails, too.
        """
        of_assistant = [at for at in numbers if messages[at]["role"] == "assistant"]
        for some in (numbers, of_assistant):
            pieces = self._split_after_contents(messages, some, self._thinking)
            if len(pieces) == len(some) + 1 and "".join(pieces) == text:
                return dict(zip(some, itertools.accumulate(map(len, pieces)), strict=False))
        why = "the chat template rewrites assistant messages, so the trained words cannot be found in its output"
        raise DataError(f"{why}; {_AS_PAIRS}")

    def _split_after_contents(self, messages: list[Any], numbers: list[int], *how: Any) -> list[str]:
        marked = list(messages)
        for at in numbers:
            content = messages[at]["content"]
            body = content.rstrip()  # many templates trim the spaces after it
            marked[at] = {**messages[at], "content": body + _MARK + content[len(body) :]}
        return render(self.tokenizer, marked, self._tools, *how).split(_MARK)

    def generation_spans(self, n_messages: int, text: str, spans: dict[int, tuple[int, int]]) -> Spans:
        """Reduce spans of turns to what the template marks with {% generation %}. Without marks, return whole turns.

        If the last words of a turn are marked, the token that ends it is trained, too.
        """
        if not self._ends.marks:
            return list(spans.values())
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = dict(self.tokenizer.special_tokens_map)
        if self._thinking is not None:
            variables["enable_thinking"] = self._thinking
        rendered: Any
        blocks: Any
        (rendered,), (blocks,) = render_jinja_template(
            [with_content_parts(self.tokenizer, self.messages[:n_messages])],
            tools=self._tools,
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **variables,
        )
        if not text.startswith(rendered.rstrip()):
            return list(spans.values())
        found: Spans = []
        for at, (start, end) in spans.items():
            parts = [(max(start, first), min(end, last)) for first, last in blocks if first < end and start < last]
            words = [word for word in content_and_reasoning(self.messages[at]) if word]
            if parts and not any(word in text[parts[-1][1] : end] for word in words):
                parts[-1] = parts[-1][0], end
            found += parts
        return found


def _split_answer_opening(prompt: str) -> tuple[str, str]:
    """Split a prompt before the white space, <think> or empty block of reasoning with which it starts the answer."""
    head = prompt.rstrip()
    if head.endswith(END_THINK) and head.removesuffix(END_THINK).rstrip().endswith(THINK):
        head = head.removesuffix(END_THINK).rstrip()
    head = head.removesuffix(THINK)
    return head, prompt[len(head) :]


def _continuation_of_prompt(prompt: str, text: str) -> str | None:
    """Return what follows a prompt in `text`, which ends with a turn. None if `text` does not begin with the prompt.

    Prompt and text may start the answer differently: with <think>, with an empty block of reasoning, or plainly.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    head, opening = _split_answer_opening(prompt)
    if not text.startswith(head):
        return None
    rest = text[len(head) :]
    inside, closed, after = rest.lstrip().removeprefix(THINK).partition(END_THINK)
    has_block = rest.lstrip().startswith(THINK) and bool(closed)
    if END_THINK in opening:
        return rest.lstrip("\n") if not has_block else after.lstrip("\n") if not inside.strip() else None
    if THINK not in opening:
        return rest.lstrip()
    if not has_block:
        return rest.lstrip("\n") if closed else f"\n{END_THINK}\n\n" + rest.lstrip("\n")
    begun = opening.lstrip().removeprefix(THINK)
    return (inside.removeprefix(begun) if inside.startswith(begun) else inside.lstrip("\n")) + closed + after


def _no_start_error(at: int) -> DataError:
    return DataError(f"the start of messages[{at}] cannot be found in the chat template's output; {_AS_PAIRS}")


def _omission_error(name: str) -> str:
    return f"the chat template leaves out {name}, which should be trained"
