"""Runs a comparison of Triton kernels in their interpreter, which needs a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(code: str, timeout: float = 300) -> None:
    """Whether Triton interprets is decided when it is imported; a comparison on the CPU has no other way to be run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    root = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=timeout)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter cannot loop under this numpy (Triton 3.6 under 2.5)")
    assert done.returncode == 0, done.stderr
