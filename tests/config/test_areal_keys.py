"""Every key of AReaL is a setting here or is told with what to use; every other default has a row on its page.

The keys are in areal_keys.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.launch.hints import NOT_HERE, setting_hint
from areno.recipes.grpo import GRPOConfig
from areno.schema.build import earlier_names
from areno.schema.fields import SettingRow, setting_rows
from areno.schema.values import InvalidValue
from tests.helpers.pages import ROOT, codes, of_tables, sections

CLASSES = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "kto": "DPOConfig",
    "rw": "RWConfig",
    "prm": "RWConfig",
    "distill": "GRPOConfig",
    "grpo": "GRPOConfig",
    "gspo": "GRPOConfig",
    "online_dpo": "GRPOConfig",
    "ppo": "PPOConfig",
}
PAGE = ROOT / "docs/coming_from/areal.md"


class Key(NamedTuple):
    """One key of a class. section: its class, "" for a value. default: `required` if there is none."""

    default: Any
    choices: list[Any]
    section: str


@cache
def classes() -> dict[str, dict[str, Key]]:
    """The keys of each class, with those of its base."""
    own: dict[str, dict[str, Key]] = {}
    bases: dict[str, str] = {}
    keys: dict[str, Key] = {}
    for line in (Path(__file__).parent / "areal_keys.txt").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"\[(\w+)(?:: (\w+))?\]", line):
            keys = own[found[1]] = {}
            bases[found[1]] = found[2] or ""
        elif found := re.fullmatch(r"(\w+) -> (\w+)( = null)?", line):
            keys[found[1]] = Key(None if found[3] else "required", [], found[2])
        elif found := re.fullmatch(r"(\w+) = ([^|]*?)(?: \| (.*))?", line):
            choices = [None if word == "None" else word for word in (found[3] or "").split()]
            keys[found[1]] = Key(yaml.safe_load(found[2]), choices, "")
        else:
            assert not line or line.startswith("#"), line

    def whole(name: str) -> dict[str, Key]:
        return {**(whole(bases[name]) if bases[name] else {}), **own[name]}

    return {name: whole(name) for name in own}


def expanded(name: str, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """The dotted keys of a class and of the sections in it."""
    for key, found in classes()[name].items():
        yield prefix + key, found
        if found.section:
            yield from expanded(found.section, f"{prefix}{key}.")


@cache
def ours(recipe: str) -> dict[str, SettingRow]:
    found = {row.key: row for row in setting_rows(get_algorithm(recipe).config)}
    return found | {
        f"{old}{key.removeprefix(new)}": row
        for old, new in earlier_names(get_algorithm(recipe).config).items()
        for key, row in found.items()
        if f"{key}.".startswith(f"{new}.")
    }


@pytest.mark.parametrize("recipe", built_in_algorithms())
def test_every_key_works_or_is_told(recipe: str) -> None:
    unknown, n_working = set(), 0
    for key, _ in expanded(CLASSES[recipe]):
        parts = key.split(".")
        parents = [".".join(parts[: n + 1]) for n in range(len(parts))]
        found = next((parent for parent in parents if parent not in ours(recipe)), None)  # what the error is about
        n_working += found is None
        unknown |= {found} - {None}
    current = [key.replace("rollout.agent.", "agent.") for key in sorted(unknown)]  # as errors name it
    assert not [key for key in current if not setting_hint(key)]
    assert n_working > 60


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_head_offpolicyness", None),
        ("max_concurrent_rollouts", None),
        ("queue_size", "rollout.prompts_ahead"),
        ("consumer_batch_size", "train_dataset.batch_size"),
        ("pause_grace_period", "between two decoding steps"),
        ("request_timeout", "agent.timeout_s"),
        ("request_retries", "no inference servers"),
        ("check_trajectory_format", "always checked"),
        ("enable_rollout_tracing", "rollout.dump_to_file"),
    ],
)
def test_the_keys_of_a_rollout_that_does_not_wait(name: str, words: str | None) -> None:
    """Each works, or says which setting does its work, which exists."""
    assert f"rollout.{name}" in dict(expanded("GRPOConfig"))
    if words is None:
        assert f"rollout.{name}" in ours("grpo")
        return
    told = setting_hint(f"rollout.{name}")
    assert words in told
    assert not [key for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", told) if key not in ours("grpo")]


AGENT = {
    "agent_cls_path": ("areal.workflow.openai.math_agent.MathAgent", "here it is agent.fn"),
    "admin_api_key": ("areal-admin-key", "set the environment variable ARENO_ADMIN_API_KEY"),
    "scheduling_spec": ([{}], None),  # with a warning, as elsewhere
    "mode": ("inline", None),
    "tool_call_parser": ("qwen", None),
    "reasoning_parser": ("qwen3", None),
    "chat_template_type": ("hf", "a conversation continues with the tokens that were sampled"),
    "engine_max_tokens": (4096, "here it is gconfig.max_tokens"),
    "turn_discount": (1.0, None),
    "export_style": ("individual", None),
    "subproc_max_workers": (4, "here it is agent.workers"),
    "session_timeout_seconds": (3600, None),
    "set_reward_finish_timeout": (0.0, None),
}


@pytest.mark.parametrize("key", AGENT)
def test_each_key_of_agents_works_or_is_told_in_one_line(key: str) -> None:
    assert AGENT.keys() == classes()["AgentConfig"].keys()
    value, words = AGENT[key]
    settings = ["agent.fn=agent.py", f"+rollout.agent.{key}={json.dumps(value)}"]
    if words is None:
        config = load(GRPOConfig, "quickstart", settings)
        kept = {"tool_call_parser": "hermes", "reasoning_parser": "think"}.get(key, value)
        assert key == "scheduling_spec" or getattr(config.agent, key) == kept
        return
    with pytest.raises(ConfigError) as caught:
        load(GRPOConfig, "quickstart", settings)
    assert str(caught.value).startswith(f"agent.{key}: unknown key")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_other_values_of_an_agents_keys() -> None:
    def made(*settings: str) -> Any:
        return load(GRPOConfig, "quickstart", [f"+rollout.agent.{each}" for each in settings]).agent

    online = made("mode=online", "session_timeout_seconds=60", "set_reward_finish_timeout=5", "agent_cls_path=''")
    assert (online.mode, online.session_timeout_seconds, online.set_reward_finish_timeout) == ("online", 60, 5)
    assert made("fn=agent.py", "mode=subproc", "export_style=concat", "chat_template_type=concat").mode == "subproc"
    for name, known in (("tool_call_parser", "'hermes', 'qwen3_coder'"), ("reasoning_parser", "'think', 'none'")):
        with pytest.raises(ConfigError, match=rf"agent\.{name}: is 'other'; expected one of {known}"):
            made("fn=agent.py", f"{name}=other")
    with pytest.raises(ConfigError, match=r"agent\.session_timeout_seconds: .* no external program is served"):
        made("fn=agent.py", "session_timeout_seconds=60")


def test_the_page_names_what_is_told() -> None:
    """Each key that an error knows of, by its last name or its section's."""
    named = {word for code in codes(PAGE.read_text(encoding="utf-8")) for word in re.split(r"[.=]", code)}
    of_areal = {key for recipe in built_in_algorithms() for key, _ in expanded(CLASSES[recipe])}
    assert not [key for key in NOT_HERE if key in of_areal and key.rpartition(".")[2] not in named]


