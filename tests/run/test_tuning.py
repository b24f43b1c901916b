"""Settings that are chosen by trials before a run: the trials, and what a run and its folder have of them."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.config.teacher import Divergence
from areno.engine.engine import Engine
from areno.errors import ConfigError, EngineError
from areno.files.paths import find_file
from areno.launch.command import run
from areno.launch.compose import load
from areno.plan.tuning_candidates import AT_ONCE, BATCH, BUDGET, DROP, RECOMPUTE, Candidate
from areno.recipes.gspo import ALGORITHM
from areno.run import tuning, tuning_trials
from areno.run.tuning import choose_settings
from areno.run.tuning_trials import MeasuredTrial, Trials
from areno.schema.values import value_at
from areno.tracking.run_folder import settings_of
from areno.trainers.policy_only import PolicyOnlyTrainer
from tests.helpers.judge_model import char_judge
from tests.helpers.processes import is_running, worker_pids
from tests.helpers.recipe_runs import without_times

MODEL = find_file("examples/quickstart/model")
EXAMPLE = find_file("examples/quickstart/reward.py").parent
# Without the settings of a task, so that all of them are left to choose.
TASK = [
    "--config-name=train",
    f"actor.path={MODEL}",
    f"train_dataset.loader={EXAMPLE / 'dataset_loader.py'}",
    f"reward.fn={EXAMPLE / 'reward.py'}",
    *("train_dataset.max_length=64", "gconfig.max_new_tokens=16", "gconfig.n_samples=4"),
    *("engine.device=cpu", "total_train_steps=2", "actor.optimizer.lr=1e-3"),
]
TUNED = [*TASK, "tune.enabled=true", "tune.max_samples=32"]


def config(*settings: str, recipe: str = "gspo") -> Any:
    return load(get_algorithm(recipe).config, "train", [*TUNED[1:], *settings])


def start(folder: Path, *settings: str, task: Sequence[str] = TUNED, trial: str = "t") -> Path:
    """Start a run by its command; its folder."""
    assert run(ALGORITHM, "gspo", [*task, f"cluster.fileroot={folder}", f"trial_name={trial}", *settings]) == 0
    return folder / "train" / trial


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("tune: ")]


# -- trials ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The worker of each trial, of which there are two."""
    run_trial, found = tuning_trials._Trial.run, []

    def recorded(trial: Any, **how: Any) -> Any:
        found.extend(worker_pids(trial.engine))
        return run_trial(trial, **how)

    monkeypatch.setattr(tuning_trials._Trial, "run", recorded)
    monkeypatch.setattr(tuning, "shortlist", lambda found: found[:2])
    return found


@pytest.mark.slow
def test_trials_need_no_weights_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pids: list[int]
) -> None:
    """Of a run with all kinds of models. Their folders have no weights, and its rows cannot be read."""
    for name, architecture in (("model", "Qwen3ForCausalLM"), ("reward", "Qwen3ForSequenceClassification")):
        shutil.copytree(MODEL, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        values = json.loads((tmp_path / name / "config.json").read_text())
        values |= {"architectures": [architecture], "num_labels": 1}
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    files = sorted(tmp_path.rglob("*"))
    settings = [f"actor.path={tmp_path / 'model'}", f"reward.path={tmp_path / 'reward'}", "actor.kl_ctl=0.1"]
    settings += ["ref=default", "train_dataset.loader=no_such_file.py"]
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "areno"):
        chosen = choose_settings(config(*settings, recipe="ppo"), ())
    assert {AT_ONCE, RECOMPUTE, BATCH} <= chosen.keys()
    assert len(told(caplog)) == 2
    assert all("s a step predicted" in line and "GiB measured" in line for line in told(caplog))
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["labels", "json"])
def test_trials_of_a_run_with_a_judge_of_few_tokens(
    verdict: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, pids: list[int]
) -> None:
    """Rows of the actor's tokens are none of the judge's. A judge that writes is planned, and not tried."""
    actor = char_judge(tmp_path / "actor")
    settings = ["reward.fn=null", f"reward.judge.path={MODEL}", f"reward.judge.verdict={verdict}"]
    with caplog.at_level(logging.INFO, "areno"):
        chosen = choose_settings(config(f"actor.path={actor}", *settings, recipe="grpo"), ())
    assert {AT_ONCE, RECOMPUTE, BATCH} <= chosen.keys()
    assert len(told(caplog)) == 2
    assert all("GiB measured" in line for line in told(caplog))


