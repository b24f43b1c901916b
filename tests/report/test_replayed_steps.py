"""The flight recorder and areno replay --step: a recorded step, computed again, has the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areno.report.replayed_steps import RecordedRun, replay_steps
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.agent_model import model_folder
from tests.helpers.agent_runs import AGENTS, REWARD
from tests.helpers.policy_runs import SMALL, other_actor
from tests.helpers.recipe_runs import graded_reward, train
from tests.helpers.resumed import folder_of, go, killed_after

slow = pytest.mark.slow
OFTEN = "recover.freq_steps=3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded_run(recipe: str, *settings: str) -> RunReader:
    kill_runs.write_rows(recipe, Path())
    assert go(recipe, *settings) == 0
    return RunReader(folder_of(recipe))


def check_steps(run: RunReader, *steps: int) -> None:
    for step in steps:
        base, found = replay_steps(run, step, "cpu")
        assert [each.step for each in found] == list(range(base.step + 1, step + 1))
        for each in found:
            assert each.n_compared > 10
            assert each.differences == []


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("sft", []),
        pytest.param("gspo", [], marks=slow),
        pytest.param("gspo", ["rollout.dynamic_sampling=false", "actor.kl_ctl=0.01", "ref=default"], marks=slow),
        pytest.param("grpo", [], marks=slow),
        pytest.param("grpo", ["rollout.dynamic_sampling=false"], marks=slow),
        pytest.param("ppo", [], marks=slow),
        pytest.param("online_dpo", [], marks=slow),
        pytest.param("dpo", [], marks=slow),
        pytest.param("kto", [], marks=slow),
        pytest.param("prm", [], marks=slow),
        pytest.param("rw", [], marks=slow),
    ],
)
def test_every_bit_of_a_step_is_equal(recipe: str, settings: list[str], folder: Path) -> None:
    run = recorded_run(recipe, OFTEN, *settings)
    before = contents(run.path)
    check_steps(run, 2, 5, max(RecordedRun(run).records.steps()))
    assert contents(run.path) == before


AGENT = [
    *("--config-name=quickstart", f"actor.path={model_folder()}", "engine.dummy_load=true", f"reward.fn={REWARD}"),
    *("reward.workers=1", "agent.workers=1", "train_dataset.max_length=50", "gconfig.max_tokens=400"),
    *("gconfig.temperature=1", "saver.freq_steps=null", "total_train_steps=4", "train_dataset.batch_size=4"),
    *("gconfig.n_samples=4", "gconfig.max_new_tokens=8", "valid_dataset=null", "train_dataset.loader=null"),
    *("train_dataset.path=rows.jsonl", "recover.freq_steps=2"),
]


@slow
@pytest.mark.parametrize(
    "settings",
    [
        [f"agent.fn={AGENTS / 'two_turns.py'}"],
        [f"agent.fn={AGENTS / 'recorded_turns.py'}", "rollout.max_head_offpolicyness=1", "rollout.prompts_ahead=2"],
    ],
)
def test_agents_are_not_started_again(settings: list[str], folder: Path) -> None:
    rows = [{"prompt": f"hello {number}", "solutions": number} for number in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(train("gspo", folder / "outputs", *AGENT, *settings))
    check_steps(run, 1, 2, 4)


@slow
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["on_policy_share=0.5", "teacher.loss_type=reverse_kl"],
        ["teacher.loss_type=sampled_reverse_kl", "reward.fn=null"],
    ],
)
def test_distillation(settings: list[str], folder: Path) -> None:
    teacher = other_actor(folder / "teacher")
    more = ["--config-name=quickstart_distill", f"teacher.path={teacher}", "train_dataset.batch_size=8"]
    more += ["total_train_steps=4", "recover.freq_steps=2", "valid_dataset=null", "gconfig.temperature=1.5"]
    check_steps(RunReader(train("distill", folder / "outputs", *more, *settings)), 1, 2, 4)


@slow
def test_several_sources_with_a_curriculum(folder: Path) -> None:
    sources = "train_dataset.sources={a: {weight: 50}, b: {weight: 30, max_new_tokens: 3}, c: {weight: 20}}"
    more = [*SMALL, "--config-name=quickstart", sources, "train_dataset.curriculum.type=bandit", "total_train_steps=5"]
    run = train("gspo", folder / "outputs", *more, "recover.freq_steps=3", graded_reward(folder))
    check_steps(RunReader(run), 2, 5)


def test_a_resumed_run_keeps_one_record_of_each_step(folder: Path) -> None:
    kill_runs.write_rows("sft", folder)
    with killed_after(4):
        go("sft", "recover.freq_steps=2")
    assert go("sft", "actor.optimizer.lr=2e-3", "recover.freq_steps=2", resume=folder_of("sft")) == 0
    run = RunReader(folder_of("sft"))
    assert RecordedRun(run).records.steps() == list(range(1, 8))
    check_steps(run, 7)
    for state in run.path.glob("**/state/step-*"):
        shutil.rmtree(state)
    check_steps(run, 7)  # from the start, over the change of the learning rate
