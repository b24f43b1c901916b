"""How kernels are compiled does not depend on the defaults of a release of Triton."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.compiled import KERNELS, Gpu


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let launches compile for an H200, without one."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = dict(vars(driver))
    driver.set_active(Gpu(90))  # type: ignore[arg-type]
    yield
    vars(driver).update(before)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("default", ["0", "1", None])
def test_products_and_sums_are_fused_whatever_the_default(
    hopper: None, monkeypatch: pytest.MonkeyPatch, default: str | None
) -> None:
    """TRITON_DEFAULT_FP_FUSION=0 is what coming releases have. Without it, Triton 3.9 warns of the change."""
    from areno.kernels.adam.triton import _squares_kernel

    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if default is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    grad, sums, n = torch.float32, torch.float64, 64
    _squares_kernel.device_caches.clear()
    made = _squares_kernel.warmup(grad, sums, n, BLOCK=64, grid=(1,))
    assert made.metadata.enable_fp_fusion is True


def test_every_launched_kernel_is_compiled_so() -> None:
    found = []
    for path in sorted(KERNELS.rglob("*.py")):
        source = path.read_text()
        made = re.findall(r"^@(triton\.jit|kernel)(?:\([^)]*\))?\ndef (\w+)", source, re.M)
        assert len(made) == len(re.findall(r"^@(?:triton\.jit|kernel)\b", source, re.M)), path
        launched = set(re.findall(r"\b(\w+)\[", source))
        for decorator, name in made:
            assert (decorator == "kernel") == (name in launched), f"{path}: {name}"
            found += [name] * (decorator == "kernel")
    assert len(found) > 50
