"""The examples of agents: rules, data, agents and rewards, with players that are no models."""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import os
import random
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areno.agents.environment import run_episode
from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.files.user_code import load_function
from areno.report.page import write_report
from areno.tracking.reader import RunReader
from areno.types import RewardRecord
from tests.helpers import warm_python
from tests.helpers.scripted_client import ScriptedClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/agentic"
ENVIRONMENTS = {
    "tictactoe": "tictactoe:TicTacToe",
    "duelgrid": "duelgrid_task:DuelGrid",
    "coding": "coding_task:RepairTask",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ENVIRONMENTS, "tools"]:
        monkeypatch.syspath_prepend(str(FOLDER / name))


def played(example: str, row: Any, say: Any, **how: Any) -> tuple[Any, float]:
    """(episode, reward by the example's reward function), which must be that of the episode."""
    module, _, name = ENVIRONMENTS[example].partition(":")
    environment = vars(import_module(module))[name](SimpleNamespace(record=row))
    episode = asyncio.run(run_episode(environment, ScriptedClient(say), **{"max_turns": 25, **how}))
    reward_fn = load_function(str(FOLDER / example / "reward.py"), "reward_fn", "reward.fn")
    reward = asyncio.run(reward_fn(RewardRecord(messages=episode.messages, record=row)))
    value = reward["reward"] if isinstance(reward, dict) else reward
    assert value == pytest.approx(episode.reward)
    return episode, value


