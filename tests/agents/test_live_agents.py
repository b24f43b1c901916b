"""Agents that live through updates of the weights: what they draw, how old it gets, and how everything ends."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from areno.agents.turns_to_rows import warn_of_temperatures
from areno.api.metrics import Stopwatch
from areno.api.trainer import Trainer
from areno.config.rollout import GenerationConfig
from areno.errors import ArenoError, ConfigError
from areno.run.recovery import Recovery
from areno.run.setup import PolicySetup
from areno.trainers import agent_rollout, agents, partial_rollout, rollout
from areno.types import ScoredSample, TokenRow, TrainSequence
from tests.helpers import policy_runs
from tests.helpers.agent_runs import run
from tests.helpers.policy_runs import Played
from tests.helpers.processes import children
from tests.helpers.resumed import lost_in

ROWS = [{"prompt": f"hello {number}", "solutions": number} for number in range(22)]
WHOLE = ["total_train_steps=null", "total_train_epochs=1", "train_dataset.drop_last=false", "gconfig.n_samples=2"]
AHEAD = ["rollout.max_head_offpolicyness=2", "rollout.prompts_ahead=4", "actor.use_decoupled_loss=true"]
FROZEN = ["actor.optimizer.lr=0", "engine.exact=true"]


def epoch(folder: Path, *more: str, **given: Any) -> Played:
    """A whole epoch of 22 prompts, in five steps of four and one of two."""
    return run(folder, "slow_turns.py", *WHOLE, *more, **{"rows": ROWS, "recipe": "grpo", **given})


def drawn(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter((tuple(np.asarray(row.tokens).tolist()), tuple(np.asarray(row.logprobs).tolist())) for row in rows)


def threads_of_servers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("areno-server", "areno-streams")]


def no_server_runs() -> bool:
    return not threads_of_servers()


@pytest.mark.slow
def test_with_frozen_weights_an_epoch_trains_the_rows_of_a_run_that_waits(tmp_path: Path) -> None:
    waits = epoch(tmp_path / "waits", *FROZEN)
    ahead = epoch(tmp_path / "ahead", *AHEAD, *FROZEN)
    sizes = [[len(played.samples(step)) for step in range(1, 7)] for played in (waits, ahead)]
    assert sizes == [[8] * 5 + [4]] * 2
    assert drawn(chain(*ahead.rows)) == drawn(chain(*waits.rows))
    assert [drawn(rows) for rows in ahead.rows] != [drawn(rows) for rows in waits.rows]  # in another order
    assert 1 <= max(ahead.series("rollout/oldest_gap")) <= 2
    assert max(ahead.series("rollout/parked_samples")) >= 1
    assert ahead.series("rollout/parked_samples")[-1] == 0


@pytest.mark.slow
def test_agents_go_on_under_new_weights_and_their_tokens_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, found = rollout.sample_ahead, list[tuple[int, list[ScoredSample], list[np.ndarray]]]()

    def spy(setup: PolicySetup, *args: Any) -> Any:
        samples, keep, metrics = sample(setup, *args)
        rows = [row for each in samples if each.trajectory for row in each.trajectory.rows]
        scored = setup.trainer.score_logprobs("actor", [row.tokens for row in rows], sampling=setup.config.gconfig)
        version = setup.trainer.engine.weights_version
        differences = [
            np.asarray(logprobs)[row.sampled & (row.versions == version)]
            - row.logprobs[row.sampled & (row.versions == version)]
            for row, logprobs in zip(rows, scored, strict=True)
        ]
        found.append((version, samples, differences))
        return samples, keep, metrics

    monkeypatch.setattr(rollout, "sample_ahead", spy)
    played = epoch(tmp_path / "run", *AHEAD, "engine.exact=true")
    n_mixed = 0
    for (version, samples, differences), rows in zip(found, played.rows, strict=True):
        assert version - 2 <= min(min(each.sequence.resp_versions) for each in samples)
        assert max(row.staleness for row in rows) <= 2
        for each in samples:
            assert each.sequence.resp_versions == sorted(each.sequence.resp_versions)
            n_mixed += len(set(each.sequence.resp_versions)) > 1
        assert not any(each.any() for each in differences)  # the current weights drew them, from current keys
    assert n_mixed > 0
    assert max(played.series("rollout/versions_per_sample")) > 1
    assert max(played.series("rollout/recomputed_tokens")) > 0
    assert max(played.series("rollout/carried_tokens")) > 0
    seen = Counter(each.item.index for _, samples, _ in found for each in samples)
    assert seen == dict.fromkeys(range(22), 2)
    assert no_server_runs()


@pytest.mark.slow
def test_evaluations_have_their_own_settings_and_disturb_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stopping ends the second run, while agents are under way."""
    data = [{"prompt": f"way {number}", "solutions": number} for number in range(1, 4)]
    data_file = tmp_path / "valid.jsonl"
    data_file.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    greedy = [f"valid_dataset.path={data_file}", "valid_dataset.loader=null", "valid_dataset.max_length=50"]
    greedy += ["evaluator.freq_steps=1", "eval_gconfig.n_samples=1", "eval_gconfig.greedy=true"]
    greedy += ["eval_gconfig.max_tokens=1000", "gconfig.max_tokens=600"]
    plain = epoch(tmp_path / "plain", *AHEAD, *FROZEN, "gconfig.max_tokens=600")
    small = [setting for setting in policy_runs.SMALL if setting != "valid_dataset=null"]
    monkeypatch.setattr(policy_runs, "SMALL", small)
    evaluated = epoch(tmp_path / "evaluated", *AHEAD, *FROZEN, *greedy)
    assert drawn(chain(*evaluated.rows)) == drawn(chain(*plain.rows))
    assert evaluated.series("eval/num_sequences") == [3.0] * 7  # one before the first step
    assert len(set(evaluated.series("eval/response_len_mean"))) == 1  # greedy, with frozen weights
    stopped = epoch(tmp_path / "stopped", *AHEAD, *FROZEN, *greedy, "evaluator.patience=2")
    assert len(stopped.rows) == 2
    assert stopped.series("rollout/parked_samples")[-1] >= 1
    assert no_server_runs()


