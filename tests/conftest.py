"""The default tests are about the CPU, also where there is a GPU: `pytest -m gpu` is for that."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TOKENIZERS = Path(__file__).parents[2] / "shared/data/tokenizers"


def pytest_configure(config: pytest.Config) -> None:
    selected = config.getoption("markexpr")
    if "gpu" not in selected or "not gpu" in selected:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, and for the processes that tests start


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """name -> a tokenizer of its own, which the test may change."""
    return _tokenizer


def _tokenizer(name: str) -> Any:
    if not (_TOKENIZERS / name).is_dir():
        pytest.skip(f"{_TOKENIZERS / name} is not there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_TOKENIZERS / name)


@pytest.fixture(scope="session")
def qwen3() -> Any:
    return _tokenizer("qwen3")


@pytest.fixture(scope="session")
def minimind() -> Any:
    return _tokenizer("minimind")


@pytest.fixture(scope="session")
def gpt2() -> Any:
    """Has no chat template."""
    return _tokenizer("gpt2")


@contextmanager
def _areno_log_restored() -> Iterator[None]:
    logger = logging.getLogger("areno")
    before = logger.propagate, logger.level
    yield
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = before[0]
    logger.setLevel(before[1])


@pytest.fixture
def log_restored() -> Iterator[None]:
    """A run sends areno's log to its own folder; later tests want it where it was."""
    with _areno_log_restored():
        yield


@pytest.fixture(scope="module")
def log_restored_by_module() -> Iterator[None]:
    """The same after the last test of a module, whose runs are shared by its tests."""
    with _areno_log_restored():
        yield
