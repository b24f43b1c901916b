"""Several validation sets: their settings, their rows, what is measured of each and which files there are of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import areno
from areno.config.datasets import DatasetConfig, ValidDatasetConfig, ValidSetConfig
from areno.config.models import MicroBatchSpec
from areno.config.run import EvaluatorConfig
from areno.data.sources import open_rows
from areno.errors import ArenoError, ConfigError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.recipes.sft import SFTConfig
from areno.tracking.reader import RunReader
from areno.tracking.samples import EvalSampleFiles
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample
from tests.helpers.row_runs import DEMONSTRATIONS, PAIRS, dpo_config, scalars, sft_config

# Settings ------------------------------------------------------------------------------------------------------------


def test_a_set_takes_what_it_leaves_out_from_the_section(tmp_path):
    overrides = ["valid_dataset.sets={easy: {}, hard: {split: hard, max_rows: 3}}", "valid_dataset.batch_size=7"]
    config = load(GSPOConfig, "quickstart", [*overrides, "valid_dataset.sets.hard.batch_size=2"])
    assert config.valid_dataset is not None
    sets = config.valid_dataset.by_name()
    assert list(sets) == ["easy", "hard"]
    loader = "examples/quickstart/dataset_loader.py"
    for name, split, batch_size, max_rows in (("easy", "test", 7, None), ("hard", "hard", 2, 3)):
        found = sets[name]
        values = (found.loader, found.split, found.batch_size, found.max_rows, found.max_length)
        assert values == (loader, split, batch_size, max_rows, 64)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart, _self_]\nvalid_dataset: {sets: {a: {max_rows: 1}, b: {shuffle: true}}}\n"
    )
    config = load(GSPOConfig, "mine", ["valid_dataset.sets.a.max_rows=5", "~valid_dataset.sets.b"], tmp_path)
    assert {name: of.max_rows for name, of in config.valid_dataset.by_name().items()} == {"a": 5}
    assert list(load(GSPOConfig, "quickstart").valid_dataset.by_name()) == [""]
    columns = ["valid_dataset.columns.prompt=question", "valid_dataset.sets={a: {}, b: {columns: {solutions: answer}}}"]
    config = load(GSPOConfig, "quickstart", [*columns, "valid_dataset.loader=null", "valid_dataset.path=x.jsonl"])
    found = {name: (of.columns.prompt, of.columns.solutions) for name, of in config.valid_dataset.by_name().items()}
    assert found == {"a": ("question", None), "b": ("question", "answer")}


def test_the_resolved_configuration_of_a_run_makes_the_same_sets(tmp_path):
    from dataclasses import asdict

    from areno.schema.build import build

    config = load(GSPOConfig, "quickstart", ["valid_dataset.sets={a: {max_rows: 3}, b: {split: train}}"])
    assert build(GSPOConfig, json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        # A wrong value of the section is told once, and not again for each set that takes it.
        (
            ["valid_dataset.batch_size=0", "valid_dataset.sets={a: {}, b: {batch_size: -1}, c: {batch_sise: 3}}"],
            {
                "valid_dataset.batch_size": "is 0; it must be more than 0",
                "valid_dataset.sets.b.batch_size": "is -1; it must be more than 0",
                "valid_dataset.sets.c.batch_sise": "unknown key; did you mean valid_dataset.sets.c.batch_size?",
            },
        ),
        (
            ["valid_dataset.columns.promt=x", "valid_dataset.sets={a: {}, b: {columns: {prompt: [1]}}}"],
            {
                "valid_dataset.columns.promt": "unknown key; did you mean valid_dataset.columns.prompt?",
                "valid_dataset.sets.b.columns.prompt": "is [1]; text is expected",
            },
        ),
        (
            ["valid_dataset.columns.prompt=x", "valid_dataset.sets={a: {}, b: {batch_size: 3}}"],
            {"valid_dataset.columns.prompt": "is x, but valid_dataset.loader is examples/quickstart/dataset_loader.py"},
        ),
        (
            ["valid_dataset.sets={a: null, b: 3}"],
            {"valid_dataset.sets.a": "is null; a section is expected", "valid_dataset.sets.b": "is 3; a section"},
        ),
        (["valid_dataset.sets={}"], {"valid_dataset.sets": "is empty; at least one is expected"}),
        (["valid_dataset.sets=[a, b]"], {"valid_dataset.sets": "is ['a', 'b']; a mapping of names is expected"}),
        (["valid_dataset.sets={a/b: {}}"], {"valid_dataset.sets": "has the name 'a/b'; a letter and then letters"}),
        (
            ["valid_dataset.loader=null", "valid_dataset.sets={a: {path: x.jsonl}, b: {}}"],
            {"valid_dataset.sets.b.path": "missing ("},
        ),
        (["evaluator.metric=accuracy"], {"evaluator.metric": "is accuracy, but evaluator.patience is null"}),
        (["evaluator.patience=2"], {"evaluator.patience": "is 2, but nothing is evaluated during training"}),
        (
            ["evaluator.patience=2", "evaluator.freq_steps=1", "evaluator.metric=pass@4"],
            {"evaluator.metric": "is pass@4, which is not measured; there are rewards_mean, accuracy,"},
        ),
        (
            [
                "evaluator.patience=2",
                "evaluator.freq_steps=1",
                "evaluator.metric=b/accuracy",
                "valid_dataset.sets={a: {}}",
            ],
            {"evaluator.metric": "is b/accuracy, which is not measured; did you mean a/accuracy"},
        ),
    ],
)
def test_what_is_wrong_with_sets_or_with_early_stopping(overrides, problems):
    with pytest.raises(ConfigError) as caught:
        load(GSPOConfig, "quickstart", overrides, sources=True)
    found = {problem.key: problem.message for problem in caught.value.problems}
    assert found.keys() == problems.keys()
    assert all(found[key].startswith(text) for key, text in problems.items()), found


def test_early_stopping_by_a_metric_of_a_set():
    patience = ["evaluator.patience=2", "evaluator.freq_steps=1"]
    sampled = ["eval_gconfig.greedy=false", "eval_gconfig.n_samples=4", "evaluator.metric=a/pass@4"]
    config = load(GSPOConfig, "quickstart", [*patience, *sampled, "valid_dataset.sets={a: {}}"])
    assert config.evaluator.metric == "a/pass@4"


@pytest.mark.parametrize(("max_rows", "n"), [(None, 10), (3, 3), (99, 10)])
def test_a_limit_of_rows_takes_the_first(max_rows, n):
    rows, _ = open_rows(ValidSetConfig(max_rows=max_rows), DEMONSTRATIONS, "sft", "valid_dataset")
    assert list(rows) == DEMONSTRATIONS[:n]


# Rows of a script ----------------------------------------------------------------------------------------------------


def test_rows_of_a_script_need_no_arguments_of_the_loader_that_they_replace() -> None:
    section = DatasetConfig(loader="rows.py", dataset_kwargs={"count": 3})
    rows, config = open_rows(section, [{"prompt": "a"}], "prompt", "train_dataset")
    assert len(rows) == 1
    assert (config.loader, config.dataset_kwargs) == (None, None)


def test_loss_of_each_set_and_the_mean(tmp_path):
    """Each is what a run with this set alone measures."""
    sets = {"short": DEMONSTRATIONS[:3], "long": DEMONSTRATIONS[3:]}

    def measured(name: str, valid: Any) -> dict[str, float]:
        config = sft_config(tmp_path, MicroBatchSpec(), total_train_steps=1)
        with areno.SFTTrainer(config, tmp_path / name, train_dataset=DEMONSTRATIONS, valid_dataset=valid) as trainer:
            return trainer.evaluate()

    alone = {name: measured(name, rows)["loss"] for name, rows in sets.items()}
    found = measured("both", sets)
    assert found == pytest.approx(
        {"loss": (alone["short"] + alone["long"]) / 2, "short/loss": alone["short"], "long/loss": alone["long"]}
    )
    assert alone["short"] != pytest.approx(alone["long"], rel=0.01)


@pytest.mark.slow
def test_preferences_of_each_set(tmp_path):
    """The reference of each set is its own, although rows of the sets have the same numbers."""
    sets = {"a": PAIRS[:4], "b": PAIRS[4:9]}
    config = dpo_config(tmp_path, total_train_steps=2, evaluator=EvaluatorConfig(eval_before_train=True))
    with areno.DPOTrainer(config, tmp_path / "both", train_dataset=PAIRS, valid_dataset=sets) as trainer:
        trainer.fit()
    found = scalars(tmp_path / "both")
    assert found["eval/a/margin"][0] == found["eval/b/margin"][0] == 0.0
    assert found["eval/a/accuracy"][0] == found["eval/b/accuracy"][0] == 0.5
    for name, pairs in sets.items():
        config = dpo_config(tmp_path, total_train_steps=2)
        with areno.DPOTrainer(config, tmp_path / name, train_dataset=PAIRS, valid_dataset=pairs) as trainer:
            trainer.fit()
        alone = scalars(tmp_path / name)
        for metric in ("loss", "accuracy", "margin", "ranking_accuracy"):
            assert found[f"eval/{name}/{metric}"][-1] == pytest.approx(alone[f"eval/{metric}"][-1], abs=1e-6)
    assert found["eval/margin"][-1] == pytest.approx((found["eval/a/margin"][-1] + found["eval/b/margin"][-1]) / 2)


@pytest.mark.parametrize(
    ("configured", "given", "message"),
    [
        (None, {}, "valid_dataset: is empty; at least one is expected"),
        (None, {"a/b": DEMONSTRATIONS}, "valid_dataset: has the name 'a/b'; a letter"),
        (None, {"a": [{"prompt": "x"}]}, r"valid_dataset.sets.a row 0: .*response"),
        ({"a": {}}, DEMONSTRATIONS, "valid_dataset.sets: has the sets a; give the trainer a mapping of these names"),
        ({"a": {}}, {"b": DEMONSTRATIONS}, "valid_dataset.sets: has the sets a; give"),
    ],
)
def test_rows_that_do_not_fit_the_sets(tmp_path, configured, given, message):
    sets = configured and {name: ValidSetConfig(max_length=64) for name in configured}
    valid = configured and ValidDatasetConfig(sets=sets)
    config = sft_config(tmp_path, MicroBatchSpec(), total_train_steps=1, valid_dataset=valid)
    with pytest.raises(ArenoError, match=message):
        areno.SFTTrainer(config, tmp_path / "run", train_dataset=DEMONSTRATIONS, valid_dataset=given)


def test_a_missing_file_of_each_set_is_reported_at_once():
    sets = {name: ValidSetConfig(path=f"{name}.jsonl") for name in ("a", "b")}
    data = {
        "train_dataset": DatasetConfig(path="rows.jsonl", max_length=64),
        "valid_dataset": ValidDatasetConfig(sets=sets),
    }
    config = load(SFTConfig, "quickstart_base", ["actor.init_from_scratch=false"])
    vars(config).update(data)
    with pytest.raises(ArenoError) as caught:
        areno.SFTTrainer(config)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["train_dataset.path", "valid_dataset.sets.a.path", "valid_dataset.sets.b.path"]


# A run of a policy ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    """Two evaluations of four samples for each prompt of two sets."""
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = [
        "total_train_steps=1",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=8",
        "eval_gconfig.greedy=false",
        "eval_gconfig.n_samples=4",
        "eval_gconfig.max_new_tokens=3",
        "valid_dataset.sets={a: {max_rows: 9, batch_size: 2}, b: {split: train, max_rows: 5}}",
        "reward.workers=1",
        "engine.device=cpu",
    ]
    config = load(GSPOConfig, "quickstart", overrides)
    with areno.PolicyOnlyTrainer(config, run_dir=folder) as trainer:
        trainer.fit()
    return RunReader(folder)


def test_every_answer_of_an_evaluation_is_kept(evaluated):
    assert evaluated.evaluated_steps() == [0, 1]
    for name, n_rows in {"a": 9, "b": 5}.items():
        lines = evaluated.eval_samples(1, name)
        assert [(line["row"], line["sample"]) for line in lines] == list(itertools.product(range(n_rows), range(4)))
        for line in lines:
            assert (line["step"], line["set"], line["status"]) == (1, name, "ok")
            assert line["reward"] == float(line["completion"].strip() == line["solutions"])
            assert (line["finish_reason"] == "length") == (
                line["response_tokens"] == 3 and len(line["completion"]) == 3
            )
    assert evaluated.eval_samples(1) == evaluated.eval_samples(1, "a") + evaluated.eval_samples(1, "b")
    with pytest.raises(ArenoError, match="has no evaluation of step 1 on c"):
        evaluated.eval_samples(1, "c")
    with pytest.raises(ArenoError, match="has no evaluation of step 7"):
        evaluated.eval_samples(7)


def test_the_metrics_are_those_of_the_answers(evaluated):
    """Counted from the files: pass@k as the share of subsets of k samples with one that is right."""
    of_sets = {}
    for name in "ab":
        lines = evaluated.eval_samples(1, name)
        rewards = np.array([line["reward"] for line in lines]).reshape(-1, 4)
        lengths = [line["response_tokens"] for line in lines]
        subsets = {k: list(itertools.combinations(range(4), k)) for k in (1, 2, 4)}
        of_sets[name] = {
            "rewards_mean": rewards.mean(),
            "accuracy": rewards.mean(),
            "response_len_mean": np.mean(lengths),
            "truncated": np.mean([line["finish_reason"] == "length" for line in lines]),
            "num_sequences": len(lines),
            **{f"pass@{k}": np.mean([rewards[:, s].max(1) for s in sets]) for k, sets in subsets.items()},
            "avg@4": rewards.mean(),
        }
    assert 0 < of_sets["a"]["pass@1"] < of_sets["a"]["pass@4"]
    recorded = {name: value for name, value in evaluated.steps()[1].items() if name.startswith("eval/")}
    expected = {f"eval/{name}/{metric}": value for name, found in of_sets.items() for metric, value in found.items()}
    for metric, value in of_sets["a"].items():
        both = value + of_sets["b"][metric]
        expected[f"eval/{metric}"] = both if metric == "num_sequences" else both / 2
    assert recorded == pytest.approx(expected)


def test_files_of_a_single_set(tmp_path):
    item = PromptItem(prompt="1+1=", text="1+1=", tokens=[1, 2], solutions="2", index=4)
    outcomes = [RewardOutcome(1.5, parts={"fn": 1.0, "model": 0.5}), RewardOutcome(None, "timeout", "slow")]
    samples = [
        ScoredSample(
            item=item,
            sequence=RolloutSequence(resp_tokens=[3], resp_logprobs=[-1.0]),
            completion="2",
            outcome=outcome,
            group=7,
        )
        for outcome in outcomes
    ]
    EvalSampleFiles(tmp_path / "eval", str).eval_samples(12, samples, "")
    [file] = (path for path in Path(tmp_path).rglob("*") if path.is_file())
    assert file == tmp_path / "eval/000012.jsonl"
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["step"], first["set"], first["row"], first["sample"]) == (12, None, 4, 0)
    assert (first["reward"], first["parts"]) == (1.5, {"fn": 1.0, "model": 0.5})
    assert (second["sample"], second["reward"], second["status"], second["message"]) == (1, None, "timeout", "slow")
    assert "parts" not in second
