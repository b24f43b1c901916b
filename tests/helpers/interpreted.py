"""Runs a comparison of Triton kernels in their interpreter, which needs a process of its own."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm_python


def run_interpreted(code: str, timeout: float = 300) -> None:
    """Whether Triton interprets is decided when it is imported; a comparison on the CPU has no other way to be run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    words = ["-c", f"from tests.helpers.interpreted import prepare_once; prepare_once(); {code}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python.interpreting().run(words, Path(__file__).parents[2], environment, timeout)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter cannot loop under this numpy (Triton 3.6 under 2.5)")
    assert done.returncode == 0, done.stderr


def on_ranks(main: Callable[..., None], args: tuple[Any, ...], n: int) -> None:
    """Call main(rank, *args) in n processes of one that interprets and has computed nothing yet.

    They are forked, unlike those of `warm.on_ranks`: a new process imports for seconds, and interprets half as fast
    without `prepare_once`.
    """
    import torch.multiprocessing

    torch.multiprocessing.start_processes(main, args, n, start_method="fork")


def prepare_once() -> None:
    """Each function that a kernel calls makes the interpreter prepare Triton's language again: half of the time."""
    from triton.runtime import interpreter

    # No sum of the small integers here overflows. To look for that takes a quarter of the time.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    make_types_once(interpreter.tl.core, type(interpreter.interpreter_semantic))

    modules = {id(interpreter.tl), id(interpreter.tl.core)}
    prepare, launch, numpy_type = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    prepared: set[frozenset[int]] = set()  # in this launch: which of the modules
    used: dict[int, frozenset[int]] = {}  # by the globals of a function

    def prepare_if_new(fn: Any) -> Any:
        found = used.get(id(fn.__globals__))
        if found is None:
            found = used[id(fn.__globals__)] = frozenset(id(value) for value in fn.__globals__.values()) & modules
        if found in prepared:
            return None  # only a launch takes the result, and it is the first
        prepared.add(found)
        return prepare(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        prepared.clear()
        launch(self, *args, **kwargs)

    numpy_types: dict[str, Any] = {}  # the interpreter makes this table for each operation

    def known_numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_if_new, launch_anew
    interpreter._get_np_dtype = known_numpy_type


def make_types_once(core: Any, semantic: Any) -> None:
    """Each operation makes several types of blocks and shapes of tensors, mostly such as there have been."""
    unwrap_slowly, new_type = core._unwrap_if_constexpr, core.block_type.__init__
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast
    plain = {core.tensor, int, core.dtype}
    types: dict[tuple[Any, ...], Any] = {}  # by the identity of the element type, which the type holds, and the shape
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind in plain else unwrap_slowly(o)

    def known_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = id(element_ty), *core._unwrap_shape(shape)
        if key not in types:
            made = object.__new__(cls)
            new_type(made, element_ty, shape)
            types[key] = made
        return types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = shape, core.constexpr(math.prod(sizes))
        self.shape, self.numel = shapes[sizes]

    def broadcast_if_apart(self: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    def cast_if_apart(self: Any, given: Any, dtype: Any, *how: Any, **options: Any) -> Any:
        return given if given.dtype is dtype else cast(self, given, dtype, *how, **options)

    core._unwrap_if_constexpr = unwrap
    core.block_type.__new__, core.block_type.__init__ = known_type, lambda *_: None
    core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value, semantic.cast = broadcast_if_apart, cast_if_apart
