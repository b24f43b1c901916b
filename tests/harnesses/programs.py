"""The agent programs that `install` installs, and how a test starts each of them against a server."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

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


def run_program(
    name: str,
    url: str,
    key: str,
    folder: Path,
    prompt: str,
    model: str = "policy",
    timeout: float = 120,
    prefix: Sequence[str] = (),
) -> tuple[int, str]:
    """Run the program in `folder`/work with `folder`/home as its home, and return its exit code and its output.

    Args:
        url: Root of the server or of a session, without /v1.
        timeout: Seconds after which the program is killed; its exit code is then -9.
        prefix: Words before the command, such as those of a sandbox.
    """
    program, home, work = PROGRAMS[name], folder / "home", folder / "work"
    values = {"prompt": prompt, "url": url, "key": key, "model": model, "home": str(home)}
    work.mkdir(parents=True, exist_ok=True)
    for path, text in program.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(_fill(text, values))
    home.mkdir(exist_ok=True)
    installed = INSTALLED / program.installed
    path = [str(installed / "bin"), str(installed / "node_modules" / ".bin"), os.environ["PATH"]]
    environment = {"HOME": str(home), "PATH": os.pathsep.join(path), "LANG": "C.UTF-8", "TERM": "dumb"}
    environment |= {key: _fill(text, values) for key, text in program.environment.items()}
    command = [*prefix, *(_fill(word, values) for word in shlex.split(program.command))]
    # A file and not a pipe: what the program leaves running holds a pipe open.
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            while _kill_processes_of(home):
                time.sleep(0.05)
        code = process.wait()
        output.seek(0)
        return code, output.read()


def _kill_processes_of(home: Path) -> bool:
    """Kill the processes whose home is this one. The programs start commands in sessions of their own."""
    mark, found = f"HOME={home}\0".encode(), False
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
                found = True
    return found


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


if __name__ == "__main__":
    code, output = run_program(*sys.argv[1:4], Path(sys.argv[4]), sys.argv[5])
    print(output)
    sys.exit(code)
