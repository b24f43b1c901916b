"""The environment in which a model repairs a Python project, with tools to look at it, change it, run it, submit it."""

import shlex
import shutil
import tempfile
from pathlib import Path

from patch import PatchError, apply_patch, inside

from areno.agents.environment import Environment
from areno.sandbox.box import Box, run

TEST = ["python", "-m", "unittest", "-q"]
MOST_MATCHES, MOST_CHARACTERS = 50, 8000


def _tool(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description):
    return {"type": "string", "description": description}


TOOLS = (
    _tool("inspect_tree", "List the files of the project with their number of lines."),
    _tool("read_file", "Show a file with line numbers.", path=_text("from the root of the project")),
    _tool("search", "Find the lines of all files that contain a text.", text=_text("to look for, not a pattern")),
    _tool("apply_patch", "Change files by a unified diff.", patch=_text("with ---, +++ and @@ lines")),
    _tool("run_command", "Run a command in the project, without a shell.", command=_text("such as python -m unittest")),
    _tool("submit", "Hand in the project. Hidden tests decide. This ends the task."),
)


class RepairTask(Environment):
    """A copy of a project in a folder of its own, which is deleted at the end.

    item.record: a row of the dataset: files (path -> content), hidden_tests (the same) and prompt. The reward is 1 if
    all hidden tests pass on the submitted project, else 0.
    """

    tools = TOOLS

    def __init__(self, item):
        self.row, self.folder = item.record, None

    def reset(self):
        self.folder = Path(tempfile.mkdtemp(prefix="areno-coding-"))
        _write(self.folder, self.row["files"])
        return [{"role": "user", "content": self.row["prompt"]}]

    def close(self):
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def step(self, tool_calls):
        messages = []
        for call in tool_calls:
            if call.name == "submit":
                passed = self.passes_hidden_tests()
                text = "All hidden tests pass." if passed else "Some hidden tests fail."
                return [*messages, call.result(text)], float(passed), True
            messages.append(call.result(self.result_of(call.name, call.arguments)))
        return messages, 0.0, False

    def result_of(self, name, arguments):
        """What a tool answers; what is wrong with the arguments is an answer, too."""
        expected = next(
            each["function"]["parameters"]["required"] for each in TOOLS if each["function"]["name"] == name
        )
        if sorted(arguments) != sorted(expected) or not all(isinstance(each, str) for each in arguments.values()):
            return f"error: {name} takes {', '.join(expected) or 'nothing'}, as text"
        try:
            return getattr(self, name)(**arguments)
        except PatchError as error:
            return f"error: {error}"

    def inspect_tree(self):
        return "\n".join(f"{path} ({len(text.splitlines())} lines)" for path, text in self._texts()) or "no files"

    def read_file(self, path):
        found = inside(self.folder, path)
        if not found.is_file():
            return f"error: there is no file {path}"
        lines = found.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"{number:4} {line}" for number, line in enumerate(lines, start=1))[:MOST_CHARACTERS]

    def search(self, text):
        lines = [
            f"{path}:{number}: {line.strip()}"
            for path, content in self._texts()
            for number, line in enumerate(content.splitlines(), start=1)
            if text in line
        ]
        return "\n".join(lines[:MOST_MATCHES])[:MOST_CHARACTERS] or "nothing found"

    def apply_patch(self, patch):
        return f"changed {', '.join(apply_patch(self.folder, patch))}"

    def run_command(self, command):
        try:
            words = shlex.split(command)
        except ValueError as error:
            return f"error: {error}"
        if not words:
            return "error: the command is empty"
        done = run(words, Box(self.folder))
        ended = f"exit status {done.status}" if not done.why else "timed out" if done.why == "time" else done.why
        return f"{done.output}\n[{ended}]".lstrip()

    def passes_hidden_tests(self):
        """Whether they pass in a fresh copy of the project, so that nothing in it can change them."""
        with tempfile.TemporaryDirectory(prefix="areno-coding-") as folder:
            for path, text in self._texts():
                _write(folder, {path: text} if not Path(path).name.startswith("test") else {})
            _write(folder, self.row["hidden_tests"])
            modules = [str(Path(path).with_suffix("")).replace("/", ".") for path in self.row["hidden_tests"]]
            done = run([*TEST, *modules], Box(folder))
            return done.status == 0 and "OK" in done.output.splitlines()[-1:]

    def _texts(self):
        """(path, content) of the files of the project, in order."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                yield str(path.relative_to(self.folder)), path.read_text(encoding="utf-8", errors="replace")


def _write(folder, files):
    for name, text in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
