"""The flight recorder and areno replay --step: a recorded step, computed again, has the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.launch.command import run
from areno.recipes.grpo import GRPOConfig
from areno.report import changed_steps
from areno.report.replayed_steps import compare_records, replay_steps
from areno.run.recorded_run import RecordedRun, run_replay
from areno.schema.fields import is_read_by_rollout, setting_rows
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.agent_model import model_folder
from tests.helpers.agent_runs import AGENTS, REWARD
from tests.helpers.moe_models import quickstart_with_experts
from tests.helpers.policy_runs import MODEL, SMALL, other_actor
from tests.helpers.recipe_runs import train
from tests.helpers.resumed import folder_of, go, killed_after

slow = pytest.mark.slow
OFTEN = "recover.freq_steps=3"


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
        pytest.param("grpo", ["variant=dppo_topk_tv", "actor.use_decoupled_loss=false"], marks=slow),
        pytest.param("ppo", [], marks=slow),
        pytest.param("online_dpo", [], marks=slow),
        pytest.param("dpo", [], marks=slow),
        pytest.param("kto", [], marks=slow),
        pytest.param("prm", [], marks=slow),
        pytest.param("rw", [], marks=slow),
    ],
)
def test_every_bit_of_a_step_is_equal(recipe: str, settings: list[str], folder: Path) -> None:
    found = recorded_run(recipe, OFTEN, *settings)
    before = contents(found.path)
    check_steps(found, 2, 5, max(RecordedRun(found.path).records.steps()))
    assert contents(found.path) == before


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
@pytest.mark.parametrize("layout", [[], ["engine.world_size=2"], ["engine.world_size=2", "engine.tp_size=2"]])
def test_experts_of_the_rollout_on_several_ranks(layout: list[str], folder: Path) -> None:
    """Every rank trains with the recorded experts of its rows."""
    model = quickstart_with_experts(folder / "model")
    more = [*SMALL, "--config-name=quickstart", f"actor.path={model}", "actor.init_from_scratch=true"]
    more += ["actor.routing_replay=true", "actor.recompute_logprob=true", "total_train_steps=4", "recover.freq_steps=2"]
    run = RunReader(train("grpo", folder / "outputs", *more, *layout))
    record = RecordedRun(run.path).read(3)
    for sample in record["rollout"]["samples"]:
        n_prompt = len(record["rollout"]["prompts"][sample["prompt"]]["tokens"])
        assert len(sample["sequence"].routes) == n_prompt + sample["sequence"].n_tokens - 1
    check_steps(run, 1, 3, 4)


@slow
def test_several_sources_with_a_curriculum(folder: Path) -> None:
    sources = "train_dataset.sources={a: {weight: 50}, b: {weight: 30, max_new_tokens: 3}, c: {weight: 20}}"
    more = [*SMALL, "--config-name=quickstart", sources, "train_dataset.curriculum.type=bandit", "total_train_steps=5"]
    kill_runs.write_rows("gspo", folder)
    run = train("gspo", folder / "outputs", *more, "recover.freq_steps=3", "reward.fn=reward.py")
    check_steps(RunReader(run), 2, 5)


def test_a_resumed_run_keeps_one_record_of_each_step(folder: Path) -> None:
    kill_runs.write_rows("sft", folder)
    with killed_after(4):
        go("sft", "recover.freq_steps=2")
    assert go("sft", "actor.optimizer.lr=2e-3", "recover.freq_steps=2", resume=folder_of("sft")) == 0
    run = RunReader(folder_of("sft"))
    assert RecordedRun(run.path).records.steps() == list(range(1, 8))
    check_steps(run, 7)
    for state in run.path.glob("**/state/step-*"):
        shutil.rmtree(state)
    check_steps(run, 7)  # from the start, over the change of the learning rate


# What cannot be replayed, and what differs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which the state of step 3 is left. Which later states there are depends on the speed of the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sft"))
        found = recorded_run(
            "sft", OFTEN, "recover.freq_epochs=null", "train_dataset.path=" + str(Path("rows.jsonl").absolute())
        )
        for state in found.path.glob("**/state/step-*"):
            if state.name != "step-000003":
                shutil.rmtree(state)
        return found.path


@pytest.fixture
def run_copy(sft_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sft_run, tmp_path / "t", symlinks=True)


def said_by(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(["replay", *words]) == code
    said = capsys.readouterr()
    return said.err if code == 2 or "error: " in said.err else said.out


def test_the_steps_are_listed(sft_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said_by(capsys, 0, str(sft_run), "--json"))
    assert found["recorded"] == list(range(1, 8))
    assert [(each["step"], each["from"], each["computes"]) for each in found["replayable"]] == [
        *((step, 0, step) for step in (1, 2, 3)),
        *((step, 3, step - 3) for step in (4, 5, 6, 7)),
    ]
    said = said_by(capsys, 0, str(sft_run))
    assert "the start of the run" in said
    assert "4 to 7" in said


def test_a_step_without_a_way_from_a_state_is_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 5):
        RecordedRun(run_copy).records.remove(step)
    text = "step {} cannot be replayed: {}; steps that can be replayed: 4"
    dropped = "its record was dropped to keep within recorder.max_gib"
    assert text.format(1, dropped) in said_by(capsys, 1, str(run_copy), "--step", "1")
    assert text.format(9, "it has no record") in said_by(capsys, 1, str(run_copy), "--step", "9")
    said = said_by(capsys, 1, str(run_copy), "--step", "6")
    assert "step 6 cannot be replayed: no state is left from which all steps up to it are recorded" in said
    shutil.rmtree(run_copy / "recorder")
    for words in ([], ["--step", "2"]):
        assert "has no records: recorder.max_gib was 0" in said_by(capsys, 1, str(run_copy), *words)


def test_a_damaged_state_is_left_out(run_copy: Path) -> None:
    run_json = next(run_copy.glob("**/step-000003/run.json"))
    run_json.write_text(run_json.read_text().replace("{", "{ ", 1))
    assert RecordedRun(run_copy).base_of(7).step == 0


def test_what_differs_is_named(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = RecordedRun(run_copy).records
    for step, name in ((5, "train/loss"), (6, "train/grad_norm")):
        tree = records.read(step)
        tree["metrics"][name] += 0.25
        records.write(step, tree)
    said = said_by(capsys, 1, str(run_copy), "--step", "6", "--device", "cpu")
    assert "The first step that differs is step 5" in said
    assert [line.split()[1:8:2] for line in said.splitlines() if "train/" in line] == [
        ["train/grad_norm", "1", "1", "0.25"]
    ]
    found = json.loads(said_by(capsys, 1, str(run_copy), "--step", "5", "--json"))
    assert found["from"] == 3
    [difference] = found["steps"][-1]["differences"]
    assert (difference["name"], difference["largest"]) == ("train/loss", 0.25)


def test_other_weights_differ(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = RecordedRun(run_copy).records
    tree = records.read(4)
    tree["digests"]["actor.master"] = tree["digests"]["actor.master"] + 1
    records.write(4, tree)
    assert "digest of actor.master" in said_by(capsys, 1, str(run_copy), "--step", "4")


def test_other_data_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = recorded_run("sft", OFTEN)
    rows = Path("rows.jsonl").read_text().splitlines()
    Path("rows.jsonl").write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    said = said_by(capsys, 1, str(found.path), "--step", "5")
    assert "train_dataset is not what the run began with, so that no step can be replayed" in said


# A change of settings -------------------------------------------------------------------------------------------------

GRPO = ["--config-name=quickstart", *SMALL, "total_train_steps=3", "recover.freq_steps=2", "actor.ppo_n_minibatches=2"]


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    folder = tmp_path_factory.mktemp("grpo")
    kill_runs.write_rows("grpo", folder)
    return RunReader(train("grpo", folder, *GRPO, f"reward.fn={folder / 'reward.py'}"))


def digests(run: RunReader, step: int) -> dict[str, list[int]]:
    return {name: parts.tolist() for name, parts in RecordedRun(run.path).read(step)["digests"].items()}


@slow
@pytest.mark.parametrize("change", ["actor.eps_clip=0.0001", "actor.adv_norm.std_level=null", "actor.kl_ctl=0.5"])
def test_a_change_gives_the_step_that_a_run_with_it_would_have_had(
    change: str, grpo_run: RunReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, dict] = {}
    monkeypatch.setattr(changed_steps, "run_replay", keep_found(found))
    changes = [change, *([f"ref.path={MODEL}"] if "kl_ctl" in change else [])]
    compared = changed_steps.compare_change(grpo_run, 3, changes, "cpu")
    assert compared.is_as_recorded
    assert compared.has_difference
    [update] = compared.updates
    assert update.norm_difference > 0
    assert -1 <= update.cosine < 1
    assert {value.name for value in compared.values} >= {"train/loss", "train/grad_norm"}
    # The run itself, resumed from the state of step 2 with the changed setting.
    folder = tmp_path / "e" / "t"
    shutil.copytree(grpo_run.path, folder, symlinks=True)
    shutil.rmtree(folder / "state/step-000003")
    (folder / "state/finished.json").unlink()
    for line in (folder / "checkpoints").glob("*"):
        shutil.rmtree(line) if line.is_dir() and not line.is_symlink() else line.unlink()
    (folder / "state/latest").write_text("step-000002\n")
    assert run(get_algorithm("grpo"), "grpo", ["--resume", str(folder), *changes]) == 0
    changed = RunReader(folder)
    assert digests(changed, 3) != digests(grpo_run, 3)
    assert compare_records(RecordedRun(changed.path).read(3), found[3]).differences == []


def keep_found(found: dict[int, dict]) -> Any:
    """run_replay, which also keeps the records of its last call."""

    def replay_and_keep(recorded: Any, base: Any, replay: Any, *how: Any) -> None:
        run_replay(recorded, base, replay, *how)
        found.update(replay.found)

    return replay_and_keep


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("actor.c_clip=50", "No difference"),  # no ratio is that large
        ("actor.eps_clip=0.0001", "train/loss"),
    ],
)
def test_a_change_is_shown(change: str, text: str, grpo_run: RunReader, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(grpo_run.path)
    assert main(["replay", str(grpo_run.path), "--step", "1", "--change", change, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert text in said
    assert said.startswith(f"step 1, with and without {change.partition('=')[0]} ")
    assert contents(grpo_run.path) == before


@slow
def test_samples_are_drawn_again_if_asked(grpo_run: RunReader) -> None:
    same = changed_steps.compare_change(grpo_run, 3, ["actor.c_clip=50"], "cpu", resamples=True)
    assert not same.has_difference  # the same random numbers
    other = changed_steps.compare_change(grpo_run, 3, ["gconfig.temperature=3"], "cpu", resamples=True)
    assert {"actor: reward", "train/loss"} <= {value.name for value in other.values}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--change gconfig.temperature=3", "gconfig.temperature: is read by the rollout, so that the recorded samples"),
        ("--change reward.timeout_s=3", "reward.timeout_s: is read by the rollout"),
        ("--change seed=3", "seed: cannot change in the middle of a run"),
        ("--change actor.eps_clib=3", "actor.eps_clib: unknown key; did you mean actor.eps_clip"),
        ("--change actor.eps_clip", "--change: is 'actor.eps_clip'; KEY=VALUE is expected"),
        ("--change actor.eps_clip=0.2", "--change: changes nothing: the step had actor.eps_clip=0.2"),
        ("--resample", "--resample: needs a change of settings"),
        ("--row 1", "--row: is for one sample"),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    words: str, message: str, grpo_run: RunReader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(grpo_run.path), "--step", "2", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_settings_that_a_rollout_reads_are_declared() -> None:
    read = [row.key for row in setting_rows(GRPOConfig) if is_read_by_rollout(GRPOConfig, row.key)]
    assert {"gconfig.top_p", "rollout.prompts_ahead", "reward.fn", "agent.fn", "train_dataset.path", "seed"} <= set(
        read
    )
    assert {key.partition(".")[2] for key in read if key.startswith("actor.")} >= {"path", "dtype", "fp8_config.mode"}
    others = ["actor.eps_clip", "actor.kl_ctl", "actor.adv_norm.eps", "actor.optimizer.lr", "agent.turn_credit"]
    assert not set(others) & set(read)
