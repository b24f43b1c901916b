"""Steps in which no sample has a reward: the update is skipped, the run goes on, and too many of them end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api import get_algorithm
from areno.config.models import OptimizerConfig
from areno.engine.train.learning_rate import learning_rate
from areno.errors import ArenoError
from areno.launch.compose import load
from areno.run.group_selection import Admission, Group
from areno.tracking.reader import RunReader
from areno.trainers import rollout
from areno.trainers.dynamic_sampling import choose_groups_with_signal
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample
from tests import kill_runs
from tests.helpers import agent_runs
from tests.helpers.policy_runs import MODEL, SMALL, other_actor, play
from tests.helpers.resumed import folder_of, go, killed_after, log, whole

FALLING = ["reward.workers=1", "actor.optimizer.lr_scheduler_type=linear", "actor.ppo_n_minibatches=2"]
STALE = ["rollout.max_head_offpolicyness=1", "rollout.prompts_ahead=2", "rollout.max_concurrent_rollouts=8"]


def without(*steps: int, prompts: tuple[str, ...] = ()) -> Callable[[Any], float | None]:
    """A reward that fails in some steps, and for some prompts. It travels by value."""

    def reward_fn(record: Any) -> float | None:
        return None if record.step in steps or record.prompt in prompts else float(len(record.completion) % 2)

    return reward_fn


def scored(group: int, reward: float | None) -> ScoredSample:
    item = PromptItem(prompt="", text="", tokens=[2], index=group)
    outcome = RewardOutcome(reward, "ok" if reward is not None else "error")
    sequence = RolloutSequence(resp_tokens=[3], resp_logprobs=[0.0])
    return ScoredSample(item=item, sequence=sequence, completion="", outcome=outcome, group=group)


def test_dropped_groups_with_rewards_are_chosen() -> None:
    samples = [scored(group, reward) for group, reward in [(0, None), (0, None), (1, 1.0), (1, None), (2, 0.0)]]
    keep, dropped = choose_groups_with_signal(samples, 1)
    assert [sample.group for sample, kept in zip(samples, keep, strict=True) if kept] == [1]  # its sample with a reward
    assert dropped == 3
    assert not choose_groups_with_signal(samples[:2], 1)[0].any()


def test_a_step_that_replaces_prompts_keeps_dropped_groups_with_rewards() -> None:
    groups = [Group(1, place, PromptItem(prompt="", text="", tokens=[2], index=place), 1) for place in range(3)]
    admission = Admission(groups, 0, 2, 3, 8, lambda: None)
    admission.dropped = list(groups)
    admission.keep_dropped(lambda group: group is not groups[0])
    assert (admission.taken, admission.dropped) == (groups[1:], groups[:1])
    admission.dropped = list(groups)
    admission.keep_dropped(lambda group: False)
    assert admission.taken == []


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("grpo", []),
        *(
            pytest.param(recipe, settings, marks=pytest.mark.slow)
            for recipe, settings in [
                ("grpo", ["actor.use_decoupled_loss=true"]),
                ("grpo", ["actor.m2_threshold=0.04"]),
                ("grpo", ["actor.prox_logp_method=metrics", "actor.use_decoupled_loss=true"]),
                ("grpo", ["rollout.dynamic_sampling=true"]),
                ("grpo", ["rollout.dynamic_sampling=true", "dynamic_bs=true"]),
                ("grpo", ["rollout.prompts_ahead=2"]),
                ("grpo", [*STALE, "actor.use_decoupled_loss=true"]),
                ("grpo", [*STALE, "actor.use_decoupled_loss=true", "rollout.dynamic_sampling=true"]),
                ("gspo", ["actor.kl_ctl=0.1", f"ref.path={MODEL}", "actor.use_kl_in_reward=true"]),
            ]
        ),
    ],
)
def test_the_update_is_skipped_and_the_schedule_goes_on(recipe: str, settings: list[str], tmp_path: Path) -> None:
    run = play(recipe, tmp_path, "total_train_steps=4", *FALLING, *settings, reward_fn=without(1, 3))
    assert run.series("train/skipped_steps") == [2, 0, 2, 0]
    schedule = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", lr_decay_steps=8)
    assert run.series("train/lr") == [learning_rate(schedule, update) for update in (1, 3, 5, 7)]
    assert len(run.rows) == len(run.series("rollout/rewards_mean")) == 2
    assert run.series("rollout/reward_errors")[0] == len(run.samples(1)) > 0
    assert {sample["reward"] for sample in run.samples(3)} == {None}


@pytest.mark.slow
def test_steps_without_a_pair_are_counted_too(tmp_path: Path) -> None:
    """A step whose rewards are all equal has no pair, but it is no fault of the reward."""

    def equal_in_step_2(record: Any) -> float | None:
        return None if record.step == 1 else 0.0 if record.step == 2 else float(len(record.completion))

    settings = ["pairs_per_prompt=1", "actor.optimizer.lr_scheduler_type=linear", "actor.max_skipped_steps=2"]
    settings += ["total_train_steps=3", "reward.workers=1"]
    run = play("online_dpo", tmp_path, *settings, task="quickstart_online_dpo", reward_fn=equal_in_step_2)
    assert run.series("train/skipped_steps") == [1, 1, 0]
    schedule = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", lr_decay_steps=3)
    assert run.series("train/lr") == [learning_rate(schedule, update) for update in range(3)]


@pytest.mark.slow
def test_a_critic_is_skipped_too(tmp_path: Path) -> None:
    settings = ["total_train_steps=4", *FALLING, "critic.warmup_steps=1", "critic.ppo_n_minibatches=4"]
    run = play("ppo", tmp_path, *settings, reward_fn=without(1, 3))
    assert run.series("train/critic_skipped_steps") == [4, 0, 4, 0]
    assert run.series("train/skipped_steps") == [0, 2, 0]  # the first step is that of the critic alone
    assert [len(run.rows), len(run.critic_rows)] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [[], STALE], ids=["rounds", "replaces"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_dynamic_sampling_trains_dropped_groups_that_have_rewards(
    ahead: list[str], overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rewards are equal, so that every group is dropped, and those of the first batch of a step are unknown."""
    rows = [{"prompt": f"{n}+{n}=", "solutions": "0"} for n in range(16, 40)]

    def one_or_none(record: Any) -> float | None:
        return None if int(record.prompt[:2]) % 8 < 4 else 1.0

    settings = ["rollout.dynamic_sampling=true", "reward.workers=1", "train_dataset.shuffle=false"]
    settings += ["rollout.max_sampling_rounds=2", "actor.use_decoupled_loss=true", "total_train_steps=1"]
    monkeypatch.setattr(rollout, "can_overlap", lambda setup: overlaps)
    run = play("grpo", tmp_path, *settings, *ahead, train_dataset=rows, reward_fn=one_or_none)
    assert run.series("train/skipped_steps") == [0]
    assert {row.reward for row in run.rows[0]} == {1.0}
    assert len(run.rows[0]) == 16


