"""How kernels are compiled does not depend on the defaults of a release of Triton."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.compiled import KERNELS


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("default", ["0", "1", None])
def test_products_and_sums_are_fused_whatever_the_default(monkeypatch: pytest.MonkeyPatch, default: str | None) -> None:
    """TRITON_DEFAULT_FP_FUSION=0 is what coming releases have. Without it, Triton 3.9 warns of the change.

    Nothing is compiled here: LLVM would take over signals of this process.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from areno.kernels.adam.triton import _squares_kernel

    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if default is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *args, **how: launched.append(how))
    _squares_kernel[(1,)](None, None, 64, BLOCK=64, num_warps=4)
    [how] = launched
    assert CUDABackend(GPUTarget("cuda", 90, 32)).parse_options(how).enable_fp_fusion is True


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_gluon_runs_on_hopper(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from areno.kernels import jit

    monkeypatch.setattr(jit, "HAS_GLUON", True)
    monkeypatch.setattr(jit, "capability", lambda _: capability)
    monkeypatch.setattr(jit, "supports_pdl", lambda _: True)
    jit.runs_gluon.cache_clear()
    try:
        assert jit.runs_gluon(torch.device("cuda:0")) is (capability == (9, 0))
    finally:
        jit.runs_gluon.cache_clear()


def test_a_kernel_in_gluon_that_does_not_compile_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from areno.kernels import jit

    class Kernel:
        def __init__(self, name: str, fails: bool):
            self.__name__, self.fails, self.launches = name, fails, 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert grid == (2, 3)
            return self

        def __call__(self, *arguments: int, **options: Any) -> None:
            self.launches += 1
            assert arguments == (4,)
            assert options["SIZE"] == 5
            if self.fails:
                raise ValueError("no such instruction")

    monkeypatch.setattr(jit, "_uncompiled", set())
    bad, good = Kernel("bad", fails=True), Kernel("good", fails=False)
    assert [jit.launch_gluon(kernel, (2, 3), 4, SIZE=5) for kernel in (bad, good, bad, good)] == [
        False,
        True,
        False,
        True,
    ]
    assert (bad.launches, good.launches) == (1, 2)
    assert caplog.text.count("Triton cannot compile a kernel in Gluon: no such instruction") == 1


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
