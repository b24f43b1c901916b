"""`areno check -- COMMAND`, which checks a run before it starts."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from areno.cli.given_command import split_command
from areno.errors import ConfigError, Problem, did_you_mean, keys_renamed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with -- COMMAND", "the command of a run: its data, reward and settings")
    add = group.add_argument
    add("--only", metavar="GROUPS", help="groups of checks, such as data,reward (default: all)")
    add("--json", metavar="FILE", help="also write the findings as JSON")
    add("--html", metavar="FILE", help="also write the findings as a page")
    add(
        "--device-kind",
        metavar="NAME",
        help="kind of device of the run, as in areno plan --device: h100-80gb, h200, ...",
    )
    add("--offline", action="store_true", help="ask no judge, no async reward function and no agent")
    add("--calls", type=int, metavar="N", help="ask a judge at most N times (default: 9)")
    add("--model", choices=["real"], help="run the model of the command in place of a small random one of its family")


def run(arguments: argparse.Namespace) -> int:
    # A large vocabulary means tensors of many MB, whose pages the kernel makes twice as fast if they are large.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first allocation

    from areno.checks.all_checks import CHECKS
    from areno.checks.inputs.findings import run_checks
    from areno.checks.inputs.subject import Options, Subject
    from areno.checks.page import html_page, red_lines, summary_line, text_lines
    from areno.tracking.check_result import key_of, write_result
    from areno.tracking.run_log import RunLog

    started = time.monotonic()
    only = _groups(arguments.only, CHECKS)
    given = split_command(arguments.command, "check --", complete=True)
    if (n_calls := arguments.calls) is not None and n_calls < 5:
        raise ConfigError(Problem("--calls", f"is {n_calls}; at least 5 are expected, or --offline"))
    options = Options(
        offline=arguments.offline,
        n_calls=n_calls or Options.n_calls,
        real_model=arguments.model == "real",
        device=arguments.device_kind,
    )
    color, findings = sys.stdout.isatty(), []
    with (
        keys_renamed(given.names.get),
        RunLog(own_process=True, console="quiet"),
        tempfile.TemporaryDirectory(prefix="areno-check-") as folder,
    ):
        subject = Subject(given.algorithm, given.compose(), Path(folder), options, _announce)
        _ = subject.datasets  # data that cannot be read is an error of the command itself
        for finding in run_checks(CHECKS, subject, only):
            if not findings or findings[-1].group != finding.group:
                print(f"\n{finding.group}" if findings else finding.group)
            findings.append(finding)
            print(*text_lines(finding, color), sep="\n", flush=True)
        records = [finding.record() for finding in findings]
        command = shlex.join(arguments.command)
        path = write_result(subject.config, key_of(subject.config, subject.fingerprints()), command, records)
    summary = summary_line(findings, time.monotonic() - started)
    print(*["", f"result: {os.path.relpath(path)}", *red_lines(findings), summary], sep="\n")
    if arguments.json:
        record = {"command": command, "findings": records}
        Path(arguments.json).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.html:
        Path(arguments.html).write_text(html_page(command, findings, summary), encoding="utf-8")
    return int(any(finding.verdict == "red" for finding in findings))


def _announce(text: str) -> None:
    print(f"areno check {text}", file=sys.stderr, flush=True)


def _groups(text: str | None, known: object) -> set[str] | None:
    names = list(known) if isinstance(known, dict) else []
    if text is None:
        return None
    found = {name.strip() for name in text.split(",")}
    if wrong := sorted(found - set(names)):
        hint = did_you_mean(wrong[0], names)
        raise ConfigError(Problem("--only", f"there is no {wrong[0]!r}{hint}; there are {', '.join(names)}"))
    return found
