"""Agents that are classes with a method `run(data, **more)`, as AReaL's workflows are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from areno.agents.trajectories import AgentBatch, AgentContext
from areno.errors import ConfigError, Problem
from areno.files.user_code import describe_error

_OF_RUN = ("base_url", "api_key", "http_client")  # keyword arguments


def agent_function(loaded: Callable[..., Any], key: str, whole: str | None = None) -> Callable[..., Any]:
    """Return `loaded`, or if it is a class, an agent function that calls the method `run` of one object of it.

    `whole` is the setting with which a call gets several samples, if it is true.
    """
    if not inspect.isclass(loaded):
        return loaded
    name = loaded.__name__
    if not any("run" in vars(base) for base in loaded.__mro__):
        raise ConfigError(Problem(key, f"the class {name} has no method run(data, **more)"))
    if whole is not None:
        text = f"is true, but the class {name} ({{}}) gets one sample at a time; leave it out"
        raise ConfigError(Problem(f"agent.{whole}", text.format(key)))
    try:
        workflow: Any = loaded()
    except (Exception, SystemExit) as error:
        raise ConfigError(Problem(key, f"{name}() fails: {describe_error(error)}")) from error
    return _call_of(workflow.run, key, name)


def _call_of(run: Callable[..., Any], key: str, name: str) -> Callable[[AgentContext, AgentBatch], Any]:
    parameters = inspect.signature(run).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = [given for given in _OF_RUN if takes_all or given in parameters]
    try:
        inspect.signature(run).bind({}, **dict.fromkeys(taken))
    except TypeError as error:
        raise ConfigError(Problem(key, f"{name}.run(data, **more) cannot be called: {error}")) from error

    def call(ctx: AgentContext, batch: AgentBatch, client: Any) -> Any:
        [item] = batch
        messages = item.messages or [{"role": "user", "content": item.prompt}]
        given = {"base_url": ctx.get_base_url(), "api_key": ctx.api_key, "http_client": client}
        return run({"messages": messages, **item.record}, **{kind: given[kind] for kind in taken})

    async def run_agent(ctx: AgentContext, batch: AgentBatch) -> Any:
        async with http_client() as client:
            return await call(ctx, batch, client)

    def run_plain_agent(ctx: AgentContext, batch: AgentBatch) -> Any:
        return call(ctx, batch, http_client())

    return run_agent if inspect.iscoroutinefunction(run) else run_plain_agent


def http_client() -> Any:
    import httpx

    # timeout=None: the server limits the time of each request.
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
