"""Kills runs at random moments, starts them again with the same command, and compares what they leave.

    python -m tests.kill_runs --runs 100 --seed 0
    python -m tests.kill_runs --recipes gspo --runs 4 engine.world_size=4 engine.deterministic=true

Every run is a small one of the quickstarts, on the CPU in fp32. SIGKILL hits the driver, a worker, or all processes of
the run; at a random moment, while a state is written or while a checkpoint is; and sometimes the run is killed twice.
In the end the weights, optimizer states, samples and metrics (but for times) must be those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import warm_python
from tests.helpers.warm_python import Started

ROOT = Path(__file__).parents[1]
TIMES = re.compile(r"time|tokens_per_second|memory")
LIMIT_S = 300

SETTINGS = [
    "total_train_steps=7",
    "total_train_epochs=9",
    "train_dataset.loader=null",
    "train_dataset.path=rows.jsonl",
    "train_dataset.batch_size=8",
    "saver.freq_steps=3",
    "trial_name=t",
    "engine.device=cpu",
]
VALIDATION = [
    "valid_dataset.loader=null",
    "valid_dataset.path=valid.jsonl",
    "valid_dataset.shuffle=true",
    "valid_dataset.batch_size=7",
    "evaluator.freq_steps=2",
]
POLICY = [
    *VALIDATION,
    "gconfig.n_samples=4",
    "gconfig.temperature=1.5",
    "rollout.dump_to_file=true",
    "reward.workers=1",
    "eval_gconfig.greedy=false",
]
RECIPES = {
    "gspo": ["--config-name=quickstart", *POLICY, "rollout.dynamic_sampling=true"],
    # Samples of several steps are in flight, and prompts are replaced meanwhile.
    "grpo": [
        "--config-name=quickstart",
        *POLICY,
        "gconfig.temperature=3.0",
        "gconfig.max_new_tokens=60",
        "gconfig.min_new_tokens=12",
        "reward.fn=reward.py",
        "rollout.max_concurrent_rollouts=16",
        "rollout.max_head_offpolicyness=2",
        "rollout.prompts_ahead=6",
        "rollout.dynamic_sampling=true",
        "actor.use_decoupled_loss=true",
    ],
    "ppo": ["--config-name=quickstart_ppo", *POLICY, "critic.warmup_steps=2", "critic.ppo_n_minibatches=2"],
    "online_dpo": ["--config-name=quickstart_online_dpo", *POLICY, "pairs_per_prompt=2"],
    "dpo": ["--config-name=quickstart_dpo", *VALIDATION],
    "kto": ["--config-name=quickstart_kto", *VALIDATION],
    "prm": ["--config-name=quickstart_prm", *VALIDATION],
    "rw": ["--config-name=quickstart_rw", *VALIDATION],
    "sft": ["--config-name=quickstart_base", "actor.optimizer.lr=1e-3"],
}
ROWS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "dpo": lambda a, b: {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 10)},
    "kto": lambda a, b: {"prompt": f"{a}+{b}=", "response": str(a + b - 10 * (a % 2)), "label": a % 2 == 0},
    "prm": lambda a, b: {"prompt": f"{a}+{b}=", "completions": [f"{a}", f"{a + b}"], "labels": [1, a % 2]},
    "rw": lambda a, b: {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 10)},
    "sft": lambda a, b: {"prompt": f"{a}+{b}=", "response": str(a + b)},
}

REWARD = """
def reward_fn(record):
    return float(sum(map(ord, record.completion)) % 5 == 0)
"""


def arguments(recipe: str) -> list[str]:
    """The command line of a small run, in a folder with its rows."""
    return [*RECIPES[recipe], *SETTINGS]


def write_rows(recipe: str, folder: Path) -> None:
    """Write 20 rows to train on, for batches of 8: an epoch has two steps, and rows are left over."""
    row = ROWS.get(recipe, lambda a, b: {"prompt": f"{a}+{b}=", "solutions": str(a + b)})
    for name, numbers in {"rows": range(11, 31), "valid": range(41, 59)}.items():
        text = "".join(json.dumps(row(a, 9 + a % 7)) + "\n" for a in numbers)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "reward.py").write_text(REWARD)


@dataclass
class Run:
    """One run in a folder of its own, however often it is started."""

    recipe: str
    folder: Path
    settings: list[str] = field(default_factory=list)

    @property
    def result(self) -> Path:
        [config] = self.folder.glob("outputs/*/t/config.yaml")
        return config.parent

    def prepare(self) -> None:
        self.folder.mkdir()
        write_rows(self.recipe, self.folder)

    def start(self, *more: str) -> Started:
        """Start it in a process group of its own; what it says goes to a file."""
        words = ["-m", f"areno.recipes.{self.recipe}", *arguments(self.recipe), *self.settings, *more]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            warm_python.WARM_WORKERS: "1",
        }
        said = self.folder / "said.txt"
        return warm_python.commands().start(words, self.folder, environment, said, said)

    def finish(self, *more: str) -> None:
        """Run to the end. AssertionError with its last words if it fails."""
        process = self.start(*more)
        try:
            code = process.wait(LIMIT_S)
        finally:
            end(process)
        assert code == 0, f"exit code {code} in {self.folder}\n{self.said()[-4000:]}"

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")


def end(process: Started) -> None:
    """Make sure that nothing of a run is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def workers(pid: int) -> list[int]:
    """The processes below one that have loaded torch: those that hold the models, and not the one that forks them."""
    found = []
    for child in children(pid):
        try:
            if Path(f"/proc/{child}/comm").read_text().strip() == warm_python.WORKERS_NAME:
                found += children(child)
                continue
            if "libtorch" in Path(f"/proc/{child}/maps").read_text():
                found.append(child)
        except OSError:
            pass
    return found


