"""The live display: what it shows, that it fits, and that the terminal is clean whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from areno.tracking import run_log
from areno.tracking.display import display as displays
from areno.tracking.display import screen as screens
from areno.tracking.display.board import (
    POINTS,
    SAMPLES_S,
    Board,
    Trend,
    best_middle_worst,
    sparkline,
)
from areno.tracking.display.screen import OutputAbove, Screen, can_draw
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample
from tests.helpers import warm_python
from tests.helpers.terminal import Terminal
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_trend_keeps_the_course_of_a_long_run_in_little_memory():
    trend = Trend()
    for step in range(10_000):
        trend.add(float(step))
    assert POINTS <= len(trend.values) <= 2 * POINTS + 1
    assert trend.values == sorted(trend.values)
    assert trend.last == 9999
    assert (trend.values[0] < 100, trend.values[-1] > 9900) == (True, True)
    short = Trend()
    for value in (1.0, math.nan, 3.0):
        short.add(value)
    assert (short.values[0], math.isnan(short.values[1]), short.values[2]) == (1.0, True, 3.0)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),  # means of two
        ([5, 5, 5], 9, "▁▁▁"),
        ([0, math.nan, 1], 9, "▁ █"),
        ([math.inf], 9, ""),
        ([], 9, ""),
        ([1, 2], 0, ""),
    ],
)
def test_sparklines(values, width, line):
    assert sparkline(values, width) == line


def test_accuracy_leaves_the_display_when_it_is_measured_no_more():
    board = Board(lambda: 10, lambda: 0.0)
    board.log(1, {"rollout/rewards_mean": 0.5, "rollout/accuracy": 0.5, "eval/accuracy": 0.5, "train/accuracy": 0.5})
    board.log(2, {"rollout/rewards_mean": 0.7, "train/accuracy": 0.5})
    assert board.snapshot().trends.keys() == {"rollout/rewards_mean", "eval/accuracy", "train/accuracy"}
    board.log(2, {"eval/rewards_mean": 0.7})
    assert "eval/accuracy" not in board.snapshot().trends


def sample(reward, prompt="2+2="):
    item = PromptItem(prompt=prompt, text=prompt, tokens=[1])
    sequence = RolloutSequence(resp_tokens=[5, 6], resp_logprobs=[-0.1, -0.2])
    outcome = RewardOutcome(reward, "ok" if reward is not None else "timeout")
    return ScoredSample(item=item, sequence=sequence, completion="4", outcome=outcome)


def test_a_board_knows_how_things_stand(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("areno.tracking.display.board.time.monotonic", lambda: now[0])
    board = Board(lambda: 10, lambda: now[0])
    board.log(0, {"eval/accuracy": 0.25, "time/eval": 1.0})
    now[0] = 100.0
    board.begin_training(0)
    assert board.snapshot().left is None
    for step in (1, 2):
        now[0] += 5.0
        board.log(step, {"rollout/rewards_mean": step / 10})
        board.log(step, {"train/entropy": 1.0, "time/train": 4.0, "time/step": 5.0})
        board.samples(step, [sample(step / 10)])
    now[0] += 2.0
    look = board.snapshot()
    assert (look.step, look.total, look.left) == (2, 10, 8 * 5.0 - 2.0)
    assert look.times == {"train": 4.0, "step": 5.0}
    assert look.trends["rollout/rewards_mean"] == (0.2, [0.1, 0.2])
    assert (look.samples_step, look.samples[0].reward) == (1, "0.1"), "they stay long enough to be read"
    now[0] += SAMPLES_S
    board.samples(3, [sample(None), sample(None)])
    assert [one.reward for one in board.snapshot().samples] == ["timeout", "timeout"]


def test_samples_to_show():
    rewards = [0.5, None, 1.0, 0.0, 0.25]
    assert [one.outcome.value for one in best_middle_worst([sample(reward) for reward in rewards])] == [1.0, 0.25, 0.0]
    assert len(best_middle_worst([sample(1.0)])) == 1
    assert best_middle_worst([]) == []


def a_screen(terminal, lines=None, failures=None):
    counts = iter(range(10**9))
    region = lines or (lambda width, height: [[(f"region {next(counts)}", "bold")], [("end", "")]])
    return Screen(terminal.stream, region, (failures if failures is not None else []).append)


def test_what_is_printed_goes_above_the_lines(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    monkeypatch.setattr(screens, "INTERVAL_S", 0.01)
    screen = a_screen(terminal)
    screen.start()
    for number in range(40):
        print(f"line {number}", file=sys.stderr)
        time.sleep(0.002)
    print("10 %\r50 %\r100 %", file=sys.stderr)
    print("no end", end="", file=sys.stderr)
    wait_for(terminal, "region 2")
    screen.close("the end\n")
    screen.close("not again")
    assert sys.stderr is terminal.stream
    terminal.close()
    assert terminal.lines == [*(f"line {number}" for number in range(40)), "100 %", "no end", "the end", ""]
    assert "\x1b[?25l" not in terminal.written, "a process that is killed cannot bring the cursor back"


def test_the_top_of_the_terminal_is_never_erased(terminal, monkeypatch):
    """tmux moves into its scrollback what is erased from there, so a display would stay behind there."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(screens, "INTERVAL_S", 0.01)
    screen = a_screen(terminal, lines=lambda width, height: [[(f"line {row}", "")] for row in range(height - 1)])
    screen.start()
    wait_for(terminal, f"line {terminal.height - 3}\\b")
    screen.close("the end\n")
    terminal.close()
    ups = [int(number) for number in re.findall(r"\x1b\[(\d+)A", terminal.written)]
    assert max(ups) == terminal.height - 2


