"""docs/troubleshooting.md has a row for each warning of a run and for each error that ends one.

A new message fails here with its text. Quote a part of it in the first column of a table on that page, with `…` for
names and numbers. A warning whose words are made elsewhere, as in logger.warning("%s", text), is named in ELSEWHERE.
"""

from __future__ import annotations

import re

from areno.tracking.console import STOPPED
from tests.helpers.messages import ROOT, Message, arguments, errors, returned, warnings
from tests.helpers.pages import codes, of_tables

ARENO = ROOT / "areno"
ELSEWHERE = {
    "areno/run/recovery.py": lambda: ends_of_workers(),
    "areno/trainers/agent_rollout.py": lambda: [
        Message(status.place, f"{status.text}: …")
        for status in arguments(ARENO / "trainers/agent_rollout.py", "failed_sample")
        if not status.is_only_a_hole
    ],
    "areno/run/outputs.py": lambda: returned(ARENO / "tracking/training_warnings.py"),
    "areno/run/setup.py": lambda: returned(ARENO / "plan/lr_schedule.py"),
    "areno/engine/processes/watchdog.py": lambda: arguments(ARENO / "engine/processes/watchdog.py", "_tell"),
    "areno/tracking/console.py": lambda: [Message("areno/tracking/console.py", f"{STOPPED}…")],
}
"""File with a message that is only a hole -> the messages that it prints."""

RUN_TIME = [
    *(
        "agents/pool.py",
        "agents/process.py",
        "engine/decoder/decoder.py",
        "engine/device_memory.py",
        "engine/processes",
    ),
    *("engine/state", "engine/worker.py", "files/durable.py", "scoring", "run/checkpoints.py", "run/evaluator.py"),
    *("run/outputs.py", "run/recovery.py", "run/run.py", "run/setup.py", "run/state_writer.py", "run/states.py"),
    "tracking/samples.py",
    *("tracking/scalar_files.py", "trainers", "user_processes"),
]
"""Where errors are raised that can end a run. Those elsewhere are about settings, data, models, calls of a script."""
OF_SCRIPTS = [
    "call start() first",
    "the engine is closed",
    "request id",
    "outside a rollout phase",
    "cannot be sent to a worker",
    "holds one device",
    "need a tokenizer",
]
"""Errors there that only a script's calls or its settings can cause. They say what to do."""


def ends_of_workers() -> list[Message]:
    """How a worker ended: `_raise_worker_lost(rank, how)`."""
    file = ARENO / "engine/processes/spawned.py"
    said = re.findall(r'_raise_worker_lost\(rank, (?:".*?" if .*? else )?f?"(.*?)"\)', file.read_text(encoding="utf-8"))
    return [Message(str(file), re.sub(r"\{.*?\}", "…", f"… {text}")) for text in said]


def entries() -> list[str]:
    """The quoted messages of the page: all code in the first column of its tables."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return [quoted for cell in re.findall(r"^\| (`.*?`) \|", page, re.M) for quoted in re.findall(r"`(.*?)`", cell)]


def is_about(entry: str, message: str) -> bool:
    """Whether the parts of an entry between its holes occur in the message, in this order."""
    parts = [re.escape(part) for part in re.split("[… ]*…[… ]*", entry) if part]
    return re.search(".*?".join(parts), message, re.S) is not None


def messages() -> list[Message]:
    found = [each for place in RUN_TIME for each in errors(ARENO / place)]
    for message in warnings(ARENO):
        file = message.place.partition(":")[0]
        assert not message.is_only_a_hole or file in ELSEWHERE, f"{message.place}: say in ELSEWHERE where its words are"
        found += ELSEWHERE[file]() if message.is_only_a_hole else [message]
    return [message for message in found if not message.is_only_a_hole]


def test_the_index_quotes_entries() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    index = page.partition("## Index by symptom")[2].partition("\n## ")[0]
    quoted = [words for row in of_tables(index)[1:] for words in codes(row[1])]
    assert len(quoted) > 30
    assert not [words for words in quoted if not any(words in entry for entry in entries())]


def test_each_message_of_a_run_has_an_entry() -> None:
    missing = [
        f"{message.place}: {message.text}"
        for message in messages()
        if not any(words in message.text for words in OF_SCRIPTS)
        and not any(is_about(entry, message.text) for entry in entries())
    ]
    assert not missing, "add rows to docs/troubleshooting.md for:\n" + "\n".join(missing)


def test_each_entry_is_about_a_message() -> None:
    """The words of a message may change: the page must follow."""
    texts = [message.text for message in messages()] + [message.text for message in errors(ARENO)]
    gone = [entry for entry in entries() if not any(is_about(entry, text) for text in texts)]
    assert not gone, gone
    vague = [entry for entry in entries() if len(re.sub("[^a-z]", "", entry)) < 8]
    assert not vague, f"these would match too much: {vague}"


def test_the_search_for_messages_sees_each_way_to_write_one(tmp_path, monkeypatch) -> None:
    code = """
def one(log, error):
    text = "the disk of %s is full"
    text += "; free some"
    logger.warning(text, error)
    logger.error(f"worker {error} hangs" if error else "all hang")
    raise EngineError(Problem("a.key", "lower {}, " + "please", error))
"""
    monkeypatch.setattr("tests.helpers.messages.ROOT", tmp_path)
    (tmp_path / "code.py").write_text(code)
    found = {each.text for each in [*warnings(tmp_path), *errors(tmp_path)]}
    assert found == {"the disk of … is full; free some", "worker … hangs", "all hang", "lower …, please"}
    assert is_about("the disk of … is full", "the disk of … is full; free some")
    assert not is_about("is full … the disk", "the disk of … is full; free some")
