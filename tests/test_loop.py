"""The bookkeeping around a loop."""

from __future__ import annotations

import logging

import pytest

from areno.api.loop import Run
from areno.config.experiments import SFTConfig
from areno.config.model_roles import ModelConfig
from areno.config.run import DatasetConfig


class Loader:
    """Batches of one row, two in an epoch."""

    def batches(self):
        yield from ([0], [1])


def run(folder, **settings) -> Run:
    data, actor = DatasetConfig(path="rows.jsonl"), ModelConfig(path="model")
    return Run(SFTConfig(experiment_name="e", actor=actor, train_dataset=data, **settings), folder)


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
    bookkeeping = run(tmp_path, **settings)
    assert [step for step, _ in bookkeeping.steps(Loader())] == list(range(1, n_steps + 1))
    bookkeeping.close()


@pytest.mark.parametrize(("saved", "kept"), [(None, "no checkpoint was saved"), (1, "that of step 1")])
def test_a_run_that_stops_early_says_what_is_left(saved, kept, tmp_path):
    bookkeeping = run(tmp_path)
    for step, _ in bookkeeping.steps(Loader()):
        if step == 2:
            break
        if saved:
            bookkeeping.save_at_end(lambda folder: (folder / "x").write_text("x"))
    bookkeeping.close()
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "warning: stopped in step 2" in log
    assert kept in log
    logging.getLogger("areno").handlers.clear()


def test_a_run_that_ends_says_so_once(tmp_path):
    bookkeeping = run(tmp_path, total_train_epochs=1)
    list(bookkeeping.steps(Loader()))
    bookkeeping.log_end(loss=(2.0, 1.0))
    bookkeeping.close()
    log = (tmp_path / "logs" / "run.log").read_text()
    assert "done: 2 steps" in log
    assert "loss 2.000 -> 1.000" in log
    assert "stopped" not in log
