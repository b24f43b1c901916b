"""Runs on labelled answers, ranked answers and pairs of samples that were stopped go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areno.api.algorithms import get_algorithm
from areno.config.run import ClusterConfig, RecoverConfig
from areno.launch.compose import load
from tests import kill_runs
from tests.helpers.resumed import killed_after


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["kto", "rw", "prm", "online_dpo"])
def test_runs_on_labelled_ranked_and_paired_answers_go_on(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows(recipe, tmp_path)
    algorithm = get_algorithm(recipe)

    def trainer(where):
        config = load(algorithm.config, f"quickstart_{recipe}", kill_runs.arguments(recipe)[1:])
        config = replace(
            config, cluster=ClusterConfig(fileroot=str(tmp_path / where)), recover=RecoverConfig(freq_steps=1)
        )
        return algorithm.trainer(config)

    with trainer("whole") as whole_run:
        expected = whole_run.fit()
    with killed_after(4), trainer("killed") as first:
        first.fit()
    with trainer("killed") as second:
        assert second.fit() == expected
    assert second.run.folder == first.run.folder
    assert kill_runs.differences(kill_runs.left_by(whole_run.run.folder), kill_runs.left_by(second.run.folder)) == []
