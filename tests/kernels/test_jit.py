"""How kernels are compiled does not depend on the defaults of a release of Triton."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from areno.kernels import backend
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


class Kernel:
    """A kernel in Gluon that counts its launches. It may raise an error when it is launched, or already compiled."""

    def __init__(self, name: str, error: Exception | None = None, *, compiles: bool = True):
        self.__name__, self.error, self.compiles, self.launches = name, error, compiles, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (2, 3)
        return self

    def __call__(self, *arguments: int, **options: Any) -> None:
        self.launches += 1
        assert arguments == (4,)
        assert options["SIZE"] == 5
        if self.error is not None:
            raise self.error

    def warmup(self, *arguments: int, grid: tuple[int, ...], **options: Any) -> None:
        assert (arguments, grid, options["SIZE"]) == ((4,), (2, 3), 5)
        if not self.compiles:
            assert self.error is not None
            raise self.error


@pytest.fixture(name="gluon")
def _gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module jit on a machine whose Triton has Gluon, before any kernel."""
    from areno.kernels import jit

    monkeypatch.setattr(jit, "HAS_GLUON", True)
    monkeypatch.setattr(jit, "supports_pdl", lambda _: True)
    monkeypatch.setattr(backend, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(jit, "_uncompiled", set())
    jit._has_gluon.cache_clear()
    yield jit
    jit._has_gluon.cache_clear()


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_gluon_runs_on_hopper(capability: tuple[int, int], gluon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compute_capability", lambda _: capability)
    assert gluon.can_run_gluon(torch.device("cuda:0"), "good") is (capability == (9, 0))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such instruction"), "no such instruction"),
        (OutOfResources(9, 8, "shared memory"), "Required: 9"),
    ],
)
def test_a_kernel_in_gluon_that_does_not_compile_runs_no_more(
    error: Exception, message: str, gluon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Kernel("bad", error, compiles=isinstance(error, OutOfResources)), Kernel("good")
    assert not gluon.launch_gluon(bad, (2, 3), 4, SIZE=5)
    assert gluon.launch_gluon(good, (2, 3), 4, SIZE=5)
    assert [gluon.can_run_gluon(torch.device("cuda:0"), name) for name in ("bad", "good")] == [False, True]
    assert (bad.launches, good.launches) == (1, 1)
    assert "Triton cannot compile the kernel bad in Gluon" in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
    ],
)
def test_errors_of_cuda_are_raised(error: Exception, gluon: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        gluon.launch_gluon(Kernel("good", error), (2, 3), 4, SIZE=5)
    assert gluon.can_run_gluon(torch.device("cuda:0"), "good")
    assert not caplog.text


def test_every_launched_kernel_is_compiled_so() -> None:
    found = []
    for path in sorted(KERNELS.rglob("*.py")):
        source = path.read_text()
        made = re.findall(r"^@(triton\.jit|kernel)(?:\([^)]*\))?\ndef (\w+)", source, re.M)
        assert len(made) == len(re.findall(r"^@(?:triton\.jit|kernel)\b", source, re.M)), path
        launched = set(re.findall(r"\b(\w+)\[|\b_launch\((\w+),", source))
        launched = {name for names in launched for name in names}
        for decorator, name in made:
            assert (decorator == "kernel") == (name in launched), f"{path}: {name}"
            found += [name] * (decorator == "kernel")
    assert len(found) > 50