@pytest.mark.slow
def test_trials_record_and_compare_distributions(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    train, seen = Engine.train, []

    def recorded(engine: Engine, rows: Any, loss_fn: Any, update: Any, *args: Any) -> Any:
        seen.append((update.divergence, {row.teacher_top[0].shape[1] for row in rows} == {engine.info.vocab_size}))
        return train(engine, rows, loss_fn, update, *args)

    monkeypatch.setattr(Engine, "train", recorded)
    assert choose_settings(config("actor.mask=dppo_topk_tv", "actor.recompute_logprob=false", recipe="grpo"), ())
    assert len(seen) == 3
    assert set(seen) == {(Divergence("tv"), True)}


@pytest.mark.slow
def test_trials_compute_the_divergence_from_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    train, seen = Engine.train, []

    def recorded(engine: Engine, rows: Any, loss_fn: Any, update: Any, *args: Any) -> Any:
        seen.append((update.divergence, engine.spec.planned["teacher"].in_training))
        return train(engine, rows, loss_fn, update, *args)

    monkeypatch.setattr(Engine, "train", recorded)
    shutil.copytree(MODEL, tmp_path / "teacher")
    settings = ["teacher=default", f"teacher.path={tmp_path / 'teacher'}", "teacher.loss_type=reverse_kl"]
    assert choose_settings(config(*settings), ())
    assert len(seen) == 3  # to warm up, and in two trials
    assert set(seen) == {(Divergence("reverse_kl"), True)}


@pytest.mark.slow
def test_a_candidate_that_fails_is_discarded_with_its_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pids: list[int]
) -> None:
    train = tuning_trials._Trial._train

    def run_out_of_memory(trial: Any, *args: Any) -> None:
        if len(pids) == 1:
            raise EngineError("out of device memory in training (tried to allocate 1 GiB): lower it")
        train(trial, *args)

    monkeypatch.setattr(tuning_trials._Trial, "_train", run_out_of_memory)
    with caplog.at_level(logging.INFO, "areno"):
        chosen = choose_settings(config("actor.gradient_checkpointing=false"), {RECOMPUTE})
    first, second = told(caplog)
    assert first.endswith("discarded, out of device memory in training (tried to allocate 1 GiB): lower it")
    assert "measured" in second
    assert chosen
    assert len(set(pids)) == 2
    assert not any(map(is_running, pids))


@pytest.mark.gpu
def test_trials_on_a_gpu(caplog: pytest.LogCaptureFixture, pids: list[int]) -> None:
    """Memory and time are measured on the device, with a cache that stays and one that is dropped."""
    began = time.monotonic()
    for drops in ("false", "true"):
        settings = [f"{DROP}={drops}", "engine.device=cuda", "engine.world_size=1", "ref=default", "actor.kl_ctl=0.1"]
        with caplog.at_level(logging.INFO, "areno"):
            chosen = choose_settings(config(*settings), {DROP})
        assert {AT_ONCE, RECOMPUTE, BATCH} <= chosen.keys()
        assert DROP not in chosen
    assert any("the KV cache dropped" in line and "GiB measured" in line for line in told(caplog))
    assert time.monotonic() - began < 2 * tuning_trials.LIMIT_S
    assert len(pids) == 4
    assert not any(map(is_running, pids))


class MadeUp(Trials):
    """Trials whose results a test decides."""

    result: Callable[[Candidate], MeasuredTrial]
    tried: list[Candidate]
    seconds = 0.0

    def __init__(self, plan: Any, probes_rollout: bool = True):
        super().__init__(plan, probes_rollout)
        MadeUp.tried = []

    def run(self, candidate: Candidate) -> MeasuredTrial:
        MadeUp.tried.append(candidate)
        self._began -= MadeUp.seconds
        self._longest_s = MadeUp.seconds
        return MadeUp.result(candidate)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUp]:
    monkeypatch.setattr(tuning, "Trials", MadeUp)
    MadeUp.seconds = 0.0
    MadeUp.result = staticmethod(lambda candidate: MeasuredTrial(step_s=1.0, peak=0))
    return MadeUp


