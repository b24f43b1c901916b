"""Faults in what is trained of agents: `areno check` finds each by name, and nothing in the run without the fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areno.agents import turns_to_rows
from areno.trainers import reward_sources, update
from tests.helpers.checked import failed, findings, red

pytestmark = pytest.mark.slow

GAMES = "grpo tictactoe"  # episodes of several turns with results of a tool, and a reward that the agent returns


def changed_rows(monkeypatch, change):
    right = turns_to_rows._OpenRow.to_token_row
    monkeypatch.setattr(
        turns_to_rows._OpenRow, "to_token_row", lambda self, *given: change(right(self, *given)), raising=True
    )


def tool_results_trained(monkeypatch):
    def change(row):
        first = int(row.sampled.argmax())
        return replace(row, trained=np.arange(len(row.tokens)) >= first)

    changed_rows(monkeypatch, change)


def first_turn_not_trained(monkeypatch):
    changed_rows(monkeypatch, lambda row: replace(row, trained=row.trained & (row.turns == row.turns.max())))


def reward_of_another_episode(monkeypatch):
    right = update.rewards_by_source
    monkeypatch.setattr(update, "rewards_by_source", lambda *given: np.roll(right(*given), 1).tolist())


@pytest.mark.parametrize(
    ("plant", "name", "said"),
    [
        (tool_results_trained, "loss-mask", "tokens that it should not"),
        (first_turn_not_trained, "loss-mask", "first"),
        (reward_of_another_episode, "row-rewards", "of other rows"),
    ],
)
def test_a_fault_in_the_rows_of_agents_is_found(plant, name, said, monkeypatch):
    plant(monkeypatch)
    found = [each for each in findings(GAMES, only="algorithm") if each.verdict == "red"]
    assert name in [each.name for each in found]
    assert said in next(each.line for each in found if each.name == name)


def test_nothing_is_red_without_a_fault():
    found = findings(GAMES, only="reward,gradient,algorithm")
    assert not red(found), found
    assert not failed(found)
    names = {each.name: each for each in found}
    assert names["agent-turns"].verdict == "green"
    assert "several turns" in names["agent-turns"].line
    assert names["reward-repeatable"].verdict == names["row-rewards"].verdict == "green"


def test_each_turn_may_be_a_row():
    found = findings(GAMES, "agent.export_style=individual", only="algorithm")
    assert not red(found), found
    assert "8 rows" not in next(each.line for each in found if each.name == "training-rows")  # of 8 or fewer episodes


def test_a_reward_of_the_agent_that_is_lost_is_found(tmp_path, monkeypatch):
    agent = tmp_path / "agent.py"
    folder = Path("examples/agentic/tictactoe").resolve()
    agent.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom tictactoe import TicTacToe\n"
        "from areno.agents.environment import agent_of\n"
        "run_agent = agent_of(TicTacToe, max_turns=5, turn_rewards=True)\n",
        encoding="utf-8",
    )
    assert not red(findings(GAMES, f"agent.fn={agent}", only="algorithm"))
    right = reward_sources.add_agent_rewards
    monkeypatch.setattr(
        reward_sources, "add_agent_rewards", lambda records, outcomes, own: right(records, outcomes, [None] * len(own))
    )
    assert "row-rewards" in red(findings(GAMES, f"agent.fn={agent}", only="algorithm"))


def test_agents_that_may_ask_a_server_are_left_out():
    found = findings(GAMES, only="algorithm", offline=True)
    assert {each.verdict for each in found} == {"not checked"}
    assert "--offline" in found[0].line
