"""What `areno check --` finds in a run, in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno.checks.all_checks import CHECKS
from areno.checks.inputs.findings import Check, Finding, run_checks
from areno.checks.inputs.subject import Options, Subject
from areno.cli.given_command import split_command


def findings(command: str, *settings: str, only: str = "data", **options: Any) -> list[Finding]:
    """The findings of the groups in `only` about the run `RECIPE --config-name=TASK`, written as "recipe task"."""
    recipe, task = command.split()
    given = split_command([recipe, f"--config-name={task}", *settings], "check")
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(given.algorithm, given.compose(), Path(folder), Options(**options))
        return list(run_checks(CHECKS, subject, set(only.split(","))))


def found_by(checks: Sequence[Check], *command: str) -> list[Finding]:
    """The findings of single checks about the run of a recipe, such as "grpo", "--config-name=quickstart"."""
    given = split_command(list(command), "check")
    with tempfile.TemporaryDirectory() as folder:
        return list(run_checks({"": checks}, Subject(given.algorithm, given.compose(), Path(folder), Options())))


def red(found: Sequence[Finding]) -> set[str]:
    return {finding.name for finding in found if finding.verdict == "red"}


def failed(found: Sequence[Finding]) -> list[Finding]:
    """Checks that broke themselves, which no run may cause."""
    return [finding for finding in found if "the check itself failed" in finding.line]


def data_file(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
