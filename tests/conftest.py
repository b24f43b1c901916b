"""The default tests are about the CPU, also where there is a GPU: `pytest -m gpu` is for that."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import multiprocessing
import os
import signal
import ssl
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.helpers")  # before any of them is imported


def _on_gpu(config: pytest.Config) -> bool:
    selected = config.getoption("markexpr")
    return "gpu" in selected and "not gpu" not in selected


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on all cores with pytest-xdist, unless -n says otherwise.

    Tests that are named on the command line, and those for a GPU, run one by one in this process: a debugger works, and
    a single test does not wait for workers to start.
    """
    named = config.option.file_or_dir or config.option.keyword or _on_gpu(config) or config.option.collectonly
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None and not named and not is_worker:
        config.option.numprocesses = "auto"
        config.option.maxprocesses = config.option.maxprocesses or 8  # each takes about 1 GB of memory
        # A worker that is done takes tests from the end of another's list, so most modules stay with one worker.
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    if not _on_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, and for the processes that tests start
        # The models of the tests are too small for threads, and the processes of several tests share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:  # by the conftest.py of a folder that is named: it has read the environment
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Images for containers often forbid bytecode. Each of the many processes that tests start would then compile the
    # whole package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs this way. The processes that tests start would then ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """One more than there are cores: tests wait now and then, for what they start or for a limit."""
    n = yield
    return n + ("PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    from tests.helpers import warm_python

    config.add_cleanup(warm_python.share())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    gc.disable()  # a fifth of the time: what is imported is no garbage
    try:
        return (yield)
    finally:
        gc.enable()  # also in the process that only deals out the tests, and when a file cannot be imported


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of a GPU, which may be slow tests as well, unless they are asked for; begin with the longest."""
    if not _on_gpu(config):
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Those that take minutes say so by a limit of their own. Begun last, one of them would keep all others waiting.
        items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish() -> None:
    gc.freeze()  # a search for garbage would look through torch and all tests each time
    gc.set_threshold(10_000, 20, 20)  # a composition makes a hundred times the 700 objects of the default


def pytest_unconfigure() -> None:
    # Or libraries would report what is left of their objects. Not earlier: pytest collects garbage at its end.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="session")
def warm_workers() -> Iterator[None]:
    """Workers start at once; see warm.py."""
    from tests.helpers import warm

    with pytest.MonkeyPatch.context() as patch:
        for module in ("areno.engine.processes.local", "areno.data.encoder_process"):
            patch.setattr(f"{module}.multiprocessing", warm.workers())
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_compositions() -> Iterator[None]:
    """Hydra does not parse the same texts again; see quick_hydra.py."""
    from tests.helpers import quick_hydra

    with pytest.MonkeyPatch.context() as patch:
        quick_hydra.quicken(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_revision() -> Iterator[None]:
    """Each run writes down the revision of the checkout, for which git looks at all its files, and the versions of the
    packages, for which all they say of themselves is read: here once."""
    from areno.tracking import run_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_revision", functools.cache(run_folder.git_revision))
        patch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))
        yield


@pytest.fixture(autouse=True, scope="session")
def old_objects_stay_frozen() -> Iterator[None]:
    """What a run froze it unfreezes at its end, with all that this process has frozen itself. The collections of later
    tests would look through torch and all tests: a third of a second each, and a test may have a hundred."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_frozen(freeze: Callable[[], None] = gc.freeze) -> None:
    """Those of libraries that earlier tests have imported, too."""
    if len(gc.get_objects(2)) > 50_000:
        gc.collect()
        freeze()


@pytest.fixture(autouse=True, scope="session")
def certificates_once() -> Iterator[None]:
    """Each client of a server reads the certificates of the machine, a third of the time of a request. Nobody here
    speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_syncs() -> Iterator[None]:
    """Files need not outlive a crash of the machine: what tests find in them is the same, and disks take their time."""

    def fsync(fd: Any) -> None:
        os.fstat(fd if isinstance(fd, int) else fd.fileno())  # a file that is not open is an error as before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture
def cold_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as they do for users."""
    monkeypatch.setattr("areno.engine.processes.local.multiprocessing", multiprocessing)


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """name -> a tokenizer of its own, which the test may change."""
    from tests.helpers.tokenizers import load_tokenizer

    return load_tokenizer


@pytest.fixture(scope="session")
def tiny(tokenizer_of: Callable[[str], Any]) -> Any:
    """ChatML with tools, tool calls and a switch for thinking."""
    return tokenizer_of("tiny")


@pytest.fixture(scope="session", params=["tiny", "qwen3"])
def chatml(request: pytest.FixtureRequest, tokenizer_of: Callable[[str], Any]) -> Any:
    """`tiny`, and the real tokenizer whose template does the same to the conversations of our tests."""
    return tokenizer_of(request.param)


@pytest.fixture(scope="session")
def plain(tokenizer_of: Callable[[str], Any]) -> Any:
    """Has no chat template."""
    return tokenizer_of("plain")