@pytest.mark.slow
def test_a_resumed_run_samples_the_prompts_under_way_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*AHEAD, *FROZEN, "recover.mode=auto", "recover.freq_steps=1"]
    whole = epoch(tmp_path / "whole", *FROZEN)
    sample, n_calls = rollout.sample_ahead, itertools.count(1)

    def interrupted(setup: PolicySetup, *args: Any) -> Any:
        if next(n_calls) == 4:
            assert setup.run.progress.in_flight.groups
            raise ArenoError("the machine stops")
        return sample(setup, *args)

    before = len(children())
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "sample_ahead", interrupted)
        with pytest.raises(ArenoError, match="stops"):
            epoch(tmp_path / "run", *settings)
    assert len(children()) <= before
    assert no_server_runs()
    first = Played(tmp_path / "run")
    n_first = [len(first.samples(step)) for step in range(1, 4)]
    assert n_first == [8, 8, 8]
    rest = epoch(tmp_path / "run", *settings)
    assert len(rest.rows) == 3
    trained = [sample for step in range(1, 7) for sample in rest.samples(step)]
    expected = [sample for step in range(1, 7) for sample in whole.samples(step)]
    assert Counter(sample["completion"] for sample in trained) == Counter(sample["completion"] for sample in expected)
    assert len(trained) == 44


@pytest.mark.slow
def test_a_resumed_run_that_waits_samples_the_prompts_in_progress_and_closes_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["recover.mode=auto", "recover.freq_steps=1"]
    sample, n_calls, is_open = rollout.sample_ahead, itertools.count(1), list[bool]()

    def spy(setup: PolicySetup, *args: Any) -> Any:
        if next(n_calls) == 4:
            raise ArenoError("the machine stops")
        found = sample(setup, *args)
        assert setup.live_agents is not None
        is_open.append(setup.live_agents.is_open)
        return found

    monkeypatch.setattr(rollout, "sample_ahead", spy)
    with pytest.raises(ArenoError, match="stops"):
        epoch(tmp_path / "run", *AHEAD, *settings)
    monkeypatch.setattr(Recovery, "_check_compatible", lambda self, state: None)  # as --resume with changed settings
    rest = epoch(tmp_path / "run", "rollout.drop_rollout_state=true", *settings)
    assert len(rest.rows) == 3
    assert is_open == [True] * 3 + [False] * (len(is_open) - 3)
    assert len(is_open) > 3
    trained = Counter(sample["prompt"] for step in range(1, 7) for sample in rest.samples(step))
    assert set(trained.values()) == {2}
    assert len(trained) == 22


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["engine.world_size=2"], ["engine.world_size=2", "engine.tp_size=2"]])
def test_on_several_devices_too(layout: list[str], tmp_path: Path) -> None:
    waits = epoch(tmp_path / "waits", *FROZEN, *layout)
    ahead = epoch(tmp_path / "ahead", *AHEAD, *FROZEN, *layout)
    assert drawn(chain(*ahead.rows)) == drawn(chain(*waits.rows))
    assert max(ahead.series("rollout/oldest_gap")) >= 1
    assert max(ahead.series("rollout/parked_samples")) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "rollout_stats"])