def test_too_many_such_steps_end_the_run_with_the_last_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ["total_train_steps=9", "actor.max_skipped_steps=2", "reward.workers=1"]
    with pytest.raises(ArenoError, match=r"reward\.fn: no reward .* of 2 steps in a row \(see .*: returned None"):
        play("grpo", tmp_path, *settings, reward_fn=without(1, 3, 4))
    warned = [record.getMessage() for record in caplog.records if "no sample has a reward" in record.getMessage()]
    assert [text.split(":")[0] for text in warned] == ["step 1", "step 3", "step 4"]
    assert "2 such steps in a row end the run (actor.max_skipped_steps)" in warned[0]


def test_a_run_without_any_reward_has_learned_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match=r"reward\.fn: no reward could be computed for any sample of all steps"):
        play("grpo", tmp_path, "reward.workers=1", "actor.max_skipped_steps=null", reward_fn=without(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [[], [*STALE, "actor.use_decoupled_loss=true"]], ids=["waits", "ahead"])
def test_agents_that_all_fail(ahead: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": "raise" if n < 4 else "ok"} for n in range(12)]
    settings = ["train_dataset.shuffle=false", "total_train_steps=3", "gconfig.n_samples=2", *ahead]
    run = agent_runs.run(tmp_path, "faulty.py", *settings, recipe="grpo", rows=rows)
    skipped = run.series("train/skipped_steps")
    assert len(skipped) == 3
    if not ahead:
        assert skipped == [1, 0, 0]
    assert sum(run.series("rollout/agent_errors")) == 8
    with pytest.raises(ArenoError, match=r"agent\.fn: no reward .* of a step .*: agent_error: .*no luck"):
        agent_runs.run(
            tmp_path / "none", "faulty.py", *settings, "actor.max_skipped_steps=1", recipe="grpo", rows=rows[:4]
        )


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_student_trains_on_given_answers_if_its_own_have_no_reward(share: float, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 20)]
    settings = [f"on_policy_share={share}", f"teacher.path={other_actor(tmp_path / 'teacher')}", "reward.workers=1"]
    settings += ["teacher.loss_type=reverse_kl", "gconfig.n_samples=1"]
    given = {"train_dataset": rows, "reward_fn": without(1)}
    run = play("distill", tmp_path / "run", *settings, task="quickstart_distill", **given)
    assert [len(each) for each in run.rows] == ([2, 4] if share < 1 else [4])
    assert run.series("train/skipped_steps") == ([0, 0] if share < 1 else [1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gspo", "grpo", "ppo"])
def test_a_run_resumed_after_such_a_step_is_the_same(
    recipe: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its schedule, its place in the data, and its seeds."""
    text = "def reward_fn(record):\n    if record.step == 2:\n        raise KeyError('x')\n"
    (tmp_path / "broken.py").write_text(text + kill_runs.REWARD.split(":", 1)[1])
    settings = [f"reward.fn={tmp_path / 'broken.py'}", "actor.optimizer.lr_scheduler_type=linear"]
    expected = whole(recipe, tmp_path_factory, *settings)
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows(recipe, tmp_path)
    with killed_after(2):
        go(recipe, "recover.freq_steps=1", *settings)
    assert go(recipe, "recover.freq_steps=1", *settings) == 0
    assert "after step 2" in log()
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of(recipe))) == []


def test_an_evaluation_without_a_reward_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = [text for text in SMALL if not text.startswith("valid_dataset")]
    settings += ["evaluator.freq_steps=1", "evaluator.patience=1", "reward.workers=1"]
    algorithm, valid = get_algorithm("grpo"), [{"prompt": "1+1=", "solutions": "2"}] * 2
    config = load(algorithm.config, "quickstart", settings)
    given = {"valid_dataset": valid, "reward_fn": without(prompts=("1+1=",))}
    with algorithm.trainer(config, tmp_path, **given) as trainer:
        trainer.fit()
    scalars = RunReader(tmp_path).metrics()
    assert len(scalars["train/loss"].values) == 2
    assert "eval/accuracy" not in scalars
    assert (
        "evaluation of the validation set: reward.fn: no reward could be computed for any of the 2 samples"
        in caplog.text
    )


def test_a_step_of_masked_rows_has_no_statistics_of_nothing(tmp_path: Path) -> None:
    """Samples that are cut off are rows without a trained token."""
    settings = ["actor.mask_no_eos_with_zero=true", "gconfig.max_new_tokens=1", "gconfig.min_new_tokens=1"]
    settings += ["actor.use_decoupled_loss=true", "actor.prox_logp_method=metrics", "reward.workers=1"]
    run = play("grpo", tmp_path, *settings, "total_train_steps=1", reward_fn=without())
    assert run.series("train/skipped_steps") == [1]
    assert all(np.isfinite(value) for name in run.names() for value in run.series(name))