def test_a_display_that_fails_gives_the_terminal_back(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    failures = []

    def lines(width, height):
        raise ValueError("no")

    screen = a_screen(terminal, lines, failures)
    screen.start()
    print("heard", file=sys.stderr)
    screen._thread.join(60)
    assert [str(error) for error in failures] == ["no"]
    assert sys.stderr is terminal.stream
    print("after", file=sys.stderr, flush=True)
    screen.close("not shown")
    terminal.close()
    assert [line for line in terminal.lines if line] == ["heard", "after"]


def test_what_is_printed_while_the_display_ends_is_not_lost(terminal, monkeypatch):
    """Whoever has got hold of the stream by then may write at any moment, before or behind the last lines."""
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    screen = a_screen(terminal)
    screen.start()
    above = screen._streams[0][2]
    monkeypatch.setattr(above, "end", lambda: None)  # as if somebody were just behind the look at it
    print("before", file=above)
    screen.close("the end\n")
    print("after", file=above)
    terminal.close()
    assert terminal.lines == ["before", "the end", "after", ""]


def test_a_terminal_that_is_gone_does_not_hold_anything_up(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    failures = []
    screen = a_screen(terminal, failures=failures)
    screen.start()
    terminal.vanish()
    with contextlib.suppress(OSError):  # where the screen has noticed it
        for number in range(3):
            print(f"lost {number}", file=sys.stderr)
    screen._thread.join(60)
    assert len(failures) == 1
    assert isinstance(failures[0], OSError)
    screen.close()


def test_after_a_stop_the_lines_begin_anew(terminal, monkeypatch):
    screen = a_screen(terminal)
    screen.draw()
    terminal.stream.write("[1]+ Stopped\n$ fg\n")
    screen._on_sigcont(signal.SIGCONT, None)
    screen.draw()
    screen.draw()
    terminal.close()
    assert terminal.lines == ["region 0", "end", "[1]+ Stopped", "$ fg", "region 2", "end", ""]


def test_lines_of_a_terminal_that_became_narrower_are_taken_away(terminal):
    screen = a_screen(terminal, lambda width, height: [[("x" * (width - 1), "")]] * 2)
    screen.draw()
    fcntl.ioctl(terminal.end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 50, 0, 0))
    screen.draw()
    terminal.close()
    assert "\x1b[6A" in terminal.written, "each of the two lines of 119 cells takes three rows now"


def test_where_a_display_can_be(terminal, monkeypatch):
    assert can_draw(terminal.stream)
    assert not can_draw(None)
    monkeypatch.setenv("TERM", "dumb")
    assert not can_draw(terminal.stream)
    monkeypatch.setenv("TERM", "xterm")
    with open(os.devnull, "w") as no_terminal:
        assert not can_draw(no_terminal)
    with os.fdopen(os.dup(terminal.end), "w", encoding="ascii") as ascii_only:
        assert not can_draw(ascii_only)
    assert not can_draw(Terminal(30, 24).stream)
    assert OutputAbove(a_screen(terminal), terminal.stream).encoding == "utf-8"


def test_which_console_is_chosen(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    monkeypatch.setattr(displays, "has_host_handler", lambda: False)
    assert [displays.chosen_console(name) for name in ("auto", "live", "full")] == ["live", "live", "full"]
    monkeypatch.setattr(displays, "has_host_handler", lambda: True)
    assert [displays.chosen_console(name) for name in ("auto", "live", "quiet")] == ["lines", "live", "quiet"]
    with open(os.devnull, "w") as no_terminal:
        monkeypatch.setattr(sys, "stderr", no_terminal)
        assert [displays.chosen_console(name) for name in ("auto", "live", "lines")] == ["lines"] * 3


def test_an_error_in_the_display_does_not_end_the_run(terminal, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", terminal.stream)  # here: pytest sets its own when a test begins
    monkeypatch.setattr(logging.getLogger("areno"), "propagate", False)
    with run_log.RunLog(tmp_path / "run.log", console="live") as log:
        display = displays.Display(tmp_path, log, lambda: 10, lambda: 1.0)
        display.start({"run": "here"})
        monkeypatch.setattr(display.board, "log", lambda *_: 1 / 0)
        display.log(1, {"train/loss": 1.0})
        display.log(2, {"train/loss": 1.0})
        assert run_log.current_console() == "lines"
        assert sys.stderr is terminal.stream
        display.finish()
    terminal.close()
    assert "the live display failed, and lines follow: ZeroDivisionError" in terminal.written


def command(*overrides, **more):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TERM": "xterm-256color"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "areno.recipes.gspo", "trial_name=t", "train_dataset.batch_size=8", *overrides]
    return {"args": words, "env": environment, **more}


@pytest.mark.slow
def test_a_run_on_a_terminal(tmp_path):
    """From its first line to the next commands; what the log has is on the terminal only where it tells something."""
    terminal = Terminal()
    # Enough samples that the display, which may take little of a run, has time for pictures before the last step.
    overrides = ["total_train_steps=6", "evaluator.freq_steps=2", "valid_dataset.max_rows=20", "gconfig.n_samples=64"]
    given = command(*overrides)
    place = os.ttyname(terminal.end)
    run = warm_python.commands().start(given["args"][1:], tmp_path, given["env"], tmp_path / "stdout", place)
    try:
        code = run.wait(200)
    finally:
        if run.returncode is None:
            os.killpg(run.pid, signal.SIGKILL)
    terminal.close()
    assert code == 0, terminal.written
    lines = terminal.lines
    assert re.fullmatch(r"areno [\d.]+: areno.recipes.gspo starts \.\.\.", lines[0])
    text = "\n".join(lines)
    for shown_at_the_end in (
        "│ run       outputs/quickstart/t",
        "│ steps     6",
        "│ given     trial_name=t train_dataset.batch_size=8",
        "actor.optimizer.lr=0.0002",
        "model: 0.3M parameters",
        "│ evaluation: accuracy",
        "checkpoint: ",
        "areno report outputs/quickstart/t",
        "areno serve outputs/quickstart/t/checkpoints/step-000006",
        "--resume outputs/quickstart/t total_train_steps=12",
    ):
        assert shown_at_the_end in text, shown_at_the_end
    assert re.search(r"step [1-5]/6", terminal.written)
    assert "── quickstart / t" not in text, "the display is taken away at the end"
    log = (tmp_path / "outputs/quickstart/t/logs/run.log").read_text()
    assert log.count("train_stats={") == 6
    assert "train_stats" not in terminal.written
    assert (tmp_path / "stdout").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_continued_and_ended(tmp_path, end):
    terminal = Terminal()
    before = termios_of(terminal)
    given = command("total_train_steps=5000", cwd=tmp_path, stderr=terminal.end, start_new_session=True)
    run = subprocess.Popen(**given)
    try:
        wait_for(terminal, r"step \d/5000")
        run.send_signal(signal.SIGSTOP)
        time.sleep(1)
        run.send_signal(signal.SIGCONT)
        wait_for(terminal, r"step \d\d/5000")
        run.send_signal(end)
        run.wait(60)
    finally:
        run.kill()
    assert termios_of(terminal) == before
    terminal.close()
    if end != signal.SIGKILL:
        assert terminal.lines[-2] in ("interrupted", "terminated")
        assert "to resume it: " in terminal.lines[-3]
        assert terminal.lines[-1] == "", "the prompt of the shell begins a line"
    assert not set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", terminal.written)) - set("AJKm")


def termios_of(terminal):
    return termios.tcgetattr(terminal.end)


def wait_for(terminal, text):
    until(lambda: re.search(text, terminal.written), 100, found=lambda: terminal.written[-3000:])


@pytest.mark.parametrize(
    "console", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "quiet"))]
)
def test_a_run_without_a_terminal(tmp_path, console):
    overrides = ["total_train_steps=3", "valid_dataset=null", f"stats_logger.console={console}"]
    given = command(*overrides)
    done = warm_python.commands().run(given["args"][1:], tmp_path, given["env"], timeout=200)
    assert done.returncode == 0, done.stderr
    said = re.sub(r"^\d\d:\d\d:\d\d ", "", done.stderr, flags=re.M).splitlines()
    log = (tmp_path / "outputs/quickstart/t/logs/run.log").read_text()
    if console == "full":
        assert set(log.splitlines()) <= set(done.stderr.splitlines())
        assert sum(line.startswith("train_stats=") for line in said) == 3
    elif console == "quiet":
        assert said == []
    else:
        kinds = [re.match(r"step=\d/3 reward_mean=|[a-z]+", line)[0] for line in said]
        steps = [f"step={step}/3 reward_mean=" for step in (1, 2, 3)]
        assert kinds == ["run", "model", "memory", "micro", *steps, "checkpoint", "predicted", "done"], said
    assert log.count("role=policy stage=rollout_start") == 3
