"""Training with a reward and an advantage for each turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.errors import ArenoError
from areno.launch import command
from areno.tracking.reader import RunReader
from tests.helpers.agent_model import model_folder
from tests.helpers.agent_runs import AGENTS, DATA, run


def rewarded(folder: Path, rewards: str) -> Path:
    file = folder / "rewarded.py"
    file.write_text(
        f"import runpy\nwork = runpy.run_path({str(AGENTS / 'compacting.py')!r})['run_agent']\n"
        f"async def run_agent(ctx, batch):\n    await work(ctx, batch)\n    return {rewards}\n"
    )
    return file


@pytest.mark.slow
def test_turns_have_their_own_credit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns, twice a summary with two turns after it, and a sub-agent's two, which are parts of the last."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in DATA))
    words = f"--config-name=prompts actor.path={model_folder()} train_dataset.path={rows} cluster.fileroot={tmp_path} "
    words += f"agent.fn={rewarded(tmp_path, '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]')} reward.fn=null agent.workers=1 "
    words += "agent.turn_credit=return agent.turn_discount=0.5 actor.adv_norm=null total_train_steps=1 trial_name=a "
    words += "train_dataset.batch_size=4 gconfig.n_samples=4 gconfig.max_tokens=1000 rollout.dump_to_file=true "
    words += "gconfig.max_new_tokens=64 actor.init_from_scratch=true train_dataset.max_length=50 engine.device=cpu"
    assert command.run(get_algorithm("grpo"), "grpo", words.split()) == 0
    trees = Counter[int]()  # a summary that is too short to be recognised makes the turns after it those of a sub-agent
    samples = RunReader(tmp_path / "prompts/a").samples(1)
    for sample in samples:
        assert (sample["reward"], sample["status"]) == (45.0, "ok")
        turns = sample["trajectory"]["turns"]
        assert [turn["reward"] for turn in turns] == list(range(10))
        trees[1 + turns[-1]["turn"]] += 1
        for row in sample["trajectory"]["rows"]:
            seen = {turn for turn, _ in row["turns"]}
            expected = {round(return_of(turns, turn), 6) for turn in seen}
            assert {advantage for advantage, _ in row["advantages"]} == expected
    assert trees[8] > 0
    capsys.readouterr()
    place = next(place for place, one in enumerate(samples) if one["trajectory"]["turns"][-1]["turn"] == 7)
    command_line = ["replay", str(tmp_path / "prompts/a"), "--step", "1", "--sample", str(place), "--device", "cpu"]
    assert main([*command_line, "--json"]) == 0
    replayed, turns = json.loads(capsys.readouterr().out), samples[place]["trajectory"]["turns"]
    returns = [return_of(turns, turn) for turn in (0, 1)]
    assert [(turn["turn"], turn["reward"]) for turn in replayed["turns"]] == [(0, 0.0), (1, 1.0)]
    assert [turn["advantage"] for turn in replayed["turns"]] == pytest.approx(returns, abs=1e-6)
    of_tokens = [(token["turn"], token["advantage"]) for token in replayed["tokens"] if token["trained"]]
    assert {turn for turn, _ in of_tokens} == {0, 1}
    assert of_tokens == [(turn, pytest.approx(returns[turn], abs=1e-6)) for turn, _ in of_tokens]
    assert main(command_line) == 0
    shown = capsys.readouterr().out
    assert re.search(r"turn . reward . advantage . trained tokens.*\n.*\n. +0 . +0 .*\n. +1 . +1 ", shown)


def return_of(turns: list[Any], k: int) -> float:
    return sum(0.5 ** (turn["turn"] - k) * turn["reward"] for turn in turns if turn["turn"] >= k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[1.0]", "it has 1 turn_rewards for 10 turns"),
        ("[float('nan')] * 10", "the reward of turn 0: nan; a reward is"),
    ],
)
def test_wrong_rewards_of_turns_fail_their_sample(tmp_path: Path, rewards: str, message: str) -> None:
    agent = f"agent.fn={rewarded(tmp_path, rewards)}"
    with pytest.raises(ArenoError, match=message):
        run(
            tmp_path,
            "compacting.py",
            agent,
            "reward.fn=null",
            "reward.workers=null",
            "total_train_steps=1",
            "gconfig.max_tokens=1000",
        )


ECHO = """
from areno.agents.environment import Environment, agent_of, reward_of

class Echo(Environment):
    def __init__(self, item):
        self.turns = 0

    def reset(self):
        return [{"role": "user", "content": "Begin."}]

    def answer(self, text):
        self.turns += 1
        return [{"role": "user", "content": "Go on."}], self.turns + len(text) % 3, self.turns == 3

run_agent, reward_fn = agent_of(Echo, turn_rewards=TURN_REWARDS), reward_of(Echo)
"""


@pytest.mark.slow
@pytest.mark.parametrize("gives_rewards", [True, False])
def test_the_steps_of_an_environment_reward_its_turns_once(tmp_path: Path, gives_rewards: bool) -> None:
    """Also with `reward_of`, which gives the same sum if the agent gives none."""
    file = tmp_path / "echo.py"
    file.write_text(ECHO.replace("TURN_REWARDS", str(gives_rewards)))
    settings = [f"agent.fn={file}", f"reward.fn={file}", "agent.turn_credit=turn_baseline", "total_train_steps=1"]
    played = run(tmp_path, "two_turns.py", *settings, recipe="grpo")
    for sample in played.samples(1):
        turns = sample["trajectory"]["turns"]
        said = [turn["message"]["content"] or "" for turn in turns]
        ended = next((place for place, turn in enumerate(turns) if turn["finish_reason"] == "length"), 3)
        steps = [1 + place + len(text) % 3 if place < ended else 0 for place, text in enumerate(said)]
        assert sample["reward"] == sum(steps) or not gives_rewards
        assert [turn.get("reward") for turn in turns] == (steps if gives_rewards else [None] * len(turns))
    assert any(len(row.turn_rewards) > 1 for row in played.rows[0] if row.turn_rewards is not None)


@pytest.mark.slow
def test_a_critic_has_a_target_for_each_turn(tmp_path: Path) -> None:
    settings = ["critic.warmup_steps=0", "ref=null", "actor.kl_ctl=0", "agent.turn_credit=gae", "total_train_steps=1"]
    played = run(tmp_path, "two_turns.py", *settings, recipe="ppo", task="quickstart_ppo")
    for row in played.critic_rows[0]:
        trained = ~np.asarray(row.prompt_mask)
        for turn in (0, 1):
            assert len(set(np.asarray(row.returns)[trained & (row.turns == turn)])) == 1
