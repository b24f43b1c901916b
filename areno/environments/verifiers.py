"""Tasksets of the verifiers package, which have their own tasks, programs and rewards.

A program sends its requests to a server of verifiers in this process, which passes them on to the policy. Each request
has the id of its trace in the header X-Session-ID, so a trace gets the id of the session of its sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areno.environments.package import EnvironmentPackage, RunAgent, run_async
from areno.errors import ConfigError, DataError
from areno.files.user_code import describe_error

_KEY_VAR = "ARENO_SESSION"  # must not hold "API_KEY", which programs do not get
_SELECT = "select"
_PREPARE_S, _LOCK_S = 300.0, 60.0


class Verifiers(EnvironmentPackage):
    """`verifiers:NAME`, an installed taskset."""

    scheme = extra = distribution = "verifiers"
    versions = ">=0.4,<0.5"
    has_agent = takes_groups = True

    def check(self) -> None:
        """Check that verifiers is there, and uv, which starts programs. Reading the rows loads the taskset."""
        self.check_installed()
        self._uv()

    def check_installed(self) -> None:
        """Raise ConfigError if verifiers, or the version of mcp that it needs, is missing."""
        super().check_installed()
        from packaging.requirements import Requirement

        for text in requires(self.distribution) or ():
            need = Requirement(text)
            if need.name == "mcp" and not need.specifier.contains(found := _version("mcp"), prereleases=True):
                text = "needs mcp{}, but {} is installed: pip install 'areno[verifiers]' into an environment of its own"
                raise self.problem(text, need.specifier, f"version {found}" if found else "none")

    def rows(self, split: str, options: Mapping[str, Any]) -> Sequence[Any]:
        """Return a row for each task. A taskset has no splits of its own.

        The options are those of the environment's configuration in verifiers, such as taskset, agent, id and n, and
        select, which chooses tasks.
        """
        self.check_split(split)
        settings = {name: value for name, value in options.items() if name != _SELECT}
        environment = self._load(settings)
        run_async(self._prepare(environment))
        from verifiers.v1.configs.select import SelectConfig

        try:
            select = SelectConfig.model_validate(options.get(_SELECT) or {})
        except ValidationError as error:
            raise self._settings_error(error, _SELECT) from error
        try:
            tasks = environment.taskset.select(select)
            if not tasks.bounded:
                raise self.option_errors({f"{_SELECT}.limit": f"is not set, and {self.spec} has no end; set it"})
            return [
                {
                    "prompt": task.data.prompt_text or task.data.description or task.data.name or self.name,
                    "verifiers": settings,
                    "task": task.data.model_dump(mode="json", exclude_none=True),
                }
                for task in tasks
            ]
        except ConfigError:
            raise
        except Exception as error:  # the taskset is code of others
            raise self.problem("has tasks that cannot be read: {}", describe_error(error)) from error

    def agent(self) -> RunAgent:
        """Return an agent that runs an episode for a sample, or for a group with agent.whole_group."""
        self.check_installed()
        os.environ[_KEY_VAR] = "none"  # the header names the session
        serving = _Serving(self._load)

        async def run_agent(ctx: Any, batch: Any) -> Any:
            items = list(batch)
            settings = items[0].record.get("verifiers")
            if settings is None:
                raise DataError(f"its row is not of {self.spec}; train_dataset.path has to name the taskset")
            environment = await serving.environment(settings)
            return await _Episode(environment, ctx, items).run()

        return run_agent

    def _load(self, settings: Mapping[str, Any]) -> Any:
        self.check_installed()
        try:
            return _environment(self.name, json.dumps(settings))
        except ValidationError as error:
            raise self._settings_error(error) from error
        except (Exception, SystemExit) as error:  # a taskset is code of others
            raise self.problem("does not load: {}", describe_error(error)) from error

    def _settings_error(self, error: ValidationError, *section: str) -> ConfigError:
        return self.option_errors({".".join(map(str, [*section, *one["loc"]])): one["msg"] for one in error.errors()})

    def _uv(self) -> str:
        uv = shutil.which("uv", path=os.pathsep.join([os.environ.get("PATH", ""), os.path.expanduser("~/.local/bin")]))
        if uv is None:
            raise self.problem("needs the program uv, which starts the programs of agents: pip install uv")
        return uv

    async def _prepare(self, environment: Any) -> None:
        """Let uv install what the programs of the environment need, so that a run needs no network."""
        from verifiers.v1.runtimes import SubprocessConfig, make_runtime
        from verifiers.v1.runtimes.subprocess import SubprocessRuntime

        uv = self._uv()
        for role, spec in environment._agent_specs.items():
            if not isinstance(spec.runtime, SubprocessConfig):
                continue
            runtime = make_runtime(spec.runtime)
            await runtime.start()
            try:
                await asyncio.wait_for(environment._harnesses[role].setup(runtime), _PREPARE_S)
            except Exception as error:
                text = "cannot prepare the program of {}: {}; with a network, this has to succeed once"
                raise self.problem(text, role, " ".join(describe_error(error).split())[:500]) from error
            finally:
                await runtime.stop()
        for script in Path(SubprocessRuntime.scripts_dir).glob("*.py"):
            if not script.with_name(f"{script.name}.lock").exists():  # without it, uv asks the index each time
                with contextlib.suppress(subprocess.TimeoutExpired):
                    command = [uv, "lock", "--script", script, "--quiet", "--no-config"]
                    subprocess.run(command, check=False, timeout=_LOCK_S)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@lru_cache
def _environment(name: str, settings: str) -> Any:
    """Return an environment. Unless it says otherwise, agents run on this machine, and have no shell."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.runtimes.prime import PrimeConfig
    from verifiers.v1.utils.compile import validate_pairing
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

    given = json.loads(settings)
    given["taskset"] = {"id": name, **(given.get("taskset") or {})}
    for role, field in env_config_type(name, given.get("id") or "").model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        own: dict[str, Any] = {}
        if isinstance(field.default.runtime, PrimeConfig):  # the default of verifiers, a service
            own["runtime"] = {"type": "subprocess"}
        if field.default.harness is None and default_harness_id(name) == "bash":  # likewise
            own["harness"] = {"id": "null"}
        given[role] = {**own, **(given.get(role) or {})}
    environment = load_environment(resolve_env_config(given))
    task = type(environment.taskset).task_type()
    for role, spec in environment._agent_specs.items():
        validate_pairing(environment._harnesses[role], task, spec.runtime)
    for retries in (environment.config.retries, *(spec.retries for spec in environment._agent_specs.values())):
        if retries.max_retries or retries.rules:
            raise ValueError("retries are set, but the session of a sample records one attempt; leave them out")
    return environment


