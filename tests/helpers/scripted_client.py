"""A client of the OpenAI protocol whose model is a function: for agents and environments without a model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion

Said = str | list[tuple[str, Any]]
"""A text, or calls: names with arguments as an object or, to be wrong, as text."""


class ScriptedClient:
    """client.chat.completions.create(...) of AsyncOpenAI. `requests` has the arguments of each call.

    say: from the messages to what the model says; or a list of what it says, in this order.
    """

    def __init__(self, say: Callable[[list[Any]], Said] | list[Said], finish_reason: str | None = None):
        self._say, self._finish_reason = say, finish_reason
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request: Any) -> ChatCompletion:
        number = len(self.requests)
        self.requests.append(request)
        said = self._say[number] if isinstance(self._say, list) else self._say(request["messages"])
        if inspect.isawaitable(said):
            said = await said
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{index}",
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                    },
                }
                for index, (name, arguments) in enumerate(said)
            ]
        finish_reason = self._finish_reason or ("stop" if isinstance(said, str) else "tool_calls")
        choice = {"index": 0, "finish_reason": finish_reason, "message": message}
        fields = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": request["model"]}
        return ChatCompletion.model_validate({**fields, "choices": [choice]})