def children(pid: int) -> Iterator[int]:
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:  # it has ended
        return


@dataclass(frozen=True)
class Kill:
    """whom: driver, worker or group. moment: the share of a run's time, or "state" or "checkpoint" to kill inside."""

    whom: str
    moment: float | str

    def __str__(self) -> str:
        when = self.moment if isinstance(self.moment, str) else f"{100 * self.moment:.0f} %"
        return f"{self.whom} at {when}"

    def strike(self, run: Run, process: Started, seconds: float) -> bool:
        """Wait for the moment, then kill. False if the run has ended before. seconds: that a whole run takes."""
        started = time.monotonic()
        while process.poll() is None:
            assert time.monotonic() - started < LIMIT_S, run.said()[-4000:]
            if isinstance(self.moment, str):
                name = {"state": "state", "checkpoint": "checkpoints"}[self.moment]
                is_time = any(run.folder.glob(f"outputs/*/t/{name}/.tmp-step-*"))
            else:
                is_time = time.monotonic() - started > self.moment * seconds
            victims = {"driver": [process.pid], "group": [-process.pid]}.get(self.whom) or workers(process.pid)
            if is_time and victims:
                os.kill(victims[0], signal.SIGKILL)
                process.wait(LIMIT_S)  # without a worker it may go on: see recover.retries
                return True
            time.sleep(0.001 if isinstance(self.moment, str) else 0.01)
        return False


def draw(rng: random.Random) -> list[Kill]:
    """What happens to a run."""
    n_kills = 2 if rng.random() < 0.25 else 1
    moments = [rng.random(), rng.random(), rng.random(), "state", "checkpoint"]
    return [Kill(rng.choice(["driver", "worker", "group"]), rng.choice(moments)) for _ in range(n_kills)]


def left_by(folder: Path) -> dict[str, Any]:
    """What a run leaves, without times: file -> content, the metrics, and the scalars of TensorBoard."""
    found: dict[str, Any] = {}
    state = max(folder.glob("state/step-*"))
    found["state"] = state.name
    for inside in (folder / "checkpoints", folder / "rollouts", folder / "eval", state / "engine"):
        for path in inside.rglob("*"):
            if path.is_file() and path.name not in (".owner", "index.json"):
                found[str(path.relative_to(folder))] = path.read_bytes()
    found["latest"] = os.readlink(folder / "checkpoints/latest")
    lines = map(json.loads, (folder / "logs/metrics.jsonl").read_text().splitlines())
    found["metrics"] = [{k: v for k, v in line.items() if not TIMES.search(k)} for line in lines]
    found["events"] = events(folder)
    record = json.loads((state / "run.json").read_text())["run"]
    found["record"] = {k: v for k, v in record.items() if k not in ("seconds", "recover")}
    found["record"] |= {k: {} for k in ("saver", "evaluator")}  # their clocks
    return found


def events(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars in the event files, in order."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                if not TIMES.search(value.tag):
                    found.append((event.step, value.tag, value.simple_value))
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return sorted(name for name in {**expected, **found} if expected.get(name) != found.get(name))


def check(run: Run, kills: list[Kill], expected: dict[str, Any], seconds: float) -> str:
    """Let a run be killed and finish it; how often it was hit. AssertionError where it is not the run expected."""
    run.prepare()
    hits = 0
    for kill in kills:
        process = run.start()
        try:
            hits += kill.strike(run, process, seconds)
        finally:
            end(process)
    run.finish()
    wrong = differences(expected, left_by(run.result))
    assert not wrong, f"{run.folder}: {wrong} differ after {', '.join(map(str, kills))}"
    return f"hit {hits} of {len(kills)}"


def reference(run: Run) -> tuple[dict[str, Any], float]:
    """What a run that nobody kills leaves, and the seconds that it takes."""
    run.prepare()
    started = time.monotonic()
    run.finish()
    return left_by(run.result), time.monotonic() - started


# How often the states of a run are written.
OFTEN = [["recover.freq_steps=1"], ["recover.freq_steps=3", "recover.keep=1"], ["recover.freq_epochs=1"]]
RETRIES = [0, 3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("settings", nargs="*", help="settings of all runs, KEY=VALUE")
    args = parser.parse_args()
    rng, failed = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        recipes = args.recipes.split(",")
        expected = {}
        for recipe in recipes:
            whole = Run(recipe, Path(folder, f"{recipe}-whole"), args.settings)
            expected[recipe] = reference(whole)
            print(f"{recipe}: a whole run takes {expected[recipe][1]:.1f} s", flush=True)
        for number in range(args.runs):
            recipe, kills = recipes[number % len(recipes)], draw(rng)
            in_driver = "worker" not in {kill.whom for kill in kills} and not args.settings and rng.random() < 0.5
            settings = [*rng.choice(OFTEN), f"engine.workers={'inline' if in_driver else 'spawn'}"]
            settings.append(f"recover.retries={rng.choice(RETRIES)}")
            run = Run(recipe, Path(folder, str(number)), [*settings, *args.settings])
            try:
                told = check(run, kills, *expected[recipe])
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed, told = failed + 1, f"FAILED: {error}"
            print(f"{number + 1:4d} {recipe:5s} {', '.join(map(str, kills))}: {told}", flush=True)
    print(f"{args.runs - failed} of {args.runs} runs ended as if nobody had killed them")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
