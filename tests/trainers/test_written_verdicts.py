"""Runs whose judge is a model of the run that writes JSON. Its verdicts are those of transformers and a hand-written
matcher, and the samples of the actor are those of a run without the judge.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api.trainer import Trainer
from areno.types import RolloutSequence
from tests.helpers.agent_runs import run as agent_run
from tests.helpers.judge_model import char_judge, written_by_hand
from tests.helpers.policy_runs import Played, classifier, play

MOST_TOKENS = 50
QUESTION = "Is {prompt}{completion} right?"
PAIR = "{prompt}{first} or {second}?"
AHEAD = ["rollout.max_head_offpolicyness=2", "rollout.prompts_ahead=3", "actor.use_decoupled_loss=true"]
AHEAD += ["gconfig.max_new_tokens=60", "gconfig.temperature=3.0", "rollout.max_concurrent_rollouts=8"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that answers some questions with one label, and some with the other."""
    return char_judge(tmp_path_factory.mktemp("judge"), seed=6)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[list[RolloutSequence]]:
    """The replies of each call of the judge."""
    complete, kept = Trainer.complete, list[list[RolloutSequence]]()

    def recorded(self: Trainer, *args: Any, **how: Any) -> list[RolloutSequence]:
        kept.append(complete(self, *args, **how))
        return kept[-1]

    monkeypatch.setattr(Trainer, "complete", recorded)
    return kept


def words(judge: Path, *more: str, template: str = QUESTION) -> list[str]:
    settings = [f"path={judge}", f"template='{template}'", "verdict=json", f"max_tokens={MOST_TOKENS}"]
    settings.append("refuse_blank=false")
    return ["reward.fn=null", *(f"reward.judge.{each}" for each in settings), *more]


def verdict(judge: Path, question: str, labels: tuple[str, str] = ("no", "yes")) -> int:
    """The index of the label in the reply by hand."""
    return labels.index(json.loads(written_by_hand(judge, question, labels, MOST_TOKENS))["verdict"])


def assert_judged(judge: Path, samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        assert sample["parts"]["judge"] == sample["reward"] == verdict(judge, QUESTION.format(**sample))
        assert sample["parts"]["judge/unreadable"] == 0.0
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}


def bits(replies: list[list[RolloutSequence]]) -> list[Any]:
    return [[(reply.resp_tokens, reply.resp_logprobs) for reply in call] for call in replies]


@pytest.mark.slow
def test_verdicts_of_a_run_are_those_of_transformers_and_a_matcher_by_hand(judge: Path, tmp_path: Path) -> None:
    small = ["train_dataset.batch_size=2", "gconfig.n_samples=2", "total_train_steps=1"]
    played = play("grpo", tmp_path / "run", *words(judge, *small))
    samples = played.samples(1)
    assert len(samples) == 4
    assert_judged(judge, samples)
    mean = sum(sample["reward"] for sample in samples) / 4
    assert played.series("rollout/reward/judge") == [pytest.approx(mean)]


@pytest.mark.slow
@pytest.mark.parametrize("form", [["engine.world_size=2"], ["engine.world_size=2", "engine.tp_size=2"]])
def test_two_ranks_judge_like_transformers(form: list[str], judge: Path, tmp_path: Path) -> None:
    assert_judged(judge, play("grpo", tmp_path / "run", *words(judge, *form)).samples(2))


@pytest.mark.slow
def test_scores_of_comparisons_are_those_of_a_loop_over_both_orders(judge: Path, tmp_path: Path) -> None:
    small = ["train_dataset.batch_size=2", "gconfig.n_samples=4", "total_train_steps=1", "reward.judge.compare=true"]
    played = play("grpo", tmp_path / "run", *words(judge, *small, template=PAIR))
    samples, seen = played.samples(1), set()
    assert len(samples) == 8
    for group in (samples[:4], samples[4:]):
        won: dict[int, list[float]] = {index: [] for index in range(4)}
        for one, other in itertools.combinations(range(4), 2):
            first, second = group[one], group[other]
            assert first["prompt"] == second["prompt"]
            share = 0.5
            if first["completion"] != second["completion"]:
                orders = [(first, second), (second, first)]
                texts = [
                    PAIR.format(prompt=a["prompt"], first=a["completion"], second=b["completion"]) for a, b in orders
                ]
                chosen = [verdict(judge, text, ("A", "B")) for text in texts]
                seen |= {(0, chosen[0]), (1, chosen[1])}
                share = ((chosen[0] == 0) + (chosen[1] == 1)) / 2
            won[one].append(share)
            won[other].append(1 - share)
        for index, sample in enumerate(group):
            assert sample["parts"]["judge"] == pytest.approx(sum(won[index]) / 3)
    assert len(seen) == 4  # in each order, either answer was chosen


