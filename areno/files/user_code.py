"""Import functions of the user, such as reward functions and dataset loaders.

Settings name a function as `file.py`, `file.py:function` or `package.module.function`, which is called a specification
here. Errors quote the setting `key`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from areno.errors import ArenoError, ConfigError, Problem, did_you_mean, printable
from areno.files.paths import find_file

USER_MODULE = "areno_user_"  # names of modules from `load_module` begin with it


def split_spec(spec: str, default: str) -> tuple[str, str]:
    """Return (file, function) of a specification."""
    file, colon, name = spec.rpartition(":")
    if colon and name.isidentifier() and file:
        return file, name
    return spec, default


def resolve_spec(spec: str, default: str, key: str) -> str:
    """Return the specification with an absolute path. Raises ConfigError if the file is missing or not valid Python."""
    file, name = split_spec(spec, default)
    if not file.endswith(".py"):
        raise ConfigError(Problem(key, f"is {spec!r}; expected file.py or file.py:function"))
    path = find_file(file, key)
    _check_file(path, file, key)
    return f"{path}:{name}"


def load_function(file: str, name: str, key: str) -> Callable[..., Any]:
    """Import a file, and return its function `name`. Raises ConfigError if the import or `get_user_function` fails."""
    return get_user_function(load_module(file, key), name, file, key)


def is_import_path(spec: str) -> bool:
    """Return whether a specification is package.module.name or package.module:name, and no file."""
    module = spec.partition(":")[0]
    names = spec.replace(":", ".", 1).split(".")
    return "." in module and not module.endswith(".py") and all(map(str.isidentifier, names))


def load_import_path(spec: str, key: str) -> Any:
    """Import a class or function. Modules are also found in the working directory. Errors are about `key`."""
    module_name, _, name = spec.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(Problem(key, f"{spec} cannot be imported: {describe_error(error)}")) from error
    if not callable(found):
        raise ConfigError(Problem(key, f"{spec} is {type(found).__name__}; a class or a function is needed"))
    return found


def load_module(file: str, key: str) -> ModuleType:
    """Import a file. Its folder is added to sys.path, so that it can import modules beside it."""
    path = Path(os.path.realpath(os.path.expanduser(file)))
    _check_file(path, file, key)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module_name = f"{USER_MODULE}{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(Problem(key, f"{file} cannot be imported as Python"))
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
    try:
        module_spec.loader.exec_module(module)
    except ArenoError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(Problem(key, f"{file} does not import: {describe_error(error, path)}")) from error
    return module


def get_user_function(module: ModuleType, name: str, file: str, key: str) -> Callable[..., Any]:
    """Return the function `name` of a user's module. Raises ConfigError if there is no such function.

    Also raises ConfigError if the module imports it from a package and defines functions of its own.
    """
    function, own = getattr(module, name, None), _own_functions(module)
    if callable(function) and own and _is_imported(module, name):
        text = f"{name} in {file} is imported from {function.__module__}, and {file} defines {', '.join(own)}"
        raise ConfigError(Problem(key, f"{text}; name one, as in {file}:{own[0]}, or import {name} as another name"))
    if callable(function):
        return function
    if function is not None:
        raise ConfigError(Problem(key, f"{name} in {file} is {type(function).__name__}; a function is needed"))
    hint = did_you_mean(name, own, otherwise=f"; it has {', '.join(own) or 'no functions'}")
    raise ConfigError(Problem(key, f"{file} has no function {name}{hint} (write {file}:function)"))


def resolve_own_name(module: ModuleType, name: str) -> str:
    """Return `name`, or the name of the only function that the file defines if `name` is imported from a package."""
    own = _own_functions(module)
    return own[0] if len(own) == 1 and _is_imported(module, name) else name


def _own_functions(module: ModuleType) -> list[str]:
    found = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return [name for name, value in found.items() if getattr(value, "__module__", None) == module.__name__]


def _is_imported(module: ModuleType, name: str) -> bool:
    """Return whether `name` comes from an installed package and was not renamed, so that it is probably a helper."""
    function = getattr(module, name, None)
    home = getattr(function, "__module__", None) or ""
    source = getattr(sys.modules.get(home), "__file__", None) or ""
    installed = {"site-packages", "dist-packages", Path(os.__file__).parent.name}
    is_foreign = home != module.__name__ and not installed.isdisjoint(Path(source).parts)
    return is_foreign and getattr(function, "__name__", None) == name


def _check_file(path: Path, shown: str, key: str) -> None:
    """Raise ConfigError unless `path` is a file with valid Python. The message calls the file `shown`."""
    if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        raise ConfigError(Problem(key, f"there is no file {shown} (looked for {path})"))
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path.name}:{line}" if line else path.name
        message = getattr(error, "msg", None) or str(error)
        raise ConfigError(Problem(key, f"{shown} does not import: SyntaxError: {message} ({where})")) from error
    except OSError as error:
        raise ConfigError(Problem(key, f"{shown} cannot be read: {error.strerror}")) from error


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Describe an error in one printable line, such as `ValueError: text (reward.py:12)`.

    The line is that of the innermost call in the file `path`, or of the innermost call if none is in that file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if path is not None:
        frames = [frame for frame in frames if frame.filename == str(path)] or frames
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        text = printable(" ".join(str(error).split()))
    except Exception:  # the `__str__` of a user's class may raise any error
        text = ""
    return f"{type(error).__name__}{': ' + text if text else ''}{where}"
