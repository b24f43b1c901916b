"""The command `areno`, which runs one of its subcommands.

Each subcommand is a module of this package with the functions `add_arguments` and `run`. Only the module of the
subcommand in use is imported, and no subcommand imports torch before it runs, so that --help is fast.

Exit codes: 0 done, 1 the work failed or something is missing, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from areno.errors import ArenoError, ConfigError, as_file_error, did_you_mean
from areno.files import interrupts
from areno.version import __version__

COMMANDS = {
    "train, evaluate and serve": {
        "train": "start a training run",
        "evaluate": "score a checkpoint on data, with the reward of its run",
        "serve": "serve a checkpoint with an OpenAI-compatible API",
        "reproduce": "make a base model and its reinforcement learning from nothing, and judge the result",
    },
    "look at runs": {
        "runs": "list runs with their date, state, best result and duration",
        "report": "write one HTML page of runs: curves, samples, settings",
        "replay": "recompute the log-probabilities of one recorded sample with a checkpoint",
        "trace": "summarise the trace of a run: phases of steps, idle devices, critical path",
        "compare": "print the differences between runs: settings, versions, results",
        "reward": "try reward functions on recorded samples",
    },
    "this installation": {
        "plan": "predict the memory and the time of a run, without a GPU",
        "check": "test whether runs work on this machine, or whether a model is supported",
        "env": "print versions, devices, kernels and extras",
        "bench": "measure speed, and compare it with the limits of the device",
        "recipes": "list algorithms, tasks and tested runs",
        "completion": "print the shell code that completes commands on TAB",
    },
}
"""Heading -> command -> help."""

# These import torch or Hydra before their first output, which takes seconds.
_SLOW = {"train", "evaluate", "serve", "reproduce", "replay", "env", "bench"}
_WITH_COMMAND = {"plan"}  # their own options are followed by another command
_AFTER_DASHES = {"check"}  # another command may follow after --
_SILENT = {"--cfg", "stats_logger.console=quiet"}

_ABOUT = """\
areno post-trains language models with reinforcement learning.

  areno check                           test this installation
  areno train --algo gspo --ckpt MODEL --dataset-path rows.jsonl --reward-fn-path reward.py
  areno report outputs/prompts/TRIAL    look at the run

`areno COMMAND --help` has more. Each algorithm is also a Hydra command: python -m areno.recipes.gspo --help"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `areno` with these arguments, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    known, after = dict(_commands()), None
    if words[:1] and words[0] in _AFTER_DASHES and "--" in words:
        words, after = words[: words.index("--")], words[words.index("--") + 1 :]
    if "_ARGCOMPLETE" in os.environ:
        _print_completions()
    if not words or words[0] not in known:
        parser = _top_parser()
        if words and not words[0].startswith("-"):
            parser.error(f"there is no command {words[0]!r}{did_you_mean(words[0], known)}")
        parser.parse_args(words)
        parser.print_help()
        return 0 if not words else 2
    parser = argparse.ArgumentParser(prog=f"areno {words[0]}", allow_abbrev=False)
    module = _import_command(parser, words[0])
    # parse_intermixed_args lets flags and other words alternate, but it cannot print the help of every parser.
    parse = parser.parse_known_intermixed_args
    if words[0] in _WITH_COMMAND or {"-h", "--help"} & set(words):
        parse = parser.parse_known_args
    try:
        arguments, others = parse(words[1:])
        if words[0] in _WITH_COMMAND:
            arguments.command = others
        elif others:
            from areno.cli.train_flags import unknown_flags

            raise ConfigError(unknown_flags(parser, others))
        if words[0] in _AFTER_DASHES:
            arguments.command = after
        if words[0] in _SLOW and not _SILENT & set(words) and sys.stderr.isatty():
            print(f"areno {__version__}: {words[0]} starts ...", file=sys.stderr, flush=True)
        interrupts.raise_on_interrupt()
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may not be UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        return module.run(arguments)
    except ArenoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output (`| head`) has ended. Python must not raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        reason = as_file_error(error)
        if reason is None or os.environ.get("ARENO_DEBUG") == "1":
            raise
        print(f"error: {reason}", file=sys.stderr)
        return 1


def _commands() -> Iterator[tuple[str, str]]:
    for commands in COMMANDS.values():
        yield from commands.items()


def _import_command(parser: argparse.ArgumentParser, name: str) -> Any:
    """Add the arguments of the subcommand `name` to its parser, and return the module of the subcommand."""
    module = import_module(f"areno.cli.{name}")
    module.add_arguments(parser)
    return module


def _top_parser() -> argparse.ArgumentParser:
    listed = [
        f"{heading}:\n" + "\n".join(f"  {name:<12}{text}" for name, text in commands.items())
        for heading, commands in COMMANDS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="areno",
        usage="areno COMMAND [options]",
        description=_ABOUT,
        epilog="\n\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"areno {__version__}")
    return parser


def _print_completions() -> None:
    """Print completions for the command line that the shell has put into COMP_LINE, and exit. argcomplete does this."""
    import argcomplete

    parser = _top_parser()
    commands = parser.add_subparsers(metavar="COMMAND")
    typed = os.environ.get("COMP_LINE", "").split()
    for name, text in _commands():
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if name in typed[1:2]:
            _import_command(command, name)
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
