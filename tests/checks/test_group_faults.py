"""Faults in the choice of groups and in the credit of turns, found by name; nothing is red in the twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.checks.inputs.findings import Finding
from areno.checks.steps import algorithm, groups, two_steps, updates
from areno.engine.train import optimizer
from areno.run.progress import RunProgress
from areno.trainers import rollout, turn_credit
from tests.helpers.checked import found_by

pytestmark = pytest.mark.slow

DYNAMIC = ("grpo", "--config-name=quickstart", "gconfig.temperature=1.5", "rollout.dynamic_sampling=true")
ADVANTAGES = [check for check in algorithm.CHECKS if check.__name__ == "advantages"]
right_rate = optimizer.learning_rate
choose, right_turns, right_gae = rollout.choose_groups_with_signal, turn_credit.turn_advantages, turn_credit.turn_gae


@pytest.fixture(autouse=True)
def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "make_probes", lambda *given: None)
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])


def reds(found: list[Finding]) -> dict[str, str]:
    return {each.name: each.line for each in reversed(found) if each.verdict == "red"}


def all_kept(samples: Any, size: int) -> Any:
    return np.ones(len(samples), dtype=bool), 0


def the_others(samples: Any, size: int) -> Any:
    keep, dropped = choose(samples, size)
    return ~keep if keep.sum() < len(keep) else keep, dropped


def one_group(samples: Any, size: int) -> Any:
    return choose(samples, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(all_kept, "rewards are all equal"), (the_others, "rewards are all equal"), (one_group, "by the settings")],
)
def test_other_groups_are_found(wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = found_by(groups.CHECKS, *DYNAMIC)
    assert [each.verdict for each in twin] == ["green", "green"], twin
    assert "0 others" not in twin[1].line
    monkeypatch.setattr(rollout, "choose_groups_with_signal", wrong)
    assert said in reds(found_by(groups.CHECKS, *DYNAMIC))["trained-groups"]


def test_lost_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = rollout._make_rollout

    def wrong(samples: Any, keep: Any, *given: Any) -> Any:
        return make(samples, keep & (np.arange(len(samples)) > 0), *given)

    monkeypatch.setattr(rollout, "_make_rollout", wrong)
    found = reds(found_by(groups.CHECKS, *DYNAMIC[:3]))
    assert "leaves out 1 samples" in found["trained-groups"]


@pytest.fixture
def games(tmp_path: Path) -> list[str]:
    folder, agent = Path("examples/agentic/tictactoe").resolve(), tmp_path / "agent.py"
    agent.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom tictactoe import TicTacToe\n"
        "from areno.agents.environment import agent_of\n"
        "run_agent = agent_of(TicTacToe, max_turns=5, turn_rewards=True)\n",
        encoding="utf-8",
    )
    return ["--config-name=tictactoe", f"agent.fn={agent}", "agent.turn_discount=0.8"]


def undiscounted(rewards: Any, group_ids: Any, discount: float, **how: Any) -> Any:
    return right_turns(rewards, group_ids, 1.0, **how)


def one_step(rewards: Any, values: Any, turns: Any, discount: float, gae_lambda: float) -> Any:
    return right_gae(rewards, values, turns, discount, 0.0)


def over_all_turns(rewards: Any, group_ids: Any, discount: float, **how: Any) -> Any:
    return right_turns(rewards, group_ids, discount, **how | {"same_turn": False})


@pytest.mark.parametrize(
    ("settings", "wrong", "said"),
    [
        (["grpo", "agent.turn_credit=return"], {"turn_advantages": undiscounted}, "turn_discount is left out"),
        (["grpo", "agent.turn_credit=turn_baseline"], {"turn_advantages": over_all_turns}, "turn_credit is return"),
        (["ppo", "agent.turn_credit=gae", "actor.gae_lambda=0.7"], {"turn_gae": one_step}, "gae_lambda is 0"),
    ],
)
def test_wrong_credit_of_turns_is_found(
    settings: list[str], wrong: dict[str, Any], said: str, games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [settings[0], *games, *settings[1:]]
    assert [each.verdict for each in found_by(ADVANTAGES, *command)] == ["green"]
    for name, function in wrong.items():
        monkeypatch.setattr(turn_credit, name, function)
    assert said in reds(found_by(ADVANTAGES, *command))["advantages"]


def test_seeds_that_are_used_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    differ = [check for check in algorithm.CHECKS if check.__name__ == "samples_differ"]
    assert not reds(found_by(differ, *DYNAMIC[:3]))
    monkeypatch.setattr(RunProgress, "seed_of", lambda self, step: self.config.seed)
    assert "of steps 1 and 2 are sampled with the same" in reds(found_by(differ, *DYNAMIC[:3]))["samples-differ"]


def without_warmup(config: Any, step: int) -> float:
    return right_rate(replace(config, warmup_steps_proportion=0.0), step)


def to_zero(config: Any, step: int) -> float:
    return right_rate(replace(config, min_lr_ratio=0.0), step)


@pytest.mark.parametrize(("wrong", "update"), [(without_warmup, "update 1"), (to_zero, "update 12")])
def test_another_schedule_is_found(wrong: Any, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.1, "min_lr_ratio": 0.1}
    command = *DYNAMIC[:3], *(f"actor.optimizer.{name}={value}" for name, value in settings.items())
    assert not reds(found_by(updates.CHECKS[:1], *command))
    monkeypatch.setattr(optimizer, "learning_rate", wrong)
    assert f"{update} would have" in reds(found_by(updates.CHECKS[:1], *command))["learning-rate"]
