"""docs/algorithms.md: its examples give the numbers it shows, and its settings make the variant they stand under."""

from __future__ import annotations

import doctest
import re
import shlex

import pytest

from areno.api import get_algorithm
from areno.launch.compose import load
from tests.helpers.algorithms_page import PAGE, SECTIONS, TEXT, blocks, commands

TABLE = re.findall(r"^\| \[([^\]]+)\]\(#([^)]+)\)", TEXT, re.M)
VARIANTS = [name for name, _ in TABLE]

# What the settings of a section must come to, in every command it shows: of the loss, and of the configuration.
LOSS = {
    "GRPO": {"reduction": "seq_mean_token_mean", "surrogate": "clip", "clip_eps": 0.2},
    "Dr.GRPO": {"reduction": "seq_mean_token_sum_norm"},
    "DAPO": {"reduction": "token_mean", "clip_eps": 0.2, "clip_eps_higher": 0.28},
    "GSPO": {"clip_eps": 3e-4},
    "GSPO-token": {"importance_sampling_level": "sequence"},
    "PPO": {"reduction": "token_mean", "c_clip": 3.0, "clip_eps": 0.2},
    "REINFORCE++": {"kl_coef": 0.0, "reduction": "token_mean"},
    "CISPO": {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_higher": 0.28, "reduction": "token_mean"},
    "SAPO": {"surrogate": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    "M2PO": {"clip_eps": 1.0, "reduction": "token_mean"},
}
SETTINGS = {
    "Dr.GRPO": {"actor.adv_norm.mean_level": "group", "actor.adv_norm.std_level": None},
    "DAPO": {"rollout.dynamic_sampling": True, "actor.overlong_reward_penalty": True},
    "PPO": {"actor.adv_norm.mean_level": "batch", "actor.adv_norm.std_level": "batch"},
    "RLOO": {"actor.adv_norm.mean_leave1out": True, "actor.adv_norm.std_level": None},
    "REINFORCE++": {"actor.use_kl_in_reward": True, "actor.kl_estimator": "k1", "actor.adv_norm.std_level": "batch"},
    "M2PO": {"actor.m2_threshold": 0.04},
    "Decoupled PPO": {"actor.use_decoupled_loss": True},
    "Truncated importance sampling": {"actor.use_decoupled_loss": True, "actor.rejection_sampling.metric": "ratio"},
}


def examples() -> doctest.DocTest:
    """All python blocks as one session, each line where it stands on the page."""
    kept, inside = [], False
    for line in TEXT.splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        kept.append(line if inside and not fence else "")
    return doctest.DocTestParser().get_doctest("\n".join(kept) + "\n", {}, PAGE.name, str(PAGE), 0)


def test_the_numbers_on_the_page():
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(examples(), out=report.append)
    assert not result.failed, "".join(report)
    assert result.attempted > 40


@pytest.mark.parametrize("section", VARIANTS)
def test_a_section_has_formula_source_settings_and_example(section):
    assert blocks(section, "text")
    assert blocks(section, "bash keys")
    assert any(">>>" in block for block in blocks(section, "python"))
    assert "arxiv.org" in SECTIONS[section] or section in ("SFT", "Truncated importance sampling")
    assert len(SECTIONS[section].splitlines()) < 50  # a screen


@pytest.mark.parametrize(("section", "command"), commands())
def test_the_settings_make_the_variant(section, command):
    python, _, module, *words = shlex.split(command)
    assert python == "python"
    algorithm = get_algorithm(module.removeprefix("areno.recipes."))
    names = [word.removeprefix("--config-name=") for word in words if word.startswith("--config-name=")]
    config = load(algorithm.config, *(names or [algorithm.default]), [word for word in words if "--" not in word])
    for key, expected in SETTINGS.get(section, {}).items():
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        assert value == expected, key
    if section in LOSS:
        given = algorithm.make_loss(config).keywords
        assert {name: given[name] for name in LOSS[section]} == LOSS[section]


def test_the_table_names_every_section():
    assert [section for section in SECTIONS if blocks(section, "bash keys")] == VARIANTS
    for name, anchor in TABLE:
        assert anchor == re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