@pytest.mark.slow
@pytest.mark.parametrize("example", [*ENVIRONMENTS, "tools"])
def test_rows(example: str, tmp_path: Path) -> None:
    """The generator's file is what its loader reads, the same for the same seed; splits made without a file differ."""
    command = [str(FOLDER / example / "dataset_generator.py"), "--count", "9", "--output"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for name in ("a.jsonl", "b.jsonl"):
        done = warm_python.commands().run([*command, str(tmp_path / name)], tmp_path, environment, timeout=100)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    loader = f"examples/agentic/{example}/dataset_loader.py"
    assert len(load_rows(DatasetConfig(path=str(tmp_path / "a.jsonl"), loader=loader), "prompt")) == 9
    train, test = (
        load_rows(DatasetConfig(split=split, loader=f"{loader}:generated"), "prompt") for split in ("train", "test")
    )
    assert len(train) == len(test) >= 64
    assert list(train) != list(test)
    assert callable(load_function(str(FOLDER / example / "run_agent.py"), "run_agent", "agent.fn"))
    readme = (FOLDER / example / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in (FOLDER / example).glob("*.py")}
    assert files == {name for name in readme.split("`") if name.endswith(".py") and "/" not in name}


def test_the_tasks_that_come_with_the_repairs_are_those_of_their_generator() -> None:
    path, loader = FOLDER / "coding/dataset.jsonl", "examples/agentic/coding/dataset_loader.py"
    assert [json.loads(line) for line in path.read_text().splitlines()] == import_module("coding_bugs").repairs(
        16, 2026
    )
    assert len(load_rows(DatasetConfig(path=str(path), loader=loader), "prompt")) == 16


# Tools ----------------------------------------------------------------------------------------------------------------


def test_a_call_of_the_tool_is_scored_by_its_direction() -> None:
    reward_fn = load_function(str(FOLDER / "tools/reward.py"), "reward_fn", "reward.fn")

    def reward(*directions: str) -> float:
        calls = [{"function": {"name": "choose_move", "arguments": json.dumps({"direction": d})}} for d in directions]
        return reward_fn(RewardRecord(messages=[], record={}, solutions="up", tool_calls=calls))

    assert [reward("up"), reward("down"), reward()] == [1.0, 0.0, -1.0]


# Tic-tac-toe ----------------------------------------------------------------------------------------------------------


def test_a_perfect_player_never_loses_and_beats_a_random_one() -> None:
    game = import_module("tictactoe")

    def say(messages: list[Any]) -> Any:
        lines = messages[-1]["content"].splitlines()[-3:]
        board = "".join(mark if mark in "XO" else "." for mark in " ".join(lines).split())
        return [("place", {"square": game.best_squares(board, "X")[0]})]

    rewards: dict[str, list[float]] = {"random": [], "perfect": []}
    for row in game.positions(60, seed=3):
        rewards[row["opponent"]].append(played("tictactoe", row, say)[1])
        if game.value(row["board"], "X") >= 0:
            assert rewards[row["opponent"]][-1] >= 0.5
    assert sum(rewards["random"]) > sum(rewards["perfect"])
    assert rewards["random"].count(1.0) > 20


def test_moves_that_are_none() -> None:
    row = {"board": "XO.......", "opponent": "perfect", "seed": 1}
    for said in (
        [("place", {"square": 2})],
        [("place", {"square": "5"})],
        [("place", {})],
        [("place", {"square": True})],
        "5",
    ):
        episode, reward = played("tictactoe", row, [said])
        assert (reward, episode.ended) == (-1.0, "done"), said
    episode, _ = played("tictactoe", row, [[("place", {"square": 5}), ("place", {"square": 9})], "I stop"])
    assert episode.messages[2]["content"].count("X") == 2
    assert "does not count" in episode.messages[3]["content"]


def test_who_has_won() -> None:
    game = import_module("tictactoe")
    assert [game.winner(board) for board in ("XXX.O.O..", "OO.XX.O..", "XOXXOOOXX")] == ["X", None, "draw"]
    assert game.value(game.EMPTY_BOARD, "X") == 0
    with pytest.raises(ValueError, match="not free"):
        game.put("X........", 1, "O")


def test_the_share_of_legal_moves() -> None:
    reward_fn = load_function(str(FOLDER / "tictactoe/reward.py"), "reward_fn", "reward.fn")
    row = {"board": "XO.......", "opponent": "perfect", "seed": 1}

    def parts(said: Any, keep: int | None = None) -> Any:
        episode, _ = played("tictactoe", row, said)
        record = RewardRecord(messages=episode.messages[:keep], record=row)
        return asyncio.run(reward_fn(record))

    moves: list[Any] = [[("place", {"square": square})] for square in (5, 9, 1)]
    assert parts([moves[2]]) == {"reward": -1.0, "legal_moves": 0.0}
    assert parts([moves[0], moves[2]]) == {"reward": -1.0, "legal_moves": 0.5}
    won = parts(moves[:2])
    assert won["legal_moves"] == 1.0
    assert won["reward"] > 0
    assert parts(moves[:2], keep=2) == {"reward": -1.0, "legal_moves": 0.0}  # cut off before the game was over


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_small_model_learns_the_rules(tmp_path: Path) -> None:
    """The command of the README, with fewer steps: it knows them after 12 of 28."""
    words = ["-m", "areno.recipes.gspo", "--config-name=tictactoe", "seed=1", "trial_name=one", "total_train_steps=18"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = warm_python.commands().run(words, tmp_path, environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    run = RunReader(tmp_path / "outputs/tictactoe/one")
    legal = run.series("rollout/reward/legal_moves").values
    assert legal[0] <= 0.6
    assert np.mean(legal[-3:]) >= 0.95
    write_report([run.path], tmp_path / "report.html")
    assert "legal_moves" in (tmp_path / "report.html").read_text(encoding="utf-8")


# DuelGrid -------------------------------------------------------------------------------------------------------------

ROW = {
    "tiles": ["....T..", ".......", "..#....", ".......", "E......", "H......", "......."],
    "U": [0, 2],
    "A": [4, 2],
    "seed": 1,
}


def duel(**changes: Any) -> Any:
    game = import_module("duelgrid").game_of({**ROW, **changes})
    game.turn = "A"
    return game


def step(direction: str) -> dict[str, str]:
    return {"action": "MOVE", "direction": direction}


def test_rules_of_the_duel() -> None:
    game = duel()
    assert game.play([step("up"), step("up"), step("left"), step("left")]) is None
    me, other = game.players["A"], game.players["U"]
    assert (me.x, me.y, me.energy, me.health) == (2, 0, 0, 6)  # through the trap
    assert game.turn == "U"
    assert game.play([step("up"), {"action": "RANGED_ATTACK"}]) is not None  # not yet in a row
    game.turn, other.y, me.energy = "A", 0, 6
    assert game.play([{"action": "RANGED_ATTACK"}, step("left"), {"action": "ATTACK"}, step("left")]) == (
        "MOVE costs 1 energy, 0 is left"
    )
    assert other.health == 8 - 1 - 2
    game.turn, me.energy = "A", 0
    game.play([{"action": "SHIELD"}])
    for expected in (6, 4):  # the shield holds one hit off
        game.play([{"action": "ATTACK"}])
        assert me.health == expected
        game.turn = "U"


def test_walls_and_pickups() -> None:
    game = duel()
    assert "free line" in game.play([{"action": "RANGED_ATTACK"}])  # the wall is between
    game = duel(A=[3, 2])
    assert game.play([step("left")]) == "the way left is blocked"
    game = duel(A=[0, 4])
    assert game.play(
        [{"action": "PICKUP"}, step("down"), {"action": "PICKUP"}, step("down"), {"action": "PICKUP"}]
    ) == ("there is nothing to pick up here")
    assert (game.players["A"].health, game.players["A"].energy) == (11, 4 - 4 + 2)
    assert not {"E", "H"} & set("".join(game.tiles))


@pytest.mark.parametrize(
    "wrong", [None, 3, {}, {"action": ["MOVE"]}, {"action": "FLY"}, {"action": "MOVE", "direction": {}}]
)
def test_actions_that_are_none(wrong: Any) -> None:
    game = duel()
    assert "there is no" in game.play([step("right"), wrong, step("right")])
    assert (game.players["A"].x, game.turn) == (5, "U")


def test_duels_between_programs() -> None:
    rules, opponent = import_module("duelgrid"), import_module("duelgrid_opponent")
    winners = []
    for row in rules.arenas(30, seed=2):
        game = rules.game_of(row)
        while game.winner is None:
            assert game.play(opponent.scripted_turn(game, row["seed"])) is None  # it plays by the rules
        winners.append(game.winner)
    assert {"A", "U"} <= set(winners)


@pytest.mark.slow
def test_a_model_that_plays_well_gets_more_than_one_that_plays_anything() -> None:
    rules, opponent, task = (import_module(name) for name in ("duelgrid", "duelgrid_opponent", "duelgrid_task"))
    draw, totals = random.Random(1), [0.0, 0.0]
    for row in rules.arenas(12, seed=5):
        environments = []

        def skilled(messages: list[Any], row: Any = row, environments: list[Any] = environments) -> str:
            if not environments:
                environments.append(task.DuelGrid(SimpleNamespace(record=row)))
                environments[0].reset()
            else:
                environments[0].answer(messages[-2]["content"])
            return json.dumps({"actions": opponent.scripted_turn(environments[0].game, 3)})

        def wild(messages: list[Any]) -> str:
            names = [draw.choice(sorted(rules.COSTS)) for _ in range(3)]
            actions = [{"action": name, "direction": draw.choice(sorted(rules.DIRECTIONS))} for name in names]
            return draw.choice([json.dumps(actions), "[", "{}", "I attack!", ""])

        totals = [total + played("duelgrid", row, say)[1] for total, say in zip(totals, (skilled, wild), strict=True)]
    assert totals[0] > 0 > totals[1]


# Coding ---------------------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")


def repaired(row: Any) -> list[Any]:
    """What a model says that repairs the project at once."""
    bugs = import_module("coding_bugs")
    [name] = [name for name in row["files"] if not name.startswith("test")]
    correct = ast.unparse(ast.parse(textwrap.dedent(bugs.MODULES[Path(name).stem][0]).lstrip())) + "\n"
    lines = [text.splitlines() for text in (row["files"][name], correct)]
    diff = "\n".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}", lineterm=""))
    return [[("inspect_tree", {})], [("apply_patch", {"patch": diff})], [("submit", {})]]


@pytest.mark.slow
@linux
def test_repairs() -> None:
    rows = import_module("coding_bugs").repairs(4, seed=1)
    for row in rows:
        episode, reward = played("coding", row, repaired(row))
        assert reward == 1.0
        assert episode.messages[-1]["content"] == "All hidden tests pass."
    assert played("coding", rows[0], [[("submit", {})]])[1] == 0.0
    cheat = [("apply_patch", {"patch": "--- /dev/null\n+++ b/test_hidden.py\n@@ @@\n+print('OK')\n"}), ("submit", {})]
    assert played("coding", rows[0], [cheat])[1] == 0.0


@linux
def test_tools_of_the_repair() -> None:
    task = import_module("coding_task").RepairTask(
        SimpleNamespace(record={"files": {"a/b.py": "x = 1\ny = 2\n"}, "prompt": "Repair.", "hidden_tests": {}})
    )
    task.reset()
    try:
        results = {
            ("inspect_tree", ()): "a/b.py (2 lines)",
            ("read_file", ("path", "a/b.py")): "   1 x = 1\n   2 y = 2",
            ("read_file", ("path", "../secret")): "error: ../secret is outside of the project",
            ("read_file", ("path", "/etc/passwd")): "error: /etc/passwd is outside of the project",
            ("read_file", ("path", "none.py")): "error: there is no file none.py",
            ("search", ("text", "y =")): "a/b.py:2: y = 2",
            ("search", ("pattern", "y")): "error: search takes text, as text",
            ("apply_patch", ("patch", "hello")): "error: no file is named; begin with --- a/FILE and +++ b/FILE",
            ("apply_patch", ("patch", "--- a/a/b.py\n+++ b/a/b.py\n@@\n-z\n+x")): (
                "error: no place in b.py has these lines:\nz"
            ),
            ("apply_patch", ("patch", "--- a/a/b.py\n+++ b/a/b.py\n@@ -2 +2 @@\n x = 1\n-y = 2\n+y = 3\n")): (
                "changed a/b.py"
            ),
            ("run_command", ("command", "python -c 'import a.b; print(a.b.y)'")): "3\n\n[exit status 0]",
            ("run_command", ("command", "no-such-command")): "there is no command no-such-command\n\n[exit status 1]",
            ("run_command", ("command", "'")): "error: No closing quotation",
        }
        for (name, argument), expected in results.items():
            assert task.result_of(name, dict([argument] if argument else [])) == expected
    finally:
        task.close()
    assert not task.folder.exists()
