"""The texts of Hydra: overrides as its grammar takes them, and its errors as one line."""

from __future__ import annotations

import re
import traceback

import yaml
from hydra.errors import MissingConfigException

from areno.errors import ConfigError, did_you_mean

_WORD = re.compile(r"(\$\{[^}]*\}|[^][{}(),=\\])+")  # what is between the signs that mean something to Hydra
_REFERENCE = re.compile(r"\$\{([^${}:]*)\}")
_HYDRA_WORD = re.compile(r"(\$\{[^}]*\}|[\w/+.$%*@?|:\s-])*", re.ASCII)


def quoted(override: str) -> str:
    """An override with quotes around words with letters or signs that Hydra's grammar has no place for, such as ä."""
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"cannot read {override!r}; it is not UTF-8") from None
    key, equals, value = override.partition("=")
    if "'" in value or '"' in value:
        return override

    def quote(found: re.Match[str]) -> str:
        word = found[0].strip()
        return found[0] if _HYDRA_WORD.fullmatch(word) else found[0].replace(word, f'"{word}"')

    return key + equals + _WORD.sub(quote, value)


def references(text: str) -> list[str]:
    """Return the keys that a text refers to as ${key}. A key that is itself made of references is left out."""
    return _REFERENCE.findall(text)


def explain(error: BaseException) -> str:
    """Return an error of Hydra, OmegaConf or the YAML reader as one line."""
    if isinstance(error, RecursionError):
        in_defaults = any(frame.name == "_create_defaults_tree" for frame in traceback.extract_tb(error.__traceback__))
        return "its defaults lead back to the file itself" if in_defaults else "a value is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException):
        options = sorted(error.options or ())
        choices = f"; there are {', '.join(options)}" if options else ""
        name = (error.missing_cfg_file or "").rsplit("/", 1)[-1].removesuffix(".yaml")
        return f"{lines[0].rstrip('.')}{choices}{did_you_mean(name, options)}"
    if not lines and error.__cause__ is not None:
        return explain(error.__cause__)
    if len(lines) > 1 and lines[0].endswith(":"):  # "In 'task': ValidationError raised while composing config:"
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