def test_after_the_loss_of_a_worker_agents_start_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_in(monkeypatch, name, 3)
    settings = ["engine.workers=spawn", "recover.mode=auto", "recover.freq_steps=1", "recover.retries=1"]
    played = epoch(tmp_path / "run", *AHEAD, *settings)
    trained = [sample for step in range(1, 7) for sample in played.samples(step)]
    assert Counter(sample["prompt"] for sample in trained).most_common()[-1][1] == 2
    assert len(trained) == 44
    assert no_server_runs()


@pytest.mark.slow
def test_ctrl_c_ends_agents_and_their_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, n_calls = agent_rollout.sample_live_agents, itertools.count(1)

    def stopped(setup: PolicySetup, *args: Any) -> Any:
        if next(n_calls) == 3:
            assert len(threads_of_servers()) >= 1
            os.kill(os.getpid(), signal.SIGINT)
        return sample(setup, *args)

    monkeypatch.setattr(partial_rollout, "sample_live_agents", stopped)
    before = len(children())
    with pytest.raises(KeyboardInterrupt):
        epoch(tmp_path / "run", *AHEAD, "recover.mode=auto")
    assert len(children()) <= before
    assert no_server_runs()
    rest = epoch(tmp_path / "run", *AHEAD, "recover.mode=auto")
    assert sum(len(rest.samples(step)) for step in range(1, 7)) == 44


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["rollout.prompts_ahead=2"], "rollout.prompts_ahead", "cannot be taken back"),
        ([*AHEAD, "rollout.drop_rollout_state=true"], "rollout.drop_rollout_state", "the KV cache stays"),
    ],
)
def test_settings_that_do_not_fit_agents(settings: list[str], key: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        epoch(tmp_path / "run", *settings)
    assert key in str(caught.value)
    assert words in str(caught.value)


def token_row(temperature: float) -> TokenRow:
    """A prompt's token, one that version 1 sampled, one of a tool, and one that version 2 sampled."""
    return TokenRow(
        tokens=[5, 6, 7, 8],
        sources=np.zeros(4, dtype=np.uint8),
        sampled=np.array([False, True, False, True]),
        trained=np.array([False, True, True, True]),
        logprobs=np.array([0.0, -0.5, 0.0, -0.7]),
        versions=np.array([0, 1, 0, 2]),
        temperature=temperature,
        turns=np.array([0, 0, 1, 1]),
    )


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.0, -0.5, -9.0, -0.7]), (0.5, [0.0, -9.0, -9.0, -9.0])])
def test_tokens_of_older_weights_keep_their_log_probabilities(temperature: float, expected: list[float]) -> None:
    trainer = SimpleNamespace(
        clock=Stopwatch(), score_logprobs=lambda role, rows, sampling: [np.full(len(row), -9.0) for row in rows]
    )
    row = token_row(temperature)
    rows = [TrainSequence(prompt_mask=~row.trained, tokens=row.tokens, logprobs=row.logprobs)]
    scored = agents.score_missing_logprobs(cast(Trainer, trainer), [row], rows, GenerationConfig(temperature=1.0))
    assert scored == [row]
    assert np.asarray(rows[0].logprobs).tolist() == expected


def test_a_warning_says_when_other_temperatures_hide_updates(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "areno"):
        warn_of_temperatures([token_row(0.5)], GenerationConfig(temperature=1.0), waits=False)
        warn_of_temperatures([token_row(0.5)], GenerationConfig(temperature=1.0))
    assert ["do not count" in record.getMessage() for record in caplog.records] == [True, False]
