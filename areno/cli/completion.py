"""The command `areno completion`, which prints shell code that completes commands, flags and settings on TAB."""

from __future__ import annotations

import argparse

from areno.errors import ArenoError

_SHELLS = ("bash", "zsh", "fish", "powershell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints shell code that completes commands, flags, task names and settings on TAB. "
        'Put `eval "$(areno completion bash)"` into ~/.bashrc (zsh: ~/.zshrc, after compinit), or '
        "`areno completion fish | source` into the configuration of fish. Needs pip install 'areno[completion]'."
    )
    parser.add_argument("shell", choices=_SHELLS, help="name of the shell")


def run(arguments: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise ArenoError("completion needs argcomplete; install it by pip install 'areno[completion]'") from error
    print(argcomplete.shellcode(["areno"], shell=arguments.shell))
    return 0
