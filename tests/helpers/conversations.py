"""Messages and recorded turns of a conversation."""

from __future__ import annotations

from typing import Any

from areno.server.messages import read_messages
from areno.server.prompt_builder import PromptBuilder, conversation_keys
from areno.server.returned_responses import message_digest


def turn_of(
    conversations: PromptBuilder,
    messages: list[Any],
    said: str,
    tools: Any,
    answer: Any = None,
    hidden: frozenset[int] = frozenset(),
) -> Any:
    """A turn as an agent returns it, whose model has written `said`."""
    tokenizer = conversations.tokenizer
    asked = read_messages(messages)
    prompt = conversations.build_prompt(asked, tools)
    tokens = tokenizer.encode(said, add_special_tokens=False)
    message = answer or {"role": "assistant", "content": said.removesuffix("<|im_end|>")}
    [kept] = read_messages([message])
    conversations.cache_turn(prompt, tokens, frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")]), kept, hidden)
    sampled = {"token_ids": tokens, "logprobs": [-1.0] * len(tokens), "versions": [0] * len(tokens)}
    sampled["message"] = message_digest(message)
    told = {
        "session": "s",
        "conversation": conversation_keys(asked)[-1],
        "temperature": 1.0,
        "prompt_token_ids": prompt.tokens,
        "sources": prompt.sources,
        "choices": [sampled],
    }
    turn = {"messages": messages, "tools": tools, "tool_choice": None, "message": message, "finish_reason": "stop"}
    return {**turn, "tokens": told, "choice": ["", 0]}


USER, OTHER = {"role": "user", "content": "hello"}, {"role": "user", "content": "and you?"}