@pytest.mark.parametrize("recipe", built_in_algorithms())
def test_every_choice_is_taken_or_told(recipe: str) -> None:
    untold, n_taken = [], 0
    for key, found in expanded(CLASSES[recipe]):
        for choice in found.choices if key in ours(recipe) else ():
            try:
                ours(recipe)[key].setting.convert(choice)
                n_taken += 1
            except InvalidValue:
                untold += [] if setting_hint(f"{key}={choice}") else [f"{key}={choice}"]
    assert not untold
    assert n_taken > 15


@pytest.mark.parametrize("recipe", built_in_algorithms())
def test_a_default_that_differs_has_a_row(recipe: str) -> None:
    page = [
        code.partition("=")
        for of_recipe, text in sections(PAGE)
        if of_recipe in ("", "grpo", recipe)
        for cells in of_tables(text)
        for code in codes(cells[0])
    ]
    missing = []
    for key, found in expanded(CLASSES[recipe]):
        row = ours(recipe).get(key)
        if row is None or found.section or "required" in (found.default, row.default):
            continue
        if yaml.safe_load(row.default) != (None if found.default == "" else found.default):
            shown = f".{key.removeprefix('eval_')}"  # the page says that eval_gconfig has the defaults of gconfig
            stated = {value for name, _, value in page if shown.endswith(f".{name}")}
            missing += [] if str(found.default) in stated else [f"{key}: {found.default}, here {row.default}"]
    assert not missing, "\n".join(missing)
