"""An environment that gives a model the tools of MCP servers (https://modelcontextprotocol.io).

It needs `pip install 'areno[mcp]'`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from areno.agents.environment import Call, Environment, StepResult
from areno.errors import ConfigError
from areno.types import Message


class McpEnvironment(Environment):
    """A task whose tools come from MCP servers. The task ends when the model answers with text.

    The reward of each step is 0. To give other rewards, derive from this class and override `step` or `answer`, or use
    a reward function. A reward function finds the outputs of the tools in `tool_results` of the RewardRecord that it
    receives.

    Args:
        messages: The messages of the first request to the model.
        *servers: Each is a URL, an `mcp.StdioServerParameters` (a command that runs during the episode), or an
            `mcp.server.MCPServer` in this process. No two servers may have a tool of the same name.
        timeout_s: The time limit of each tool call, in seconds.
    """

    def __init__(self, messages: Sequence[Message], *servers: Any, timeout_s: float = 60.0):
        self._messages, self._servers, self._timeout_s = list(messages), servers, timeout_s
        self._open = AsyncExitStack()
        self._client_of: dict[str, Any] = {}  # by the name of the tool
        self.tools: list[dict[str, Any]] = []

    async def reset(self) -> Sequence[Message]:
        """Connect to the servers and list their tools. Raises ConfigError if two have a tool of the same name."""
        try:
            from mcp import Client
        except ImportError as error:
            raise ConfigError("tools of MCP servers need the mcp package: pip install 'areno[mcp]'") from error
        for server in self._servers:
            client = await self._open.enter_async_context(Client(server, read_timeout_seconds=self._timeout_s))
            for tool in await _list_tools(client):
                if tool.name in self._client_of:
                    raise ConfigError(f"two MCP servers have a tool {tool.name!r}; give them different names")
                self._client_of[tool.name] = client
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                self.tools.append({"type": "function", "function": function})
        return self._messages

    async def step(self, tool_calls: list[Call]) -> StepResult:
        """Call the tools one after the other. An error of a tool becomes a message for the model."""
        return [call.result(await self._call_tool(call)) for call in tool_calls], 0.0, False

    async def close(self) -> None:
        await self._open.aclose()

    async def _call_tool(self, call: Call) -> str:
        from mcp import MCPError

        try:
            result = await self._client_of[call.name].call_tool(call.name, call.arguments)
        except MCPError as error:  # unknown arguments, a timeout
            return f"error: {error}"
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(parts)
        return f"error: {text}" if result.is_error else text


async def _list_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools
