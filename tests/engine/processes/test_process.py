"""Child processes of a real driver: a script as users write it, Ctrl-C, and a driver that is killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areno.engine.processes.child import dumps, without_main_module
from tests.helpers import warm_python
from tests.helpers.processes import is_running, started, until_ended
from tests.helpers.tiny_engine import model_folder
from tests.helpers.waiting import until
from tests.helpers.warm_python import Started

ROOT = Path(__file__).parents[3]

# A script without a guard, with a loss function and a class of its own.
PLAIN = """
import sys
print("script runs", flush=True)

from areno.engine.engine import Engine
from areno.types import TrainSequence
from areno.loss_fns.sft import sft_loss_fn
from tests.helpers.processes import started
from tests.helpers.tiny_engine import spec

def scaled(pack, logprobs_N, factor):
    loss, stats = sft_loss_fn(pack, logprobs_N)
    return loss * factor, stats

class Scaled:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, pack, logprobs_N):
        return scaled(pack, logprobs_N, self.factor)

with Engine(spec(sys.argv[1]), workers="spawn") as engine:
    rows = [TrainSequence([True, False, False], [3, 4, 5])]
    for loss_fn in (sft_loss_fn, Scaled(2.0), lambda *args: scaled(*args, 3.0)):
        stats = engine.train(rows, loss_fn)
        print("factor", round(-stats["loss"] / stats["train_logprobs_mean"], 3), flush=True)
"""

# A driver that is busy until it is interrupted.
BUSY = """
import sys, time
from areno.engine.engine import Engine
from areno.types import TrainSequence
from tests.helpers.processes import started
from tests.helpers.processes import worker_pids
from tests.helpers.tiny_engine import ROLLOUT, request, spec

def sleepy(*_):
    import time
    time.sleep(1000)

engine = Engine(spec(sys.argv[1]), workers="spawn")
pid = worker_pids(engine)[0]
try:
    if sys.argv[2] == "rollout":
        engine.begin_rollout(ROLLOUT)
    print(pid, flush=True)
    while True:
        if sys.argv[2] == "rollout":
            engine.generate([request(i, max_new_tokens=80, ignore_eos=True) for i in range(16)])
        else:
            engine.train([TrainSequence([True, False, False], [3, 4, 5])], sleepy)
except KeyboardInterrupt:
    started = time.monotonic()
    engine.close()
    print("closed in time" if time.monotonic() - started < 500 else "too late", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@contextlib.contextmanager
def driver(script: str, folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(folder), *args]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        yield process


@contextlib.contextmanager
def busy_driver(folder: Path, work: str, tmp_path: Path) -> Iterator[tuple[Started, int]]:
    """A driver from a warm process, and its worker's pid. What they say is in the files out and err."""
    path = folder / "busy.py"
    path.write_text(BUSY)
    out, err = tmp_path / "out", tmp_path / "err"
    process = warm_python.commands().start([str(path), str(folder), work], tmp_path, environment(), out, err)
    try:
        until(lambda: process.poll() is not None or (out.exists() and "\n" in out.read_text()))
        assert process.poll() is None, err.read_text()
        time.sleep(0.3)  # into the middle of the work
        yield process, int(out.read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_and_its_functions_travel(folder: Path) -> None:
    with driver(PLAIN, folder) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.split("\n") == ["script runs", "factor 1.0", "factor 2.0", "factor 3.0", ""]
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("work", ["train", "rollout"])
def test_ctrl_c_reaches_the_driver_alone(folder: Path, work: str, tmp_path: Path) -> None:
    with busy_driver(folder, work, tmp_path) as (process, pid):
        os.killpg(process.pid, signal.SIGINT)
        code, err = process.wait(timeout=50), (tmp_path / "err").read_text()
        assert (tmp_path / "out").read_text() == f"{pid}\nclosed in time\n", err
        assert code == 0
        assert "Traceback" not in err
        assert not is_running(pid)


@pytest.mark.parametrize("work", ["train", pytest.param("rollout", marks=pytest.mark.slow)])
def test_a_killed_driver_leaves_nobody(folder: Path, work: str, tmp_path: Path) -> None:
    with busy_driver(folder, work, tmp_path) as (process, pid):
        process.send_signal(signal.SIGKILL)
        until_ended([pid], 30)


def test_main_is_hidden_and_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", __file__, raising=False)  # a parallel test run has none
    file, module_spec = main.__file__, main.__spec__
    with contextlib.suppress(KeyError), without_main_module():
        assert main.__file__ is None
        assert main.__spec__ is None
        raise KeyError
    assert (main.__file__, main.__spec__) == (file, module_spec)


def test_plain_values_are_pickled_plainly() -> None:
    value = {"a": [1, 2.5, None], "f": model_folder, "t": Path}
    assert dumps(value) == pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(dumps(lambda x: x + 1))(2) == 3
