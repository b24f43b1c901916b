"""The default tests are about the CPU, also where there is a GPU: `pytest -m gpu` is for that."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    selected = config.getoption("markexpr")
    if "gpu" not in selected or "not gpu" in selected:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, and for the processes that tests start
