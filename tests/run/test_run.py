"""What a run keeps beside its models: steps, batches, records, saving and evaluating, and the state to resume from."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areno.config.models import ModelConfig, OptimizerConfig
from areno.config.run import EvaluatorConfig, SaverConfig, StatsLoggerConfig, TensorBoardConfig
from areno.errors import ConfigError, EngineError
from areno.plan.phases import ComparedPhase
from areno.run.run import Run
from areno.tracking.run_log import RunLog
from areno.types import TrainSequence
from tests.helpers.started_runs import start


@pytest.mark.parametrize("path", [None, "elsewhere"])
def test_the_folder_of_the_metrics_is_told_at_the_start(path, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    stats_logger = StatsLoggerConfig(tensorboard=TensorBoardConfig(path=path))
    with caplog.at_level(logging.INFO, "areno"):
        start(tmp_path / "run", facts={"model": "m"}, stats_logger=stats_logger).close()
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("run: ")]
    assert line.startswith(f"run: run; model: m; steps: 20; metrics: {path or 'run/tensorboard'}")
    stages = "run/logs/run.log, with all stages (stats_logger.console=full)"
    assert f"; log: {stages}" in line


def test_the_line_at_the_start_is_short(tmp_path, caplog, monkeypatch):
    """However many settings differ from their defaults; config.yaml has all of them."""
    monkeypatch.chdir(tmp_path)  # the line has the folder's path from here
    optimizer = OptimizerConfig(
        lr=1e-3, lr_scheduler_type="linear", min_lr_ratio=0.5, weight_decay=0.5, gradient_clipping=2.0, beta1=0.5
    )
    actor = ModelConfig(path="model", use_lora=True, lora_rank=3, lora_alpha=5, use_rslora=True, optimizer=optimizer)
    with caplog.at_level(logging.INFO, "areno"):
        start(tmp_path / "run", facts={"model": "m"}, actor=actor).close()
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("run: ")]
    assert "settings: " in line
    assert line.endswith(" ... (all: config.yaml)")
    assert len(line) < 500


@pytest.mark.parametrize(
    ("settings", "n_steps"),
    [
        ({"total_train_epochs": 3}, 6),
        ({"total_train_epochs": 3, "total_train_steps": 5}, 5),
        ({"total_train_n_seqs": 3}, 3),
        ({"total_train_epochs": 1, "total_train_steps": 9}, 2),
    ],
)
def test_a_run_has_its_epochs_steps_or_rows(settings, n_steps, tmp_path):
    run = start(tmp_path, **settings)
    assert run.progress.total_steps == n_steps
    assert [(run.step, run.progress.total_steps) for _ in run.steps()] == [
        (step + 1, n_steps) for step in range(n_steps)
    ]
    run.close()


@pytest.mark.parametrize(
    ("data", "totals"),
    [
        ({"batch_size": 2}, [4, 4, 4, 4]),  # 5 rows; the last batch is not full
        ({"batch_size": 2, "drop_last": False}, [6, 6, 6, 6, 6, 6]),
        # Row 3 turns out to be too long once batch 1 is there, which is when the one behind it is encoded.
        ({"batch_size": 1}, [10, 10, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_the_number_of_steps_follows_what_is_known_of_the_data(tmp_path, data, totals):
    run = start(tmp_path, 5, data=data, total_train_epochs=2, total_train_steps=100)
    encode = run.progress.loader.encode
    if data["batch_size"] == 1:
        run.progress.loader._ahead._encode = lambda rows, indices: [
            TrainSequence(tokens=[0] * 9) if index == 3 else row
            for index, row in zip(indices, encode(rows, indices), strict=True)
        ]
    assert [run.progress.total_steps for _ in run.steps()] == totals
    run.close()


def test_steps_that_take_several_batches_are_fewer(tmp_path):
    run = start(tmp_path, 6, total_train_epochs=1, total_train_steps=100)
    assert [(run.progress.next_batch() is not None, run.progress.total_steps) for _ in run.steps()] == [
        (True, 5),
        (True, 4),
        (True, 3),
    ]
    run.close()


def test_a_folder_that_cannot_be_one(tmp_path):
    for folder in ("", " ", "a\0b", "\ud800", 3):
        with pytest.raises(ConfigError, match=r"run_dir: is .*; the name of a folder is expected"):
            start(folder)  # type: ignore[arg-type]


def test_a_run_that_is_past_its_new_end_makes_no_more_steps(tmp_path):
    run = start(tmp_path, total_train_epochs=3)
    for _ in run.steps():
        if run.step == 4:
            state = run.state_dict()
            break
        run.end_step({})
    run.close()
    shorter = start(tmp_path / "shorter", total_train_epochs=3, total_train_steps=2)
    shorter.load_state_dict(state)
    assert list(shorter.steps()) == []
    shorter.close()


@pytest.mark.parametrize(("freq_steps", "kept"), [(9, "no checkpoint"), (1, "that of step 1")])
def test_a_run_that_stops_early_says_what_is_left(freq_steps, kept, tmp_path):
    run = start(tmp_path, saver=SaverConfig(freq_steps=freq_steps))
    for _ in run.steps():
        if run.step == 2:
            break
        run.end_step({"loss": 1.0})
    run.close()
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "warning: stopped in step 2" in log
    assert kept in log


def test_a_second_run_in_a_folder_with_checkpoints_is_refused(tmp_path):
    run = start(tmp_path, saver=SaverConfig(freq_steps=1), total_train_epochs=1)
    for _ in run.steps():
        run.end_step({})
    run.close()
    shorter = start(tmp_path, total_train_steps=1)
    with pytest.raises(ConfigError, match=r"checkpoints holds the checkpoints of the run in .*; choose"):
        next(shorter.steps())
    shorter.close()
    assert sorted(p.name for p in tmp_path.glob("checkpoints/step-*")) == ["step-000001", "step-000002"]


def test_a_run_that_is_interrupted_while_it_saves_names_the_step_that_is_there(tmp_path, monkeypatch):
    run = start(tmp_path, saver=SaverConfig(freq_steps=1))
    rename = Path.rename

    def interrupted(self, target):
        rename(self, target)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Path, "rename", interrupted)
    next(run.steps())
    with pytest.raises(KeyboardInterrupt):
        run.end_step({})
    run.close()
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "stopped in step 1; there is no state to go on from, and the last checkpoint is that of step 1" in log
    assert os.readlink(tmp_path / "checkpoints/latest") == "step-000001"


def test_the_log_of_a_run_has_what_was_told_before_it(tmp_path):
    with RunLog():
        logging.getLogger("areno").warning("engine.device=auto takes the CPU")
        start(tmp_path).close()
    log = (tmp_path / "logs/run.log").read_text()
    assert log.count("warning: engine.device=auto takes the CPU") == 1


def test_a_run_that_ends_says_so_once(tmp_path):
    run = start(tmp_path, total_train_epochs=1)
    for _ in run.steps():
        run.progress.append_to_history(loss=3.0 - run.step)
        run.end_step({})
    run.finish({"loss": 1, "eval_loss": 1})
    run.close()
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "done: 2 steps" in log
    assert "loss 2.000 -> 1.000; files" in log
    assert "stopped" not in log
    assert (tmp_path / "checkpoints" / "latest" / "x").is_file()


@pytest.mark.parametrize("damage", ["metrics", "disk"])
def test_a_run_is_complete_even_if_it_cannot_be_compared_with_its_forecast(tmp_path, monkeypatch, damage):
    def disk_is_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = start(tmp_path, total_train_epochs=1)
    monkeypatch.setattr(run._models, "forecast", lambda *lengths: SimpleNamespace(phases=[]))
    monkeypatch.setattr("areno.run.run.measured_lengths", lambda *_: (1, 1))
    monkeypatch.setattr(
        "areno.run.run.compare_with_recorded", lambda *_: [ComparedPhase(name="step", seconds=(1, 1), gib=(1, 1))]
    )
    for _ in run.steps():
        run.end_step({})
    if damage == "metrics":
        (tmp_path / "logs/metrics.jsonl").write_text("{broken\n")
    else:
        monkeypatch.setattr("areno.run.run.atomic_write_text", disk_is_full)
    run.finish({})
    run.close()
    log = (tmp_path / "logs/run.log").read_text()
    assert "no forecast to compare the run with: " in log
    assert "done: 2 steps" in log


def test_what_is_told_at_the_end_is_the_mean_of_the_last_steps(tmp_path):
    run = start(tmp_path)
    for value in (0.0, 1.0, 2.0, 6.0):
        run.progress.append_to_history(reward_mean=value)
    assert run.progress.recent_mean("reward_mean") == 6.0
    assert run.progress.recent_mean("reward_mean", 3) == 3.0
    assert run.progress.recent_mean("reward_mean", 9) == 2.25
    run.close()


def test_evaluations_come_when_they_are_due_and_once_at_the_end(tmp_path):
    seen: list[int] = []

    def evaluate() -> dict[str, float]:
        seen.append(run.step)
        return {"accuracy": float(run.step)}

    evaluator = EvaluatorConfig(freq_steps=2, eval_before_train=True)
    run = start(tmp_path, 5, evaluate, evaluator=evaluator, total_train_epochs=1)
    for _ in run.steps():
        run.end_step({})
    run.finish({"eval_accuracy": 1})
    run.close()
    assert seen == [0, 2, 4, 5]
    assert run.progress.history["eval_accuracy"] == [0.0, 2.0, 4.0, 5.0]
    assert "eval_accuracy 0.000 -> 5.000" in (tmp_path / "logs" / "run.log").read_text()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6])
def test_a_resumed_run_is_the_run_that_would_have_been(tmp_path, stop_at, shuffle):
    """Batches, seeds, evaluations, checkpoints and history: for every step that it may be stopped at."""
    settings: dict[str, Any] = {
        "total_train_epochs": 3,
        "total_train_n_seqs": 8,
        "saver": SaverConfig(freq_steps=3),
        "evaluator": EvaluatorConfig(freq_epochs=2, eval_before_train=True),
        "data": {"shuffle": shuffle},
    }

    def train(run: Run, until: int = 99) -> list[tuple[int, int, list[int]]]:
        seen = []
        for batch in run.steps():
            seen.append((run.step, run.progress.seed, [item.tokens[0] for item in batch.items]))
            run.progress.append_to_history(loss=float(run.step))
            run.end_step({})
            if run.step == until:
                break
        return seen

    evaluated: dict[str, list[int]] = {"whole": [], "parts": []}

    def evaluation(name: str, of: list[Run]) -> Any:
        def evaluate() -> dict[str, float]:
            evaluated[name].append(of[-1].step)
            return {"loss": 0.5}

        return evaluate

    whole: list[Run] = []
    whole.append(start(tmp_path / "whole", 3, evaluation("whole", whole), **settings))
    expected = train(whole[0])
    parts: list[Run] = []
    parts.append(start(tmp_path / "parts", 3, evaluation("parts", parts), **settings))
    seen = train(parts[0], until=stop_at)
    state = json.loads(json.dumps(parts[0].state_dict()))  # plain numbers: any format can hold them
    parts[0].close()
    parts.append(start(tmp_path / "parts", 3, evaluation("parts", parts), **settings))
    parts[1].load_state_dict(state)
    seen += train(parts[1])
    assert seen == expected
    assert [step for step, *_ in seen] == list(range(1, 9))
    assert evaluated["parts"] == evaluated["whole"] == [0, 6]
    assert parts[1].progress.history == whole[0].progress.history
    saved = [sorted(p.name for p in (tmp_path / name / "checkpoints").glob("step-*")) for name in ("whole", "parts")]
    assert saved[0] == saved[1] == ["step-000003", "step-000006"]
    for run in (whole[0], parts[1]):
        run.close()


GOOD, BAD = {"loss": 0.1, "grad_norm": 1.0}, {"loss": float("nan"), "grad_norm": 1.0}


def test_skipped_updates_are_told_and_end_the_run(tmp_path, caplog):
    run = start(tmp_path, total_train_epochs=20, actor=ModelConfig(path="model", max_skipped_steps=3))
    steps = run.steps()
    for stats, applied in [(GOOD, True), (BAD, False), (BAD, True), (BAD, False), (BAD, False)]:
        next(steps)
        run.outputs.watch_update(stats, applied)
        run.give_warnings()
    next(steps)
    with pytest.raises(EngineError, match=r"3 steps in a row were not applied.*optimizer\.lr.*max_skipped_steps"):
        run.outputs.watch_update(BAD, False)
    warned = [record.message for record in caplog.records if "the update was skipped" in record.message]
    assert [text.split(":")[0] for text in warned] == ["step 2"], "later ones are counted in train/skipped_steps"
    run.close()


def test_a_run_without_any_update_leaves_no_model(tmp_path):
    run = start(tmp_path, total_train_epochs=1)
    for _ in run.steps():
        run.outputs.watch_update(BAD, False)
        run.end_step(BAD)
    with pytest.raises(EngineError, match="all steps were not applied"):
        run.finish({})
    run.close()
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize(("norm", "why"), [(0.0, "every gradient was 0"), (1.0, r"lr=[\d.e-]+ changes them by less")])
def test_a_model_that_did_not_change_has_a_cause(tmp_path, norm, why):
    run = start(tmp_path, total_train_epochs=1)
    run.outputs._texts = dataclasses.replace(run.outputs._texts, is_untrained=lambda folder: True)
    for _ in run.steps():
        run.outputs.watch_update({**GOOD, "grad_norm": norm}, True)
    assert re.search(why, run.outputs.closing_note(tmp_path))
    run.close()


def test_steps_without_a_token_to_train_on_are_no_skipped_updates(tmp_path):
    run = start(tmp_path, total_train_epochs=1)
    for _ in run.steps():
        run.outputs.watch_update(GOOD, False)
        run.end_step(GOOD)
    run.finish({})
    run.close()
