"""`areno reproduce league`: the order of its runs, how results become places, and runs that stop midway."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.errors import ArenoError
from areno.launch.compose import load
from areno.launch.yaml_files import variant_files
from areno.league import results
from areno.league.results import LeagueRun, Result, places, read_results, resolution, t_975
from areno.league.runs import BEDS, NOT_IN_IT, STAGES, LeagueRuns, contenders
from areno.league.schedule import AGES, CHOOSING_SEED, League
from tests.helpers import warm

ROOT = Path(__file__).parents[2]
RATES = BEDS["cpu"].rates
TINY = [
    "--base=total_train_steps=1",
    "--base=train_dataset.dataset_kwargs.count=64",
    "total_train_steps=6",
    "train_dataset.dataset_kwargs.count=64",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=8",
    "valid_dataset.dataset_kwargs.count=4",
    "reward.workers=1",
]


def result(stage: str, name: str, seed: int, rate: float, lr: str = "5e-4", age: int = 0, **more: object) -> Result:
    run = LeagueRun(stage, name, seed, lr, age)
    made = {
        "run": run,
        "size": "cpu",
        "evaluation": {"accuracy": rate, "pass@1": rate, "pass@4": 2 * rate},
        "before": {},
        "tokens": [10.0 * step for step in range(1, 9)],
        "seconds": [float(step) for step in range(1, 9)],
        "rewards": [0.05 * step for step in range(1, 9)],
        "lengths": [30.0] * 8,
        "entropy": [0.2] * 8,
        "base": "abc",
        "device": "CPU",
        "at_once": 2,
        "wall_seconds": 5.0,
        "settings": LeagueRuns("cpu", Path()).told_settings(run) if name in contenders("cpu") else [],
    }
    return Result(**{**made, **more})  # type: ignore[arg-type]


def league(folder: Path, *names: str, seeds: tuple[int, ...] = (1, 2)) -> League:
    return League("cpu", folder, folder / "results", STAGES, names, seeds, 2, [], [])


def make_bases(folder: Path) -> None:
    for task in ("countdown", "arithmetic"):
        (folder / f"{task}_base/checkpoints/latest").mkdir(parents=True)


def test_every_variant_is_in_it_or_has_a_reason() -> None:
    with_teacher = {"iw_opd", "rlsd", "sdar", "sdpg"}
    of_gpu, of_cpu = contenders("gpu"), contenders("cpu")
    assert set(variant_files()) - set(of_gpu) == set(NOT_IN_IT) | with_teacher
    assert set(of_gpu) - set(of_cpu) == {name for name, one in of_gpu.items() if one.recipe == "ppo"} == {"ppo", "sao"}
    assert len(of_cpu) >= 20
    assert of_gpu["sao"].n_samples == 1
    assert "critic.ppo_n_minibatches=4" in of_gpu["sao"].settings
    page = (ROOT / "docs/league.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in (*NOT_IN_IT, *with_teacher))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["gpu", "cpu"])
def test_the_commands_of_all_algorithms_compose(size: str, tmp_path: Path) -> None:
    made = League(size, tmp_path, tmp_path / "results", STAGES, list(contenders(size)), [1], 1, [], [])
    for name in made.names:
        recipe, words = made.runs.command(LeagueRun("countdown", name, 3, "1e-4"))
        config: Any = load(get_algorithm(recipe).config, words[0].partition("=")[2], words[1:])
        samples = config.train_dataset.batch_size * config.gconfig.n_samples
        assert samples == made.bed.batch[0] * made.bed.batch[1]
        assert config.actor.ppo_n_minibatches == 4
        assert config.actor.optimizer.lr == 1e-4
    for stage, age in (("rates", 0), ("arithmetic", 0), *(("staleness", age) for age in AGES)):
        recipe, words = made.runs.command(LeagueRun(stage, "gspo", 3, "1e-4", age))
        config = load(get_algorithm(recipe).config, words[0].partition("=")[2], words[1:])
        assert config.rollout.max_head_offpolicyness == age


def test_a_stage_waits_for_the_results_of_earlier_ones(tmp_path: Path) -> None:
    """Base models first; then rates, seeds with the best rate, and the best algorithms on another task and with age."""
    made = league(tmp_path, "grpo", "random_reward", "cispo")
    base = LeagueRun("base", "countdown", 1)
    assert made.next_run() == base
    made.begun.add(base.file)
    assert made.next_run() == LeagueRun("base", "arithmetic", 1)
    make_bases(tmp_path)
    made.begun.clear()
    seen = []
    quality = {"grpo": 0.3, "cispo": 0.4, "random_reward": 0.5}
    while run := made.next_run():
        seen.append(run)
        middle = run.rate == "5e-4"
        made.results[run.file] = result(
            run.stage, run.name, run.seed, quality[run.name] + middle / 10, run.rate, run.age
        )
    tried = [("rates", name, CHOOSING_SEED, rate) for rate in RATES for name in ("grpo", "cispo")]
    assert [(run.stage, run.name, run.seed, run.rate) for run in seen[:6]] == tried
    assert {run.rate for run in seen[6:]} == {"5e-4"}
    played = [("countdown", name, seed, 0) for seed in (1, 2) for name in ("grpo", "random_reward", "cispo")]
    played += [("arithmetic", name, seed, 0) for seed in (1, 2) for name in ("cispo", "grpo")]
    played += [("staleness", name, seed, age) for age in AGES for seed in (1, 2) for name in ("cispo", "grpo")]
    assert [(run.stage, run.name, run.seed, run.age) for run in seen[6:]] == played
    assert len({run.file for run in seen}) == len(seen)


def test_a_failed_run_holds_up_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bases(tmp_path)
    made = league(tmp_path, "grpo", seeds=(1,))
    for rate in RATES:
        run = LeagueRun("rates", "grpo", CHOOSING_SEED, rate)
        assert made.next_run() == run
        if rate == RATES[0]:
            made._end(run, None, "exit code 1", ["its last line"])
        else:
            made.results[run.file] = result("rates", "grpo", run.seed, 0.1, rate)
    assert "its last line\nFAILED: rates/grpo-lr1e-4-s100: exit code 1" in capsys.readouterr().out
    assert made.next_run() == LeagueRun("countdown", "grpo", 1, RATES[1])


def test_runs_that_would_not_end_in_time_do_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bases(tmp_path)
    made = league(tmp_path, "grpo")
    made.results["x"] = result("rates", "cispo", 1, 0.1, wall_seconds=1e6)
    assert made.play(60.0)
    assert not made.begun
    assert "there is no time for one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "names", "made", "message"),
    [
        ("countdown", "grpo", (), "--stage: countdown needs the results of the stage rates, .* rates/grpo-lr1e-4-s100"),
        ("arithmetic", "random_reward", (), "--only: has controls alone, and arithmetic is for the best of the others"),
        ("rates,staleness", "grpo", (), "--stage: staleness needs the results of the stage countdown, .*/grpo-s1.json"),
        ("arithmetic", "grpo", ("rates", "s1"), "--stage: arithmetic needs .* stage countdown, .*countdown/grpo-s2"),
        ("countdown", "grpo,cispo", ("rates",), "--stage: countdown needs .* stage rates, .* rates/cispo-lr1e-4-s100"),
    ],
)
def test_a_stage_whose_results_are_missing_makes_no_base_model(
    stages: str, names: str, made: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "rates" in made:
        for lr in RATES:
            result("rates", "grpo", CHOOSING_SEED, 0.1, lr).write(tmp_path / "rows")
    if "s1" in made:
        result("countdown", "grpo", 1, 0.1, RATES[0]).write(tmp_path / "rows")
    words = ["reproduce", "league", "--size=cpu", f"--stage={stages}", f"--only={names}"]
    assert main([*words, f"--rows={tmp_path / 'rows'}", "-o", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_results_of_another_size_or_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result("rates", "grpo", 1, 0.1, size="gpu").write(tmp_path / "results")
    with pytest.raises(Exception, match=r"holds results of the size gpu; use another folder, or --size gpu"):
        league(tmp_path, "grpo")
    result("rates", "grpo", 1, 0.1).write(tmp_path / "results")
    make_bases(tmp_path)
    made = league(tmp_path, "grpo")
    with pytest.raises(Exception, match=r"results of another base model of countdown"):
        made.play(None)
    result("countdown", "grpo", 1, 0.1, base="def").write(tmp_path / "results")
    assert main(["reproduce", "league", "--tables", f"--rows={tmp_path / 'results'}"]) == 2
    assert "holds results of 2 base models of countdown, which are no table" in capsys.readouterr().err


def test_results_with_other_settings_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that the league makes for a run, such as its seed, differ anyway. Tables need no settings."""
    rows, more = tmp_path / "results", ["total_train_n_tokens=100", "total_train_n_tokens=500"]
    for run in (LeagueRun("rates", "grpo", 100, "1e-4"), LeagueRun("countdown", "cispo", 1, "5e-4")):
        made = result(run.stage, run.name, run.seed, 0.1, run.rate)
        dataclasses.replace(made, settings=[*made.settings, *more]).write(rows)
    tables, words = ["reproduce", "league", f"--rows={rows}", "--tables"], ["reproduce", "league", "--size=cpu"]
    words += [f"--rows={rows}", "-o", str(tmp_path / "out")]
    assert main(tables) == 0
    League("cpu", tmp_path, rows, STAGES, ["grpo"], [1], 2, [], more)
    capsys.readouterr()
    for given, text in (
        (["total_train_n_tokens=200"], "total_train_n_tokens=500, and not total_train_n_tokens=200"),
        ([*more, "gconfig.top_p=0.9"], "gconfig.top_p as in the task, and not gconfig.top_p=0.9"),
        ([], "total_train_n_tokens=500, and not total_train_n_tokens=200000"),
    ):
        assert main([*words, *given]) == 2
        told = capsys.readouterr().err
        assert f"--rows: {rows} holds results with other settings: countdown/cispo-s1.json has {text}; use" in told
    result("countdown", "grpo", 2, 0.2).write(rows)
    assert main(tables) == 2
    assert "countdown/grpo-s2.json has total_train_n_tokens=200000, and not total_train" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_of_a_variant_whose_file_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are a table, but no part of a league that makes runs, nor beside results of the new file."""
    rows, made = tmp_path / "results", result("countdown", "cispo", 1, 0.2)
    old = [text.replace('surrogate="cispo"', 'surrogate="clip"') for text in made.settings]
    assert old != made.settings
    dataclasses.replace(made, settings=old).write(rows)
    result("countdown", "grpo", 1, 0.2).write(rows)
    tables, runs = ["reproduce", "league", f"--rows={rows}", "--tables"], ["reproduce", "league", "--size=cpu"]
    assert main(tables) == 0
    assert main([*runs, f"--rows={rows}", "-o", str(tmp_path / "out")]) == 2
    key = "conf/variant/cispo.yaml: actor.surrogate"
    assert f'cispo-s1.json has {key}="clip", and not {key}="cispo"; use another folder' in capsys.readouterr().err
    result("countdown", "cispo", 2, 0.2).write(rows)
    assert main(tables) == 2


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = result("staleness", "cispo", 2, 0.25, age=8)
    made.write(tmp_path)
    assert read_results(tmp_path) == {"staleness/cispo-age8-s2.json": made}
    (tmp_path / "staleness/x-s1.json").write_text("{}")
    with pytest.raises(Exception, match=r"x-s1.json is no result of the league"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evaluation": {"pass@4": 0.2}}, "'accuracy'"),
        ({"evaluation": {"accuracy": 0.2}}, "max"),
        ({"evaluation": {"accuracy": math.nan, "pass@4": 0.2}}, "a number is not finite"),
        ({"evaluation": None}, "NoneType"),
        ({"before": {"accuracy": "0.1"}}, "must be real number"),
        ({"rewards": None}, "NoneType"),
        ({"tokens": "x"}, "must be real number"),
        ({"run": LeagueRun("countdown", "cispo", 2, "5e-4")}, r"it says that it is countdown/cispo-s2\.json"),
        ({"run": LeagueRun("countdown", "cispo", 1, "x")}, "could not convert"),
    ],
)
def test_a_damaged_result_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = result("countdown", "cispo", 1, 0.2)
    path = tmp_path / made.run.file
    path.parent.mkdir()
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(made, **change))))
    with pytest.raises(ArenoError, match=rf"cispo-s1\.json is no result of the league: .*{message}.*; remove it"):
        read_results(tmp_path)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (60, 2.000)])
def test_quantiles_of_t(freedom: int, quantile: float) -> None:
    assert t_975(freedom) == pytest.approx(quantile, abs=0.004)


def test_ties_share_a_place() -> None:
    """Each has the variance 1e-4 over three seeds, so a difference of 0.01 * sqrt(2 / 3) * t(8) = 0.0188 is one."""
    means = {"a": 0.40, "b": 0.39, "c": 0.385, "d": 0.36}
    groups = _with_spread(means)
    smallest = resolution(groups)
    assert smallest == pytest.approx(2.306 * 0.01 * (2 / 3) ** 0.5, rel=1e-3)
    assert places(groups, smallest) == {"a": "1=", "b": "1=", "c": "1=", "d": "4"}
    assert places(groups, 0.006) == {"a": "1", "b": "2=", "c": "2=", "d": "4"}
    equal = {name: [result("countdown", name, seed, 0.0) for seed in (1, 2)] for name in "ab"}
    assert places(equal, resolution(equal)) == {"a": "1=", "b": "1="}


def test_one_seed_gives_no_places_and_says_why() -> None:
    told = results.tables([result("countdown", name, 1, 0.2) for name in ("grpo", "cispo")], 0.25)
    assert "2 at once; no places, because the spread of two seeds or more decides what is a tie\n" in told
    assert told.count("| ? |") == 2


def test_an_algorithm_that_diverges_has_no_place() -> None:
    groups = _with_spread({name: 0.4 - 0.03 * number for number, name in enumerate("abcdefgh")})
    groups["i"] = [result("countdown", "i", seed, rate) for seed, rate in enumerate((0.0, 0.01, 0.3))]
    # The median of chi squared with two degrees of freedom is 2 ln 2.
    expected = 2.101 * 0.01 * (2 / 3 / math.log(2)) ** 0.5
    assert resolution(groups) == pytest.approx(expected, rel=0.02), "one algorithm that diverges makes no ties"
    found = places(groups, resolution(groups))
    assert found == {name: str(number) for number, name in enumerate("abcdefgh", 1)} | {"i": "diverges"}


def _with_spread(means: dict[str, float]) -> dict[str, list[Result]]:
    return {
        name: [result("countdown", name, seed, mean + step) for seed, step in enumerate((-0.01, 0.0, 0.01))]
        for name, mean in means.items()
    }


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(1, 6):
        for name, mean in (("grpo", 0.3), ("cispo", 0.35), ("random_reward", 0.1)):
            more = {"before": {"accuracy": 0.14}} if name == "grpo" else {}
            result("countdown", name, seed, mean + 0.001 * seed, **more).write(tmp_path)  # type: ignore[arg-type]
        result("staleness", "cispo", seed, 0.2, age=8).write(tmp_path)
    for lr, rate in zip(RATES, (0.1, 0.3, 0.2), strict=True):
        result("rates", "grpo", 100, rate, lr).write(tmp_path)
    assert main(["reproduce", "league", "--tables", f"--rows={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert "15 runs of 3 algorithms on CPU, 2 at once; base model 0.140; differences below 0.002 are ties" in told
    lines = told.splitlines()
    assert "| algorithm | 1e-4 | 2e-4 | 5e-4 |" in lines
    assert "| `grpo` | 0.100 | 0.300 | 0.200 |" in lines
    # The mean reward of steps 2 to 6 is 0.2.
    reached = ["0.06, 0.06, 0.06, 0.06, 0.06", "6, 6, 6, 6, 6"]
    row = ["1", "`cispo`", "5", "5e-4", "0.353 ± 0.002", "0.706 ± 0.003", *reached, "30", "0.200"]
    assert f"| {' | '.join(row)} |" in lines
    assert "| 3 | `random_reward` | 5 | 5e-4 | 0.103 ± 0.002 | 0.206 ± 0.003 | - | - | 30 | 0.200 |" in lines
    assert "| `cispo` | 5 | +0.050 ± 0.000 | +0.100 ± 0.000 |" in lines
    assert "| `cispo` | 0.353 ± 0.002 (5) | 0.200 ± 0.000 (5) |" in lines
    drawn = (tmp_path / "league.svg").read_text(encoding="utf-8")
    assert drawn.count("<circle") == 15
    assert statistics.fmean(map(len, drawn.splitlines())) < 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["league", "--only=cisp"], "--only: there is no 'cisp'; did you mean cispo?"),
        (["league", "--stage=all"], "--stage: there is no 'all'; there are rates, countdown, arithmetic, staleness"),
        (["league", "--seeds=1,x"], "--seeds: is '1,x'; numbers from 1 to 99 with commas are expected"),
        (["league", "--parallel=0"], "--parallel: is 0; a number above 0 is expected"),
        (["league", "--tables", "--rows=none"], "--tables: there is no folder .*/none; name it with --rows"),
        (
            ["league", "--tables", "--rows=/dev"],
            "--tables: there are no results, such as countdown/grpo-s1.json, in /dev",
        ),
        (
            ["league", "--tables", f"--rows={ROOT}/docs/league", "--only=grpo"],
            "--only: is for runs, and --tables makes none",
        ),
        (["league", f"--rows={__file__}"], "--rows: .*/test_league.py is a file; name a folder"),
        (["league", "--only=grpo", "gconfig.tempreature=1"], "gconfig.tempreature: unknown key"),
        (["league", "--only=grpo", "train_dataset.batch_size=4"], "train_dataset.batch_size: is set, but the stage st"),
        (["league", "--base=gconfig.n_samples=2"], "gconfig.*: unknown key"),
        (["league", "--seeds=,"], "--seeds: is ','; numbers from 1 to 99 with commas are expected"),
        (
            ["league", "--seeds=1,100"],
            "--seeds: is '1,100'; numbers from 1 to 99 .*, because 100 chooses the learning rates",
        ),
        (["league", "--seeds=1,2,1"], "--seeds: names 1 more than once"),
        (["league", "--stage=,"], "--stage: is ','; names with commas are expected, such as rates"),
        (["league", "--only=,"], "--only: is ','; names with commas are expected, such as grpo"),
        (["league", "--only=grpo,grpo"], "--only: names grpo more than once"),
        (["league", "--only=ppo"], "--only: ppo needs --size gpu, because the task of a CPU has no critic"),
        (["league", "--algo=gspo"], "--algo: is not for the league; use --only"),
        (["league", "--seed=3"], "--seed: is not for the league; use --seeds"),
        (["league", "seed=3"], "seed: is set by areno reproduce; use --seeds"),
        (["league", "actor.optimizer.lr=1"], "actor.optimizer.lr: is set by .*: the stage rates chooses it for each"),
        (["league", "variant=cispo"], "variant: is set by areno reproduce: each run has its own; use --only"),
        (["league", "actor.ppo_n_minibatches=1"], "actor.ppo_n_minibatches: is set by .*: each batch has 4 updates"),
        (["league", "reward.fn=math"], r"reward\.fn: is set by areno reproduce: it is a part of random_reward"),
        (["league", "reward={fn: math}"], r"reward: is set by areno reproduce \(reward\.fn\): it is a part of random"),
        (
            ["league", "+valid_dataset.loader=x.py:f"],
            r"valid_dataset\.loader: is set by .*: each stage has problems of",
        ),
        (["league", "valid_dataset=default"], r"valid_dataset: is set by .* \(valid_dataset\.loader\): each stage"),
        (["league", "actor.mask=sao"], r"actor\.mask: is set by areno reproduce: it is a part of dppo_kl and 3 others"),
        (["league", "actor.rejection_sampling.upper=2"], r"actor\.rejection_sampling\.upper: is set by .* a part of "),
        (["league", "rollout.prompts_ahead=3"], r"rollout\.prompts_ahead: is set by .*: the stage staleness compares"),
        (["countdown", "actor={path: x}"], r"actor: is set by areno reproduce \(actor\.path\) to the base model"),
        (["countdown", "--seeds=1"], "--seeds: is an option of areno reproduce league alone"),
    ],
)
def test_mistakes_are_found_at_the_door(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words, "--size=cpu"]) == 2
    told = capsys.readouterr().err
    assert re.search(f"^error: {message}", told)
    assert len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["--size=gpu"], ["--size=tpu"], ["--size=tpu", "--resume"]])
def test_a_size_that_cannot_be_is_told_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outputs/reproduce/league-cpu").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "league", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --size: ")
    assert len(told.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_league_is_made_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It stops when its time is up, goes on where results are missing, and then makes nothing again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("areno.launch.side_by_side.multiprocessing", warm.workers())
    words = ["reproduce", "league", "--size=cpu", "-o", "out", "--parallel=2", "--only=grpo", "--seeds=1"]
    words += ["--stage=rates,countdown", *TINY]
    assert main([*words, "--for=3"]) == 0
    assert "time is up: runs in progress end" in capfd.readouterr().out
    assert main([*words, "--resume"]) == 0
    told = capfd.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("done: countdown")] == [
        "done: countdown/grpo-s1: 0.000"
    ]
    files = sorted(
        path.relative_to(tmp_path / "out/results").as_posix() for path in (tmp_path / "out").rglob("*-s*.json")
    )
    assert files == ["countdown/grpo-s1.json", *(f"rates/grpo-lr{rate}-s100.json" for rate in sorted(RATES))]
    content = json.loads((tmp_path / "out/results/countdown/grpo-s1.json").read_text())
    assert len(content["tokens"]) == len(content["rewards"]) == 6
    assert str(tmp_path) not in json.dumps(content)
    assert content["before"]["accuracy"] == 0.0
    assert main([*words, "--resume"]) == 0
    assert "no run is missing" in capfd.readouterr().out


def test_the_page_has_the_tables_of_the_results() -> None:
    """docs/league/ has the results of the page, if there are any."""
    rows = ROOT / "docs/league"
    if not rows.is_dir():
        pytest.skip("there are no results yet")
    page = (ROOT / "docs/league.md").read_text(encoding="utf-8")
    made = read_results(rows)
    told = results.tables(made.values(), 0.25)
    missing = [line for line in told.splitlines() if line.startswith("|") and line not in page]
    assert not missing