class _Serving:
    """Keeps the servers of environments open until the process ends."""

    def __init__(self, load: Callable[[Mapping[str, Any]], Any]):
        self._load, self._stack = load, AsyncExitStack()
        self._starting: dict[str, asyncio.Task[Any]] = {}

    async def environment(self, settings: Mapping[str, Any]) -> Any:
        key = json.dumps(settings)
        if key not in self._starting:
            self._starting[key] = asyncio.ensure_future(self._start(settings))
        try:
            return await asyncio.shield(self._starting[key])
        except Exception:
            self._starting.pop(key, None)
            raise

    async def _start(self, settings: Mapping[str, Any]) -> Any:
        environment = self._load(settings)
        await self._stack.enter_async_context(environment.serving())
        return environment


class _Episode:
    """One episode. Its traces belong to one sample, or each to a sample of a group."""

    def __init__(self, environment: Any, ctx: Any, items: Sequence[Any]):
        import verifiers.v1 as vf

        self._environment, self._items = environment, items
        self._sessions = [ctx.session_of(item) for item in items]
        self._client = vf.EvalClientConfig(base_url=ctx.server_url, api_key_var=_KEY_VAR)
        self._context = vf.ModelContext(model="policy", client=self._client)
        self._n_traces = 0

    async def run(self) -> Any:
        environment, config = self._environment, self._environment.config
        n_attempts = vars(config).get("n")
        if n_attempts is not None and n_attempts != len(self._items):
            text = f"{config.env_id} compares the {n_attempts} attempts (n) of an episode, but gets {len(self._items)} "
            raise DataError(text + "samples; set agent.whole_group=true and n to gconfig.n_samples")
        if n_attempts is None and len(self._items) > 1:
            raise DataError(f"{config.env_id} has one attempt in an episode; set agent.whole_group=false")
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(self._items[0].record["task"])
        [slot] = environment.slots(kind(data, config.taskset.task))
        episode = await environment.run_slot(slot, self._context, on_trace=self._on_trace)
        if episode.errors:
            raise DataError(_describe(episode.errors))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(self._items) == 1:
            return _mean([_reward(trace) for trace in traces])
        if len(traces) != len(self._items):
            raise DataError(f"an episode of {config.env_id} has {len(traces)} attempts for {len(self._items)} samples")
        by_session = {trace.id.partition(".")[0]: trace for trace in traces}
        return [_result(by_session.get(session)) for session in self._sessions]

    def _on_trace(self, trace: Any) -> None:
        """Give a new trace its session, before its first request."""
        if trace.agent.config.client != self._client:
            return
        if not trace.agent.trainable:
            name = trace.agent.name
            raise DataError(f"the agent {name} is not trained; give it a model of its own with {name}.client")
        # A trace of its own has a folder of its own, so the ids differ.
        session = self._sessions[self._n_traces % len(self._sessions)]
        trace.id = f"{session}.{self._n_traces}"
        self._n_traces += 1


def _describe(errors: Sequence[Any]) -> str:
    return f"{errors[-1].type}: {errors[-1].message}"


def _result(trace: Any) -> dict[str, float] | Exception | None:
    try:
        if trace is None:
            raise DataError("the episode has no attempt for this sample")
        return _reward(trace)
    except DataError as error:
        return error


def _reward(trace: Any) -> dict[str, float] | None:
    """Return the reward of a trace with its parts and metrics, or None if the taskset gives none."""
    if not trace.ok:
        raise DataError(_describe(trace.errors))
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise DataError(f"the reward {missing[0]} was not computed ({trace.stop_condition})")
    if not trace.rewards:
        return None
    parts = {name: reward.value for name, reward in trace.rewards.items()}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {**parts, "reward": trace.reward}


def _mean(rewards: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """Return the mean of the rewards and parts of several agents in one episode."""
    given = [each for each in rewards if each is not None]
    names = dict.fromkeys(name for each in given for name in each)
    return {name: sum(found := [each[name] for each in given if name in each]) / len(found) for name in names} or None