def test_the_fastest_candidate_is_chosen(made_up: type[MadeUp]) -> None:
    def result(candidate: Candidate) -> MeasuredTrial:
        return MeasuredTrial(step_s=0.5 if len(made_up.tried) == 3 else 1.0, peak=0)

    made_up.result = staticmethod(result)
    chosen = choose_settings(config(), ())
    assert chosen == made_up.tried[2].settings
    assert len(made_up.tried) >= 4


@pytest.mark.slow
def test_equal_times_keep_micro_batches_that_adapt(made_up: type[MadeUp]) -> None:
    chosen = choose_settings(config(), ())
    assert chosen[BUDGET] is None
    assert chosen[BATCH] == chosen[AT_ONCE] // 4 == 8


def test_only_the_size_of_micro_batches_is_left(made_up: type[MadeUp]) -> None:
    given = {AT_ONCE, DROP, RECOMPUTE, BATCH}
    assert choose_settings(config("train_dataset.batch_size=64"), given) == {BUDGET: None}
    n_tried = len(made_up.tried)
    assert n_tried > 1
    assert choose_settings(config(), given | {BUDGET}) == {}
    assert len(made_up.tried) == n_tried


@pytest.mark.slow
def test_no_trial_begins_that_would_end_too_late(made_up: type[MadeUp]) -> None:
    made_up.seconds = 40.0
    choose_settings(config(), ())
    assert len(made_up.tried) <= 2
    made_up.seconds = 400.0
    choose_settings(config(), ())
    assert len(made_up.tried) == 1


def test_what_needs_least_memory_is_tried_last_and_only_if_nothing_else_fits(made_up: type[MadeUp]) -> None:
    choose_settings(config(), ())
    usual = len(made_up.tried)

    def result(candidate: Candidate) -> MeasuredTrial:
        return MeasuredTrial(step_s=1.0, peak=2**60 if len(made_up.tried) <= usual else 0)

    made_up.result = staticmethod(result)
    chosen = choose_settings(config(), ())
    assert len(made_up.tried) == usual + 1
    assert chosen == made_up.tried[-1].settings
    assert made_up.tried[-1].peak_memory_bytes == min(candidate.peak_memory_bytes for candidate in made_up.tried)


@pytest.mark.slow
def test_nothing_fits(made_up: type[MadeUp]) -> None:
    made_up.result = staticmethod(lambda candidate: MeasuredTrial(step_s=1.0, peak=2**60))
    with pytest.raises(ConfigError, match=r"tune.mem_frac: is 0.9, and no candidate fits into .* GiB of a device; "):
        choose_settings(config(), ())

    def fail(candidate: Candidate) -> MeasuredTrial:
        raise EngineError("out of device memory: lower it")

    made_up.result = staticmethod(fail)
    with pytest.raises(EngineError, match="out of device memory: lower it"):
        choose_settings(config(), ())


