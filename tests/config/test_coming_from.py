"""The pages for people who come from other tools: what they say of our settings holds, our half of each example runs.

The first column of each table is of the other tool. In tables of three columns, `key=value` in the second one is a
setting of ours and its default. Anything else that is written as `key` or `key=value` must be a setting, and a value
for it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.launch.compose import load
from areno.launch.hints import NOT_HERE, setting_hint
from areno.schema.fields import setting_rows
from tests.helpers import warm_python
from tests.helpers.agent_model import made
from tests.helpers.pages import (
    ROOT,
    blocks,
    codes,
    is_setting,
    known,
    of_tables,
    problem_of,
    sections,
    value_of,
)

PAGES = sorted((ROOT / "docs/coming_from").glob("*.md"))
NAMED = "Qwen/Qwen3-0.6B"
SMALL = ["total_train_steps=1", "gconfig.max_new_tokens=8", "engine.device=cpu", "reward.workers=1"]


def of_ours(page: Path) -> list[tuple[str, str, bool]]:
    """(recipe or "", code, whether it states a default) of all code of a page that is not of the other tool."""
    found = []
    for recipe, text in sections(page):
        for cells in of_tables(text):
            for column, cell in enumerate(cells[1:]):
                found += [(recipe, code, len(cells) == 3 and column == 0) for code in codes(cell)]
        plain = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        found += [(recipe, code, False) for code in codes(plain)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_settings_exist_and_have_these_defaults(page: Path) -> None:
    wrong, n_defaults = [], 0
    for recipe, code, states_default in of_ours(page):
        if is_setting(code):
            recipes = [recipe] if recipe else built_in_algorithms()
            key, _, text = code.partition("=")
            wrong += [problem] if (problem := problem_of(code, recipes)) else []
            if text and states_default:
                defaults = {value_of(known(each)[key].default.strip("'")) for each in recipes if key in known(each)}
                wrong += [] if defaults == {value_of(text)} else [f"{code}, but the default is {defaults}"]
                n_defaults += 1
    assert not wrong, "\n".join(wrong)
    assert n_defaults > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_errors_name_the_settings_of_the_page(page: Path) -> None:
    """Who types a name of the other tool is told a setting that the page has beside it."""
    untold, n_told = [], 0
    for recipe, text in sections(page):
        cls = get_algorithm(recipe or "grpo").config
        for cells in (cells for cells in of_tables(text) if len(cells) == 3):
            beside = {code.partition("=")[0] for code in codes(cells[1])}
            for code in codes(cells[0]) if any(map(is_setting, codes(cells[1]))) else []:
                key = code.partition("=")[0].replace("….", "actor_rollout_ref.")
                here = {row.key for row in setting_rows(cls)}
                if not key.replace(".", "").replace("_", "").isalnum() or key in here or f"actor.{key}" in here:
                    continue
                told = setting_hint(key, cls=cls)
                n_told += 1
                is_told = key in NOT_HERE or any(name in told for name in beside)
                untold += [] if is_told else [f"{key}: {told} and not {sorted(beside)}"]
    assert not untold, "\n".join(untold)
    assert n_told > 5


def test_variants_that_are_named_exist() -> None:
    for page in PAGES:
        for _, code, _ in of_ours(page):
            if code.startswith("variant="):
                assert (ROOT / "conf" / "variant" / f"{code.partition('=')[2]}.yaml").exists(), code


@pytest.mark.slow
def test_settings_of_trl_exist_and_have_these_defaults() -> None:
    trl = pytest.importorskip("trl", reason="needs trl")
    [page] = [page for page in PAGES if page.stem == "trl"]
    classes = {"grpo": trl.GRPOConfig, "dpo": trl.DPOConfig, "sft": trl.SFTConfig}
    wrong = []
    for recipe, text in sections(page):
        for code in (code for cells in of_tables(text) for code in codes(cells[0]) if "=" in code):
            key, _, stated = code.partition("=")
            defaults = [
                {field.name: field.default for field in dataclasses.fields(each)}.get(key)
                for each in ([classes[recipe]] if recipe else [classes["grpo"], classes["sft"]])
            ]
            defaults = [default if default is not dataclasses.MISSING else "sigmoid" for default in defaults]
            if value_of(stated) not in defaults and stated not in map(str, defaults):
                wrong.append(f"{code}: {defaults}")
    assert not wrong, "\n".join(wrong)
    [script] = [ast.parse(text) for info, text in blocks(page) if info == "py"]
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    [config] = [call for call in ast.walk(script) if getattr(getattr(call, "func", None), "id", "") == "GRPOConfig"]
    assert {keyword.arg for keyword in config.keywords} <= fields


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    with made() as trainer:
        return trainer.save_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.slow
def test_the_half_of_trl_runs(tmp_path: Path, model: str) -> None:
    pytest.importorskip("trl", reason="needs trl")
    [page] = [page for page in PAGES if page.stem == "trl"]
    for info, text in blocks(page):
        if info == "json prompt file=questions.jsonl":
            (tmp_path / "questions.jsonl").write_text(text)
        elif info == "py":
            text = text.replace(NAMED, model).replace("max_completion_length=256", "max_completion_length=8")
            text = text.replace("max_steps=100", 'max_steps=1, use_cpu=True, bf16=False, report_to="none"')
            (tmp_path / "script.py").write_text(text)
    done = warm_python.commands().run(["script.py"], tmp_path, os.environ, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rewards/right/mean" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_our_half_of_the_example_runs(page: Path, tmp_path: Path, model: str) -> None:
    import datasets

    commands = []
    for info, text in blocks(page):
        kind, _, file = info.partition(" file=")
        if file.endswith(".parquet"):
            lines = [json.loads(line) for line in text.splitlines()]
            datasets.Dataset.from_list(lines).to_parquet(tmp_path / file)
        elif file:
            (tmp_path / file).write_text(text.replace(NAMED, model), encoding="utf-8")
        elif kind == "bash run":
            commands += text.splitlines()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    [command] = commands
    done = warm_python.commands().run([*shlex.split(command)[1:], *SMALL], tmp_path, environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.glob("outputs/*/*/checkpoints/latest/model.safetensors"))


@pytest.mark.slow
def test_our_script_in_place_of_that_of_trl_runs_as_its_yaml_file(tmp_path: Path, model: str) -> None:
    [page] = [page for page in PAGES if page.stem == "trl"]
    found = {info: text for info, text in blocks(page) if info.startswith(("python", "yaml", "json"))}
    (tmp_path / "questions.jsonl").write_text(found["json prompt file=questions.jsonl"])
    (tmp_path / "questions.yaml").write_text(found["yaml file=questions.yaml"].replace(NAMED, model))
    script = found["python script"].replace(NAMED, model)
    by_yaml = load(get_algorithm("grpo").config, "questions", config_dir=tmp_path)
    defined: dict[str, Any] = {}
    exec(script.partition("rows = ")[0], defined)
    by_script = defined["config"]
    by_yaml.train_dataset.path = by_yaml.reward.fn = None
    assert by_script == by_yaml
    short = 'config.total_train_steps, config.engine.device, config.gconfig.max_new_tokens = 1, "cpu", 8\nrows ='
    (tmp_path / "train.py").write_text(script.replace("rows =", short))
    done = warm_python.commands().run(["train.py"], tmp_path, os.environ, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = tmp_path.glob("outputs/questions/*")
    assert (run / "config.yaml").read_text().startswith(f"# Settings: GRPOConfig\n# Script: {tmp_path / 'train.py'}\n")
    exec(found["python"], defined)
    assert (defined["config"].actor.reduction, defined["config"].reward.fn) == ("token_mean", None)