@pytest.mark.slow
def test_a_resumed_run_judges_alike(judge: Path, tmp_path: Path, replies: list[list[RolloutSequence]]) -> None:
    whole = play("grpo", tmp_path / "whole", *words(judge, "total_train_steps=3"))
    expected = bits(replies)
    assert len(expected) == 3
    replies.clear()
    for steps in (2, 3):
        parts = play("grpo", tmp_path / "parts", *words(judge, f"total_train_steps={steps}", "recover.freq_steps=1"))
    assert bits(replies) == expected
    for step in (1, 2, 3):
        found = [[(each["completion"], each["reward"]) for each in run.samples(step)] for run in (whole, parts)]
        assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["rollout.drop_rollout_state=true"],
        ["rollout.max_concurrent_rollouts=3"],
        AHEAD,
    ],
    ids=["all at once", "dropped cache", "three at once", "ahead"],
)
def test_samples_of_the_actor_are_the_same_bits_as_without_a_judge(
    more: list[str], judge: Path, tmp_path: Path, replies: list[list[RolloutSequence]]
) -> None:
    """With a learning rate of 0, since the rewards differ."""
    model = [f"reward.path={classifier(tmp_path / 'reward')}", "actor.optimizer.lr=0", "total_train_steps=3", *more]
    judged = play("grpo", tmp_path / "judged", *words(judge, *model))
    assert len(replies) == 3
    plain = play("grpo", tmp_path / "plain", "reward.fn=null", *model)
    assert len(replies) == 3
    assert sampled(judged) == sampled(plain)
    if more is AHEAD:  # some samples were unfinished while the judge wrote
        assert sum(judged.series("rollout/parked_samples")) > 0
    assert [sample["reward"] for sample in judged.samples(3)] != [sample["reward"] for sample in plain.samples(3)]


def sampled(played: Played) -> list[Any]:
    """The tokens and log-probabilities of the rows of each step."""
    return [[(list(row.tokens), np.asarray(row.logprobs).tolist()) for row in rows] for rows in played.rows]


@pytest.mark.slow
def test_agents_that_live_across_steps_go_on_after_the_judge_has_written(
    judge: Path, tmp_path: Path, replies: list[list[RolloutSequence]]
) -> None:
    """With frozen weights and exact numbers, they draw the samples of a run without a judge that waits for them."""
    whole = ["total_train_steps=null", "total_train_epochs=1", "train_dataset.drop_last=false", "gconfig.n_samples=2"]
    whole += ["actor.optimizer.lr=0", "engine.exact=true"]
    ahead = ["rollout.max_head_offpolicyness=2", "rollout.prompts_ahead=4", "actor.use_decoupled_loss=true"]
    rows = [{"prompt": f"hello {number}", "solutions": number} for number in range(14)]

    def epoch(name: str, *more: str) -> Played:
        return agent_run(tmp_path / name, "slow_turns.py", *whole, *more, rows=rows, recipe="grpo")

    plain = epoch("plain")
    judged = epoch("judged", *ahead, *words(judge)[1:])
    assert max(judged.series("rollout/parked_samples")) >= 1
    assert counted(judged) == counted(plain)
    assert sum(map(len, replies)) == 28
    parts = [sample["parts"] for step in range(1, 5) for sample in judged.samples(step)]
    assert {each["judge"] for each in parts} <= {0.0, 1.0}
    assert {each["judge/unreadable"] for each in parts} == {0.0}


def counted(played: Played) -> Counter[Any]:
    return Counter((tuple(tokens), tuple(logprobs)) for rows in sampled(played) for tokens, logprobs in rows)
