"""`areno evaluate`: what it measures, where the settings come from, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.launch.command import run
from areno.tracking.reader import RunReader
from tests.helpers.policy_runs import classifier

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples/quickstart/model")
SHORT = [
    "total_train_steps=1",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=2",
    "engine.device=cpu",
    "trial_name=t",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in outputs/quickstart/t, and rows.jsonl."""
    folder = tmp_path_factory.mktemp("evaluate")
    fileroot = f"cluster.fileroot={folder / 'outputs'}"
    words = ["--config-name=quickstart", *SHORT, "valid_dataset.max_rows=30", fileroot]
    assert run(get_algorithm("gspo"), "areno", words) == 0
    rows = [{"prompt": f"{a}+9=", "solutions": str(a + 9)} for a in range(10, 14)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["evaluate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_is_measured_as_it_measures_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_run = RunReader("outputs/quickstart/t")
    found = evaluated(capsys, "outputs/quickstart/t")
    expected = {name: values.values[-1] for name, values in of_run.metrics().items() if name.startswith("eval/")}
    assert {f"eval/{name}": value for name, value in found.items() if name not in ("model", "answers")} == expected
    again = RunReader(Path(found["answers"]).parent)
    assert again.path == folder / "outputs/quickstart/t/evaluations/step-000001"
    answers = [[line["completion"] for line in reader.eval_samples(1)] for reader in (of_run, again)]
    assert answers[0] == answers[1]
    assert not (again.path / "checkpoints").exists()
    assert main(["evaluate", "outputs/quickstart/t", "-o", str(again.path)]) == 2, "it is not overwritten"


@pytest.mark.slow
def test_other_rows_several_answers_and_the_settings_of_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", "rows.jsonl", "--n-samples", "4", "--temperature", "0.5", "--device", "cpu"]
    found = evaluated(capsys, "outputs/quickstart/t/checkpoints/latest", *options)
    assert found["num_sequences"] == 16
    assert {"pass@1", "pass@2", "pass@4", "avg@4"} <= found.keys()
    start = evaluated(capsys, MODEL, "--run", "outputs/quickstart/t", "--max-rows", "5", "seed=2")
    assert start["num_sequences"] == 5
    assert (RunReader(Path(start["answers"]).parent).config["actor"]["path"]) == MODEL


@pytest.mark.slow
def test_a_model_of_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", "rows.jsonl", "--reward", "exact_match", "--max-new-tokens", "4", "--device", "cpu"]
    assert main(["evaluate", MODEL, *options]) == 0
    out = capsys.readouterr().out
    assert "outputs/evaluations/model/eval/000000.jsonl" in out
    lines = (folder / "outputs/evaluations/model/eval/000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["solutions"] for line in lines] == ["19", "20", "21", "22"]


@pytest.mark.slow
def test_a_run_that_evaluates_as_it_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-name=quickstart", *SHORT, "valid_dataset=null", f"cluster.fileroot={folder / 'outputs'}"]
    words += ["eval_gconfig=null", "experiment_name=same", "gconfig.max_new_tokens=3", "gconfig.ignore_eos=true"]
    assert run(get_algorithm("gspo"), "areno", words) == 0
    options = ["--data", "rows.jsonl", "--n-samples", "3", "gconfig.stop=[x]"]
    found = evaluated(capsys, "outputs/same/t", *options)
    assert (found["num_sequences"], found["response_len_mean"]) == (12, 3)
    sampling = RunReader(Path(found["answers"]).parent).config["eval_gconfig"]
    assert (sampling["greedy"], sampling["stop"]) == (False, ["x"])


@pytest.mark.slow
def test_the_reward_that_is_named_replaces_the_reward_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose scores are no right answers, so that they have no accuracy."""
    words = ["--config-name=quickstart", *SHORT, "valid_dataset.max_rows=8", f"cluster.fileroot={folder / 'outputs'}"]
    words += ["experiment_name=scored", f"reward.path={classifier(folder / 'scores')}", "eval_gconfig.greedy=false"]
    words += ["eval_gconfig.n_samples=2", "reward.fn=[math,exact_match]", "reward.weights=[0.5,0.25]"]
    assert run(get_algorithm("gspo"), "areno", words) == 0
    names = {"rewards_mean", "response_len_mean", "truncated", "num_sequences"}
    parts = {"reward/math", "reward/exact_match", "reward/model"}
    recorded = RunReader("outputs/scored/t").metrics().keys()
    assert {name.removeprefix("eval/") for name in recorded if name.startswith("eval/")} == names | parts
    assert "rollout/accuracy" not in recorded
    assert evaluated(capsys, "outputs/scored/t").keys() == names | parts | {"model", "answers"}
    found = evaluated(capsys, "outputs/scored/t", "--reward", "exact_match")
    answers = RunReader(Path(found["answers"]).parent).eval_samples(1)
    right = sum(answer["completion"].strip() == answer["solutions"] for answer in answers) / len(answers)
    assert (found["accuracy"], found["rewards_mean"], found["avg@2"]) == (right, right, right)
    both = evaluated(capsys, "outputs/scored/t", "--reward", "exact_match", f"reward.path={folder / 'scores'}")
    assert "accuracy" not in both


@pytest.mark.slow
def test_accuracy_ends_with_the_first_reward_above_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rising.py").write_text("def reward_fn(record):\n    return 1.0 if record.step < 2 else 2.0\n")
    words = ["--config-name=quickstart", *SHORT, "total_train_steps=3", f"cluster.fileroot={folder / 'outputs'}"]
    words += ["experiment_name=rising", f"reward.fn={folder / 'rising.py'}", "evaluator.eval_before_train=true"]
    words += ["valid_dataset.max_rows=8", "recover.mode=auto", "recover.freq_steps=1"]
    assert run(get_algorithm("gspo"), "areno", words) == 0
    said, read = capsys.readouterr(), RunReader("outputs/rising/t")
    assert (said.out + said.err).count("a reward is 2, so a reward of 1 does not mean a right answer") == 1
    assert read.series("rollout/accuracy").steps == [1]
    assert read.series("eval/accuracy").steps == [0]
    assert read.series("eval/rewards_mean").steps == [0, 3]
    assert "eval_rewards_mean 1.000 -> 2.000" in said.out + said.err
    assert "rollout/accuracy" not in read.curves()
    assert run(get_algorithm("gspo"), "areno", ["--resume", "outputs/rising/t", "total_train_steps=4"]) == 0
    assert read.series("rollout/accuracy").steps == [1], "a resumed run goes on without"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([MODEL], "--reward: missing"),
        (["outputs/none"], "FOLDER: there is no folder outputs/none; a model of the hub needs --data and --reward"),
        (["rows.jsonl"], "FOLDER: rows.jsonl is a file; a run, a checkpoint or a model folder is expected"),
        (["outputs/quickstart/t", "--output", "rows.jsonl/x"], "--output: cannot make rows.jsonl/x: Not a directory"),
        (["outputs/quickstart"], "FOLDER: outputs/quickstart is neither the folder of a run nor that of a model"),
        (["outputs/quickstart/t", "--run", "outputs"], "--run: outputs is not the folder of a run"),
        (["outputs/quickstart/t", "--data", "none.jsonl"], "--data: there is no file or folder none.jsonl"),
        (["outputs/quickstart/t", "--max-rows", "0"], "--max-rows: is 0; it must be more than 0"),
        (["outputs/quickstart/t", "eval_gconfig.top_p=2"], "eval_gconfig.top_p: is 2"),
    ],
)
def test_mistakes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path("outputs").rglob("*"))
    assert main(["evaluate", *words]) in (1, 2)
    assert told in capsys.readouterr().err
    assert sorted(Path("outputs").rglob("*")) == before