def test_a_rollout_is_not_tried_if_its_size_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: Any) -> None:
        raise AssertionError("decoded samples")

    monkeypatch.setattr(tuning_trials._Trial, "_generate", generate)
    monkeypatch.setattr(tuning, "shortlist", lambda found: found[:1])
    chosen = choose_settings(config(f"{AT_ONCE}=24"), {AT_ONCE})
    assert AT_ONCE not in chosen
    assert chosen[BATCH] == 6


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Made-up choices in place of trials; what was given to each of them."""
    asked: list[set[str]] = []

    def choose_made_up(config: Any, given: set[str]) -> dict[str, Any]:
        asked.append(set(given))
        made = {AT_ONCE: 8, RECOMPUTE: False, BUDGET: 512, BATCH: 2}
        return {key: value for key, value in made.items() if key not in given}

    monkeypatch.setattr(tuning, "choose_settings", choose_made_up)
    return asked


@pytest.mark.slow
def test_a_run_records_what_was_chosen_and_goes_on_with_it(tmp_path: Path, chosen: list[set[str]]) -> None:
    folder = start(tmp_path)
    log = (folder / "logs/run.log").read_text(encoding="utf-8")
    batch, choice = (line for line in log.splitlines() if "tune: " in line)
    assert "tune: train_dataset.batch_size=2 is chosen, since it was not given" in batch
    assert choice.endswith(f"{AT_ONCE}=8 {RECOMPUTE}=false {BUDGET}=512 {BATCH}=2")
    recorded = settings_of(folder)
    assert [value_at(recorded, key) for key in (AT_ONCE, RECOMPUTE, BUDGET, BATCH)] == [8, False, 512, 2]
    assert chosen == [set()]
    # The same command again, and --resume, take the settings from the folder.
    start(tmp_path, "total_train_steps=3")
    assert run(ALGORITHM, "gspo", ["--resume", str(folder), "total_train_steps=4"]) == 0
    assert len(chosen) == 1
    assert settings_of(folder) | {"total_train_steps": 2} == recorded
    assert sorted(without_times(folder)) == [1, 2, 3, 4]
    start(tmp_path, "total_train_steps=5", task=TASK)  # without tune.enabled
    assert [value_at(settings_of(folder), key) for key in (AT_ONCE, RECOMPUTE, BUDGET, BATCH)] == [8, False, 512, 2]
    start(tmp_path, "total_train_steps=6", f"{AT_ONCE}=6")
    assert value_at(settings_of(folder), AT_ONCE) == 6
    assert value_at(settings_of(folder), BATCH) == 2


@pytest.mark.slow
def test_tuned_yaml_is_a_task(tmp_path: Path, chosen: list[set[str]]) -> None:
    folder = start(tmp_path)
    again = [*TASK[1:], "--config-name=tuned", f"--config-dir={folder}", f"cluster.fileroot={tmp_path}"]
    assert run(ALGORITHM, "gspo", [*again, "trial_name=again"]) == 0
    one, other = settings_of(folder), settings_of(tmp_path / "train/again")
    for key in (AT_ONCE, RECOMPUTE, BUDGET, BATCH):
        assert value_at(one, key) == value_at(other, key)
    [line] = [line for line in (folder / "tuned.yaml").read_text().splitlines() if BUDGET in line]
    assert run(ALGORITHM, "gspo", [*TASK, *line.lstrip("# ").split(), "--cfg=job"]) == 0


@pytest.mark.slow
def test_settings_of_the_command_line_and_of_files_are_given(tmp_path: Path, chosen: list[set[str]]) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, _self_]\nactor:\n  gradient_checkpointing: true\n  mb_spec: {max_tokens_per_mb: 256}\n"
    )
    files = ["--config-name=mine", f"--config-dir={tmp_path}", *TUNED[1:], f"cluster.fileroot={tmp_path}"]
    assert run(ALGORITHM, "gspo", [*files, "trial_name=t", f"{BATCH}=32", "rollout={drop_rollout_state: false}"]) == 0
    assert chosen[0] >= {RECOMPUTE, BUDGET, BATCH}
    assert AT_ONCE not in settings_of(tmp_path / "train/t")
    assert value_at(settings_of(tmp_path / "train/t"), BATCH) == 32
    assert value_at(settings_of(tmp_path / "train/t"), RECOMPUTE) is True


def test_an_error_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("nothing fits")

    monkeypatch.setattr(tuning, "choose_settings", fail)
    with pytest.raises(SystemExit):
        start(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_while_the_trials_are_imported_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "areno.run" and args[2] == ("tuning",):
            raise KeyboardInterrupt
        return importer(name, *args, **kwargs)

    importer = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupt)
    assert run(ALGORITHM, "gspo", [*TUNED, f"cluster.fileroot={tmp_path / 'runs'}", "trial_name=t"]) == 130
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_script_is_tuned_too(tmp_path: Path, chosen: list[set[str]]) -> None:
    settings = [f"cluster.fileroot={tmp_path}", "trial_name=t", f"{AT_ONCE}=12"]
    for n_steps in (2, 3):
        with PolicyOnlyTrainer(config(*settings, f"total_train_steps={n_steps}")) as trainer:
            trainer.fit()
        assert trainer.setup.config.train_dataset.batch_size == 2
    assert chosen == [{AT_ONCE}]
    assert (tmp_path / "train/t/tuned.yaml").exists()
    assert sorted(without_times(tmp_path / "train/t")) == [1, 2, 3]


@pytest.mark.slow
def test_a_tuned_run_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode, if no setting was chosen that changes what is learned."""
    exact = ["engine.deterministic=true", "engine.exact=true", f"{BATCH}=8"]
    monkeypatch.setattr(tuning, "shortlist", lambda found: [of for of in found if of.settings[AT_ONCE] < 32][:2])
    tuned, untuned = start(tmp_path, *exact), start(tmp_path, *exact, task=TASK, trial="u")
    assert value_at(settings_of(tuned), AT_ONCE) < 32
    assert value_at(settings_of(untuned), AT_ONCE) is None
    assert without_times(tuned) == without_times(untuned)
