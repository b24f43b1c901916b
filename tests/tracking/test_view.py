"""The lines of the live display: what they show, and that they fit the terminal."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from areno.tracking.display.board import (
    ShownSample,
    Snapshot,
)
from areno.tracking.display.view import render_lines, scalar_rows


def a_look(seed=0, **more):
    pick = random.Random(seed)
    names = [
        "rollout/rewards_mean",
        "rollout/accuracy",
        "rollout/truncated",
        "rollout/frac_groups_zero_std",
        "eval/accuracy",
        "eval/rewards_mean",
        "train/entropy",
        "train/loss",
        "train/kl_loss",
        "train/logp_abs_diff_mean",
        "train/memory_gib",
        "rollout/tokens_per_second",
        "train/lr",
    ]
    courses = {name: [pick.random() for _ in range(pick.choice([1, 5, 200]))] for name in names}
    text = "".join(
        pick.choice(["word ", "漢字", "\x1b[2J", "\n", "é", "🙂", "\u202e"]) for _ in range(pick.randrange(900))
    )
    samples = [ShownSample(reward, text, text[::-1], 123) for reward in ("1", "0.5", "timeout")]
    look = {
        "step": 37,
        "total": 100,
        "elapsed": 3700.0,
        "left": 60.0,
        "phase": "evaluation · rollout",
        "work": "28/32 prompts, 12,345 tok/s",
        "times": {"rollout": 0.3, "train": 0.6, "step": 1.0},
        "trends": {name: (course[-1], course) for name, course in courses.items()},
        "samples": samples,
        "samples_step": 30,
        "n_warnings": pick.randrange(3),
        "warning": text,
    }
    return Snapshot(**look | more)


def shown(lines):
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (100, 10), (40, 12), (300, 100), (80, 3)])
def test_the_display_fits_its_terminal(size):
    width, height = size
    for seed in range(40):
        lines = shown(render_lines(a_look(seed), "a / b", width, height))
        assert len(lines) < height
        assert max(map(cell_len, lines)) < width
        assert all(text.isprintable() for text in lines)


def test_what_the_display_says_at_a_glance():
    look = a_look(n_warnings=2, warning="for 10 steps no sample was better than another")
    lines = "\n".join(shown(render_lines(look, "quickstart / a", 120, 40)))
    for text in (
        "quickstart / a",
        "step 37/100",
        "37 %",
        "1:01:40 elapsed",
        "1:00 left",
        "evaluation · rollout, 28/32 prompts",
        "last step 1 s: train 60 % · rollout 30 %",
        "2 warnings, the last: for 10 steps",
        "reward ",
        "groups without",
        "samples of step 30",
        "timeout",
    ):
        assert text in lines, text
    assert "loss" not in lines, "that of a policy says nothing"
    assert "stopping" in shown(render_lines(a_look(note="stopping soon"), "t", 80, 24))[2]


def test_numbers_that_are_the_same_all_the_time_are_told_once():
    course, flat = (1.0, [0.0, 1.0]), (0.0, [0.0, 0.0])
    trends = {"rollout/rewards_mean": course, "rollout/accuracy": course, "rollout/truncated": flat, "train/lr": flat}
    assert [row.title for row in scalar_rows(a_look(trends=trends))] == ["reward", "truncated", "learning rate"]


def test_the_critic_and_a_policy_that_is_not_trained_yet_are_shown():
    course = (1.0, [0.0, 1.0])
    names = ("rollout/rewards_mean", "train/explained_variance", "train/critic_loss", "rollout/ref_kl")
    trends = {name: (at, [at, 2.0]) for at, name in enumerate(names)}
    lines = "\n".join(shown(render_lines(a_look(trends=trends), "t", 120, 40)))
    told = ("critic: explained variance", "critic: loss", "KL to the reference", "the policy is not trained yet")
    assert [text in lines for text in told] == [True] * 4
    trained = render_lines(a_look(trends=trends | {"train/loss": course, "train/kl_loss": course}), "t", 120, 40)
    assert "not trained yet" not in "\n".join(shown(trained))


def test_parts_of_a_reward_have_their_rows():
    names = ("rollout/rewards_mean", "rollout/reward/format", "rollout/reward/format_std")
    look = a_look(trends={name: (at, [at, 2.0]) for at, name in enumerate(names)})
    assert [row.title for row in scalar_rows(look)] == ["reward", "reward: format"]
