"""Environments of the verifiers package as the source of rows. Needs `pip install 'areno[verifiers]'`."""

from __future__ import annotations

import signal
from typing import Any

from areno.config.rollout.agent import VERIFIERS
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.user_code import describe_error


def load_environment(spec: str, key: str) -> Any:
    """The environment of a `verifiers:NAME`. Raises ConfigError of the setting `key` if that is not possible."""
    name = spec.removeprefix(VERIFIERS)
    try:
        import verifiers
    except ImportError as error:
        text = f"{spec} needs the verifiers package: pip install 'areno[verifiers]' ({error})"
        raise ConfigError(Problem(key, text)) from error
    # An environment takes the signals that end a process for itself.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment: Any = verifiers.load_environment(name)
    except (Exception, SystemExit) as error:  # the package of the environment may raise anything
        cause = error.__cause__ or error
        text = f"the environment {name!r} does not load: {describe_error(cause)}; its package has to be installed"
        raise ConfigError(Problem(key, text)) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if environment.message_type != "chat":
        raise ConfigError(Problem(key, f"the environment {name!r} asks for completions; areno trains on chat messages"))
    return environment


def environment_rows(spec: str, split: str, key: str) -> list[dict[str, Any]]:
    """The rows of an environment: of its own dataset for the split `train`, else of its evaluation dataset."""
    environment = load_environment(spec, key)
    try:
        found = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except ArenoError:
        raise
    except Exception as error:
        text = f"the rows of {spec} cannot be read: {describe_error(error)}"
        raise ConfigError(Problem(key, text)) from error
    shared = {"tools": environment.oai_tools} if environment.oai_tools else {}
    return [{"solutions": row.get("answer"), **shared, **row} for row in found]
