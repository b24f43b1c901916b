"""The agent programs that `install` installs, with the settings with which a run starts them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from areno.config.agent import AgentConfig

HERE = Path(__file__).parent
INSTALLED = Path(
    os.environ.get("ARENO_HARNESSES")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areno-harnesses"
)


@dataclass(frozen=True)
class Program:
    """`{prompt}`, `{url}`, `{key}`, `{model}` and `{home}` stand for their values in every text."""

    installed: str
    """Folder of the program in INSTALLED."""
    dialect: str
    """"anthropic", "responses" or "chat"."""
    command: str
    """Split into words before the placeholders are replaced."""
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Text of the files in the home directory."""


def _recipe(name: str, installed: str, dialect: str) -> Program:
    recipe = yaml.safe_load((HERE.parents[1] / "conf" / "agent" / f"{name}.yaml").read_text())
    return Program(installed, dialect, recipe["command"], recipe["environment"], recipe.get("files", {}))


def _script(name: str, dialect: str, **environment: str) -> Program:
    environment = {"URL": "{url}", "KEY": "{key}", "MODEL": "{model}", "DIALECT": dialect, **environment}
    script = HERE / "scripts" / f"run_{name.replace('-', '_')}.py"
    return Program(name, dialect, f"python {shlex.quote(str(script))} {{prompt}}", environment)


PROGRAMS = {
    "claude": _recipe("claude_code", "claude", "anthropic"),
    "codex": _recipe("codex", "codex", "responses"),
    "opencode": _recipe("opencode", "opencode", "chat"),
    "mini-swe-agent": _recipe("mini_swe_agent", "mini-swe-agent", "chat"),
    "openai-agents-chat": _script("openai-agents", "chat"),
    "openai-agents-responses": _script("openai-agents", "responses"),
    "langgraph-chat": _script("langgraph", "chat"),
    "langgraph-responses": _script("langgraph", "responses"),
    "langgraph-anthropic": _script("langgraph", "anthropic"),
    "pydantic-ai-chat": _script("pydantic-ai", "chat"),
    "pydantic-ai-responses": _script("pydantic-ai", "responses"),
    "pydantic-ai-anthropic": _script("pydantic-ai", "anthropic"),
    "smolagents": _script("smolagents", "chat"),
    "crewai": _script("crewai", "chat", CREWAI_DISABLE_TELEMETRY="true"),
    "aider": Program(
        "aider",
        "chat",
        "aider --model openai/{model} --message {prompt} --edit-format diff --yes-always --no-git --no-check-update "
        "--analytics-disable --no-show-release-notes --no-show-model-warnings --no-pretty hello.txt",
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        # A known model is not looked up on the network.
        {".aider.model.metadata.json": '{"openai/{model}": {"max_input_tokens": 32768, "mode": "chat"}}'},
    ),
}


def is_installed(name: str) -> bool:
    return (INSTALLED / PROGRAMS[name].installed / "installed").exists()


def settings_of(name: str) -> AgentConfig:
    program = PROGRAMS[name]
    return AgentConfig(
        command=program.command, environment=program.environment, files=program.files, read=[str(HERE / "scripts")]
    )


def path_of(name: str) -> str:
    """The variable PATH with which the program is found."""
    installed = INSTALLED / PROGRAMS[name].installed
    return os.pathsep.join([str(installed / "bin"), str(installed / "node_modules/.bin"), os.environ["PATH"]])
