"""pass@k against counting, what evaluations measure, when a run ends early, and that a resumed one ends there too."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.api.metrics import evaluation_metrics, pass_at_k
from areno.config.datasets import DatasetConfig, ValidDatasetConfig
from areno.config.experiments import PreferenceExperimentConfig, metric_problems
from areno.config.judge import JudgeConfig
from areno.config.models import ModelConfig, PolicyConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig
from areno.config.run import EvaluatorConfig, SaverConfig
from areno.errors import ConfigError
from areno.recipes.sft import SFTConfig
from areno.run.evaluator import Evaluator, mean_over_sets
from areno.run.run import Run
from tests.helpers.samples import sample
from tests.helpers.started_runs import loader, start

# pass@k --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (1, 2, 5, 8) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_sample_that_passed(n, k):
    for c in range(n + 1):
        passed = [True] * c + [False] * (n - c)
        counted = np.mean([any(chosen) for chosen in itertools.combinations(passed, k)])
        assert pass_at_k(n, c, k) == pytest.approx(counted, abs=1e-12)


def test_pass_at_k_of_many_samples_is_that_of_the_paper():
    """The numerically stable form of arXiv 2107.03374, figure 3."""
    n, c = 200, 7
    for k in (1, 10, 100, 193, 194, 200):
        stable = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(stable, abs=1e-12)


def grouped(*rewards_of_groups: list[float | None]) -> list[Any]:
    samples = []
    for group, rewards in enumerate(rewards_of_groups):
        for reward in rewards:
            one = sample(2, [-1.0] * 3, reward, "ok" if reward is not None else "error")
            one.group = group
            samples.append(one)
    return samples


def test_metrics_of_several_samples():
    samples = grouped([1.0, 0.0, 0.5, 0.0], [0.0] * 4, [1.0, 1.0, None, 0.0], [None, None, None, 1.0])
    found = evaluation_metrics(samples, 4)
    assert found == pytest.approx(
        {
            "rewards_mean": (1.5 + 0 + 2 + 1) / 12,
            "accuracy": 4 / 12,
            "response_len_mean": 3.0,
            "truncated": 0.0,
            "num_sequences": 16,
            "pass@1": (1 / 4 + 0 + 2 / 3 + 1) / 4,
            "pass@2": (1 / 2 + 0 + 1) / 3,  # the last prompt has only one sample with a reward
            "pass@4": (1 + 0) / 2,
            "avg@4": (1 / 4 + 0 + 2 / 3 + 1) / 4,
        }
    )


def test_a_reward_above_one_means_that_one_is_no_right_answer():
    found = evaluation_metrics(grouped([1.0, 1.5], [0.0, 1.0]), 2)
    assert found.keys() == {"rewards_mean", "response_len_mean", "truncated", "num_sequences"}
    assert "accuracy" in evaluation_metrics(grouped([1.0, 1.0 + 1e-7]), 1)


def test_the_score_of_a_model_is_no_right_answer():
    parts = {"experiment_name": "e", "actor": PolicyConfig(path="m"), "train_dataset": DatasetConfig(path="rows.jsonl")}
    several = GenerationConfig(n_samples=4)
    judge = JudgeConfig(base_url="http://localhost/v1", model="judge")
    for reward in (RewardConfig(path="folder"), RewardConfig(fn="math", judge=judge)):
        config = PolicyExperimentConfig(**parts, eval_gconfig=several, reward=reward)
        assert config.eval_metrics() == ("rewards_mean", "response_len_mean", "truncated", "num_sequences")
        config.valid_dataset = ValidDatasetConfig(path="rows.jsonl")
        assert config.objective() == ("eval/rewards_mean of the last evaluation", "max")
        config.evaluator.metric, config.saver.best_metric = "accuracy", "eval/pass@4"
        assert [problem.key for problem in metric_problems(config, [""])] == ["evaluator.metric", "saver.best_metric"]


@pytest.mark.parametrize(("n_samples", "sizes"), [(1, []), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_what_is_measured_is_what_the_configuration_names(n_samples, sizes):
    config = PolicyExperimentConfig(
        experiment_name="e",
        actor=PolicyConfig(path="model"),
        train_dataset=DatasetConfig(path="rows.jsonl"),
        eval_gconfig=GenerationConfig(n_samples=n_samples),
    )
    found = evaluation_metrics(grouped([1.0] * n_samples, [0.0] * n_samples), n_samples)
    assert tuple(found) == config.eval_metrics()
    assert [name for name in found if "pass@" in name] == [f"pass@{k}" for k in sizes]


def test_the_mean_over_sets_gives_each_the_same_weight():
    found = mean_over_sets(
        {"a": {"loss": 1.0, "num_sequences": 10}, "b": {"loss": 3.0, "num_sequences": 1, "pass@2": 0.5}}
    )
    assert found == {
        "loss": 2.0,
        "num_sequences": 11,
        "pass@2": 0.5,
        "a/loss": 1.0,
        "a/num_sequences": 10,
        "b/loss": 3.0,
        "b/num_sequences": 1,
        "b/pass@2": 0.5,
    }


# Early stopping ------------------------------------------------------------------------------------------------------


def evaluator(
    values: list[float], config_class: Any = PreferenceExperimentConfig, name: str = "", **settings: Any
) -> Evaluator:
    """Whose metrics all have these values, one after another."""
    config = config_class(
        experiment_name="e",
        actor=ModelConfig(path="model"),
        train_dataset=DatasetConfig(path="rows.jsonl"),
        evaluator=EvaluatorConfig(freq_steps=1, **settings),
    )
    left = iter(values)

    def measure(name: str, of_set: Any) -> dict[str, float]:
        return dict.fromkeys(config.eval_metrics(), next(left))

    return Evaluator(config, {name: loader()}, measure)


@pytest.mark.parametrize(
    ("values", "settings", "ends_at"),
    [
        ([3, 2, 1, 1, 1], {"patience": 2}, 5),  # less of a loss is better
        ([3, 2, 2, 1, 1], {"patience": 2}, None),
        ([1, 2, 3, 4], {"patience": 1}, 2),
        ([1, 2, 3, 3], {"patience": 1, "metric": "accuracy"}, 4),
        ([3, 2, 1, 0], {"patience": 3, "metric": "accuracy"}, 4),
        ([3, 2, 1, 0], {"patience": 3, "metric": "accuracy", "mode": "min"}, None),
        ([1, 2, 3], {"patience": 2, "mode": "max"}, None),
        # Steps too small to count, which together are not: they are measured from the best.
        ([1.0, 0.95, 0.89, 0.85, 0.78], {"patience": 2, "min_delta": 0.1}, None),
        ([1.0, 0.95, 0.91, 0.5], {"patience": 2, "min_delta": 0.1}, 3),
        ([math.nan, math.nan, 1], {"patience": 2}, 2),
        ([1, math.nan, 0.5, math.nan], {"patience": 2}, None),
        ([3, 3, 3, 3], {}, None),
    ],
)
def test_a_run_is_exhausted_after_so_many_evaluations_without_an_improvement(values, settings, ends_at):
    of_run = evaluator(values, **settings)
    exhausted = []
    for step in range(1, len(values) + 1):
        of_run.evaluate(step)
        exhausted.append(of_run.should_stop_early)
    assert (exhausted.index(True) + 1 if True in exhausted else None) == ends_at


def test_the_metric_of_one_of_several_sets():
    of_run = evaluator([1.0, 2.0], name="hard", patience=1, metric="hard/loss")
    assert of_run.evaluate(1)["hard/loss"] == 1.0
    of_run.evaluate(2)
    assert of_run.should_stop_early
    assert of_run.describe_early_stop() == "eval/hard/loss has not improved in 1 evaluations (best 1, step 1)"


def test_a_metric_that_is_not_measured():
    with pytest.raises(ConfigError, match=r"evaluator.metric: is easy/loss, which is not measured; did you mean"):
        evaluator([], name="hard", patience=1, metric="easy/loss")
    with pytest.raises(ConfigError, match=r"evaluator.metric: is pass@8, which is not measured; there are loss"):
        evaluator([], SFTConfig, patience=1, metric="pass@8")


SETTINGS: dict[str, Any] = {
    "total_train_epochs": 4,
    "evaluator": EvaluatorConfig(freq_steps=2, eval_before_train=True, patience=2),
    "saver": SaverConfig(freq_steps=None),
}


def run_with(folder: Path, values: dict[int, float], of: list[Run], n_rows: int = 5, **settings: Any) -> Run:
    of.append(start(folder, n_rows, lambda: {"loss": values[of[-1].step]}, **{**SETTINGS, **settings}))
    return of[-1]


VALUES = {0: 3.0, 2: 2.0, 4: 2.5, 6: 2.0, 8: 1.0}


def train(run: Run, until: int = 99) -> None:
    for _ in run.steps():
        run.end_step({})
        if run.step == until:
            return
    run.finish({"eval_loss": 1})


def test_a_run_that_stops_early_says_so_and_saves(tmp_path):
    run = run_with(tmp_path, VALUES, [])
    train(run)
    run.close()
    assert run.step == 6
    assert run.progress.history["eval_loss"] == [3.0, 2.0, 2.5, 2.0]
    log = (tmp_path / "logs/run.log").read_text()
    described = "eval/loss has not improved in 2 evaluations (best 2, step 2)"
    assert f"early stopping: {described}; see evaluator.patience" in log
    assert f"done: 6 steps in 0 s; eval_loss 3.000 -> 2.000, stopped early: {described}; files in" in log
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-000006"]


def test_a_run_that_comes_to_its_end_has_not_stopped_early(tmp_path):
    run = run_with(tmp_path, VALUES, [], total_train_steps=6)
    train(run)
    run.close()
    assert run.evaluator.should_stop_early
    assert "early" not in (tmp_path / "logs/run.log").read_text()


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6])
def test_a_resumed_run_stops_where_the_whole_one_did(tmp_path, stop_at):
    of: list[Run] = []
    before = run_with(tmp_path, VALUES, of)
    train(before, until=stop_at)
    state = json.loads(json.dumps(before.state_dict()))
    before.close()
    after = run_with(tmp_path, VALUES, of)
    after.load_state_dict(state)
    train(after)
    after.close()
    assert after.step == 6
    assert after.progress.history["eval_loss"] == [3.0, 2.0, 2.5, 2.0]
    assert "stopped early" in (tmp_path / "logs/run.log").read_text()


def test_more_patience_lets_a_run_go_on(tmp_path):
    of: list[Run] = []
    before = run_with(tmp_path, VALUES, of)
    train(before)
    state = before.state_dict()
    before.close()
    patient = EvaluatorConfig(freq_steps=2, patience=3)
    after = run_with(tmp_path, {**VALUES, 10: 1.0, 12: 1.0, 14: 1.0}, of, evaluator=patient)
    after.load_state_dict(state)
    train(after)
    after.close()
    assert after.step == 14
    assert after.progress.history["eval_loss"][-5:] == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_the_order_of_a_shuffled_set_goes_on_with_a_resumed_run():
    config = SFTConfig(
        experiment_name="e", actor=ModelConfig(path="model"), train_dataset=DatasetConfig(path="rows.jsonl")
    )
    orders: list[list[int]] = []

    def measure(name: str, of_set: Any) -> dict[str, float]:
        orders.append([batch.items[0].tokens[0] for batch in of_set.batches()])
        return {"loss": 1.0}

    def make() -> Evaluator:
        return Evaluator(config, {"": loader(6, shuffle=True)}, measure)

    whole = make()
    for step in range(4):
        whole.evaluate(step)
    first, second = make(), make()
    first.evaluate(0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(1, 4):
        second.evaluate(step)
    assert orders[:4] == orders[4:]
    assert len({tuple(order) for order in orders}) > 1
