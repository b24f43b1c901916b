"""Environments of OpenEnv: a server that runs already, or an app that each agent process serves for itself.

A server speaks JSON over a WebSocket, so one at an address needs no package here.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from typing import Any

from areno.environments.package import SIZES, TEST, TRAIN, EnvironmentPackage, RunAgent, run_async
from areno.errors import DataError
from areno.files.user_code import describe_error

_FIRST_SEED = {TRAIN: 0, TEST: 1_000_000}
_MAX_TURNS = 16
_MAX_MESSAGE = 4 << 20  # bytes of an observation
_CHECK_S, _CLOSE_S = 20.0, 2.0
_FULL, _INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
_ROOM = (
    "set max_concurrent_envs of its create_app to at least the number of samples that run at once, and "
    "SUPPORTS_CONCURRENT_SESSIONS=True of its environment"
)
_OWN_SERVER = (
    "they need different versions of the package mcp; start the server of OpenEnv in an environment of its own, and "
    "set this to openenv:http://HOST:PORT"
)


class OpenEnv(EnvironmentPackage):
    """`openenv:URL` of a server, or `openenv:MODULE:APP` as in the field `app` of an openenv.yaml."""

    scheme = extra = distribution = "openenv"
    versions = ">=0.10,<0.11"
    has_agent = True

    def __init__(self, name: str, key: str):
        super().__init__(name, key)
        self._is_address = name.startswith(("http://", "https://"))
        if not self._is_address:
            self.excludes = {"verifiers": _OWN_SERVER}

    def check(self) -> None:
        """Check that the server answers, and that it has room for a second session."""
        self._ask(_check_room)

    def rows(self, split: str, options: Mapping[str, Any]) -> Sequence[Any]:
        """Return a row for each task of the split, or for each seed if the server has no list of tasks.

        The options are prompt (text before the first observation), size (number of rows), max_turns, and reset
        (arguments of `reset`).
        """
        own = {"prompt": None, "size": None, "max_turns": _MAX_TURNS, "reset": {}}
        self.check_options(options, list(own))
        self.check_counts({"size": 1, "max_turns": 1, **options}, size=1, max_turns=1)
        kinds = {"prompt": (str, "text"), "reset": (Mapping, "mapping")}
        if wrong := {
            name: f"is {options[name]!r}; a {called} is expected"
            for name, (kind, called) in kinds.items()
            if name in options and not isinstance(options[name], kind)
        }:
            raise self.option_errors(wrong)
        about, splits, n_tasks = self._ask(lambda http: _read_tasks(http, split))
        self.check_split(split, splits)
        own |= options
        resets: list[dict[str, Any]]
        if n_tasks is None:
            resets = [{"seed": _FIRST_SEED[split] + n} for n in range(own["size"] or SIZES[split])]
        else:
            resets = [{"split": split, "index": index} for index in range(n_tasks)][: own["size"]]
        shared = {"prompt": own["prompt"] or about, "max_turns": own["max_turns"]}
        return [{**shared, "reset": {**own["reset"], **reset}} for reset in resets]

    def agent(self) -> RunAgent:
        """Return an agent that plays an episode in a session of the server, and returns the reward of each turn."""
        url = self.name if self._is_address else self._start_server()[0]
        connecting: list[asyncio.Future[tuple[Any, Any]]] = []  # the first sample connects for all

        async def run_agent(ctx: Any, batch: Any) -> Any:
            [item] = batch
            if not connecting:
                connecting.append(asyncio.ensure_future(_connect(url)))
            try:
                http, action = await asyncio.shield(connecting[0])
            except Exception:
                connecting.clear()
                raise
            async with _open_session(http) as session:
                return await _play(_Policy(http, ctx), session, item, await _Actions.of_session(session, action))

        return run_agent

    def _ask(self, ask: Any) -> Any:
        """Return the result of `ask(http)`, an async function that sends requests to the server."""

        async def run(url: str) -> Any:
            async with _http(url) as http:
                return await asyncio.wait_for(ask(http), _CHECK_S)

        with self._serving() as url:
            try:
                return run_async(run(url))
            except DataError as error:
                raise self.problem("cannot be used: {}", error) from error
            except Exception as error:  # connections fail in many ways
                why = f"not within {_CHECK_S:g} s" if isinstance(error, asyncio.TimeoutError) else describe_error(error)
                raise self.problem("does not answer as a server of OpenEnv does: {}", why) from error

    @contextmanager
    def _serving(self) -> Iterator[str]:
        url, stop = (self.name, lambda: None) if self._is_address else self._start_server()
        try:
            yield url
        finally:
            stop()

    def _start_server(self) -> tuple[str, Any]:
        """Serve the app in a thread of this process. Returns (its address, a function that ends it)."""
        module, _, name = self.name.partition(":")
        if not module or not name:
            raise self.problem("is neither the address of a server (openenv:http://HOST:PORT) nor openenv:MODULE:APP")
        self.check_installed()
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as uvicorn does
        try:
            import uvicorn

            server = uvicorn.Server(uvicorn.Config(vars(import_module(module))[name], log_level="warning"))
        except (Exception, SystemExit) as error:  # the module is code of others
            raise self.problem("does not load: {}", describe_error(error)) from error
        listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        threading.Thread(target=server.run, args=([listening],), daemon=True, name="openenv").start()

        def stop() -> None:
            server.should_exit = True

        return f"http://127.0.0.1:{listening.getsockname()[1]}", stop


def _http(url: str) -> Any:
    import aiohttp

    # No limits: each sample has a connection, and its time is limited as a whole.
    connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(f"{url.rstrip('/')}/", connector=connector, timeout=no_limit)


async def _get(http: Any, path: str, body: Any = None) -> Any:
    """Return the JSON of GET, or of POST with a body. None if the server has none at this path."""
    async with http.request("GET" if body is None else "POST", path, json=body) as response:
        if response.status in (404, 405, 501):
            return None
        if response.status != 200:
            raise DataError("the server answered {} with status {}", path, response.status)
        return await response.json()


async def _connect(url: str) -> tuple[Any, Mapping[str, Any]]:
    """Return (HTTP client of a server, schema of its actions)."""
    http = _http(url)
    try:
        schema = await asyncio.wait_for(_get(http, "schema"), _CHECK_S)
    except BaseException:
        await http.close()
        raise
    return http, (schema or {}).get("action") or {}


async def _check_room(http: Any) -> None:
    async with _open_session(http) as first, _open_session(http) as second:
        for session in (first, second):
            await session.request("state")


async def _read_tasks(http: Any, split: str) -> tuple[str, list[str], int | None]:
    """Return (description of the environment, its splits, number of tasks). None: it has no list of tasks."""
    about = ((await _get(http, "metadata")) or {}).get("description") or "Environment"
    names = await _get(http, "list_environments")
    splits = await _get(http, f"{names[0]}/splits") if names else None
    if splits is None:
        return about, [TRAIN, TEST], None
    found = await _get(http, f"{names[0]}/num_tasks", {"split": split})
    return about, [each["name"] for each in splits], (found or {}).get("num_tasks", 0)


@asynccontextmanager
async def _open_session(http: Any) -> AsyncIterator[_Session]:
    """Open a session of the server. At the end it is closed, so that its place is free again."""
    import aiohttp

    timeout = aiohttp.ClientWSTimeout(ws_close=_CLOSE_S)  # type: ignore[call-arg]
    async with http.ws_connect("ws", max_msg_size=_MAX_MESSAGE, timeout=timeout) as connection:
        yield _Session(connection)
        with suppress(asyncio.TimeoutError, OSError):  # the episode is over, and its reward is known
            if not connection.closed:
                await connection.send_json({"type": "close"})
                await connection.receive(timeout=_CLOSE_S)  # comes when the session has ended


class _InvalidAction(Exception):
    """The server has not accepted an action."""


class _Session:
    """A session of the server, which has an environment of its own."""

    def __init__(self, connection: Any):
        self._connection = connection

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the data of the answer to a message. Raises _InvalidAction, and DataError for any other failure."""
        import aiohttp

        await self._connection.send_json({"type": kind} if data is None else {"type": kind, "data": data})
        message = await self._connection.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            if self._connection.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                raise DataError(f"an observation has more than {_MAX_MESSAGE >> 20} MiB")
            raise DataError(f"the server of OpenEnv has closed the session (code {self._connection.close_code})")
        answer = json.loads(message.data)
        found = answer.get("data") or {}
        code = found.get("code", "UNKNOWN") if answer.get("type") == "error" else None
        if code == _FULL:
            text = f"the server of OpenEnv has room for {found.get('max_sessions')} sessions at once, and has as many"
            raise DataError(f"{text}; {_ROOM}")
        if code == _INVALID:
            errors = found.get("errors") or [{"loc": (), "msg": found.get("message")}]
            raise _InvalidAction("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors))
        if code is not None and kind != "state":  # an environment need not have one before it is reset
            raise DataError(f"the environment failed: {found.get('message')} ({code})")
        return found


class _PolicyError(Exception):
    """The policy has not answered. `code` is the code of its error."""

    def __init__(self, error: Mapping[str, Any]):
        super().__init__(error.get("message"))
        self.code = error.get("code")


class _Policy:
    """Sends requests to the session of a sample, with a fifth of the CPU time that the client of OpenAI takes."""

    def __init__(self, http: Any, ctx: Any):
        self._http, self._url = http, f"{ctx.base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {ctx.api_key}"}

    async def answer(self, messages: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
        async with self._http.post(self._url, json=body, headers=self._headers) as response:
            found = await response.json()
        if response.status != 200:
            raise _PolicyError(found["error"])
        return found["choices"][0]["message"]


# Messages and actions ------------------------------------------------------------------------------------------------


class _Actions:
    """How the messages of the model become actions.

    - tools of MCP: a call is a call of the tool
    - an action with one text: the message is the text
    - any other action: the tool `act`, whose arguments are the fields of the action
    """

    def __init__(self, schema: Mapping[str, Any], mcp_tools: Sequence[Mapping[str, Any]] | None):
        fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        self.is_mcp = mcp_tools is not None
        self._text_field = _text_field(fields)
        self.tools: list[dict[str, Any]] = []
        if mcp_tools is not None:
            self.tools = [
                _tool(each["name"], each.get("description"), each.get("inputSchema") or each.get("input_schema"))
                for each in mcp_tools
            ]
        elif self._text_field is None:
            required = [name for name in schema.get("required", ()) if name in fields]
            parameters = {**schema, "properties": fields, "required": required}
            self.tools = [_tool("act", parameters.pop("description", None), parameters)]

    @classmethod
    async def of_session(cls, session: _Session, schema: Mapping[str, Any]) -> _Actions:
        if not {"tool_name", "arguments"} <= schema.get("properties", {}).keys():
            return cls(schema, None)
        found = await session.request("mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1})
        if found.get("error"):
            raise DataError(f"the environment cannot list its tools: {found['error'].get('message')}")
        return cls(schema, found["result"]["tools"])

    def read(self, message: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield (the beginning of the reply, an action, or None if the call is none) for each action of a message."""
        if self._text_field is not None and not self.is_mcp:
            yield {"role": "user"}, {self._text_field: message.get("content") or ""}
        for call in message.get("tool_calls") or ():
            reply, function = {"role": "tool", "tool_call_id": call["id"]}, call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict) or function["name"] not in {t["function"]["name"] for t in self.tools}:
                yield reply, None
            elif self.is_mcp:
                yield reply, {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}
            else:
                yield reply, arguments


def _text_field(fields: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the field if there is one alone, of any text."""
    [name, *more] = fields or [None]
    is_text = name is not None and fields[name].get("type") == "string" and not {"enum", "const"} & fields[name].keys()
    return name if is_text and not more else None


def _tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def _text_of(result: Mapping[str, Any]) -> str:
    """Return an observation as text: that of its only field or of a tool's result, else its fields as JSON."""
    observation = result.get("observation") or {}
    fields = {name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", {})}
    if "tool_name" in fields:
        error, found = fields.get("error"), fields.get("result")
        if error:
            return f"error: {error.get('message')}" if isinstance(error, Mapping) else f"error: {error}"
        content = found.get("content") if isinstance(found, Mapping) else None
        if isinstance(content, list):
            return "\n".join(part.get("text", "") for part in content if isinstance(part, Mapping))
        fields = {"result": found}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _first_messages(item: Any, seen: str) -> list[Any]:
    """Return the messages of a row, with the first observation in the last message of the user."""
    *before, last = item.messages or [{"role": "user", "content": item.prompt}]
    if seen and last["role"] == "user" and isinstance(last["content"], str):
        return [*before, {**last, "content": f"{last['content']}\n\n{seen}"}]
    return [*before, last, *([{"role": "user", "content": seen}] if seen else [])]


async def _play(policy: _Policy, session: _Session, item: Any, actions: _Actions) -> list[float] | None:
    """Return the reward of each turn, or None if the environment gives no reward."""
    result = await session.request("reset", item.record.get("reset") or {})
    messages = _first_messages(item, _text_of(result))
    rewards: list[float] = []
    is_over, has_reward = bool(result.get("done")), False
    while not is_over and len(rewards) < item.record.get("max_turns", _MAX_TURNS):
        message = await policy.answer(messages, actions.tools)
        messages.append(message)
        rewards.append(0.0)
        # A text beside tools is the last word of the model.
        is_over = bool(actions.tools) and not message.get("tool_calls")
        for reply, action in () if is_over else actions.read(message):
            try:
                if action is None:
                    raise _InvalidAction("there is no such tool, or its arguments are not a JSON object")
                result = await session.request("step", action)
            except _InvalidAction as error:
                messages.append({**reply, "content": f"error: {error}"})
                continue
            messages.append({**reply, "content": _text_of(result)})
            if result.get("reward") is not None:
                rewards[-1] += float(result["reward"])
                has_reward = True
            if is_over := bool(result.get("done")):
                break
    # An environment that ends without a reward has none to give, which is not a reward of 0.
    return rewards if has_reward or not (actions.is_mcp or result.get("done")) else None
