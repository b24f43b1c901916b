"""All kernels compile for GPUs from a T4 on, as a rollout and a training step launch them, and fit into these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)  # about a minute of computing
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [("90", "bfloat16"), ("75", "float32"), ("86", "bfloat16")],  # a T4 has less shared memory than all later GPUs
)
def test_all_kernels_compile(tmp_path: Path, capability: str, dtype: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled", capability, dtype], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("not launched: \n"), done.stdout[-2000:]
