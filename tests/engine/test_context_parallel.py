"""Context parallel: ranks that share the tokens of each row find what one rank finds, with any loss and layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areno.config.layout import Layout
from areno.models.registry import layout_problems, load_config
from tests.helpers.layouts import compare, folder_with, other_losses, policy_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads, four of keys: for two tensor-parallel ranks of two context-parallel ones."""
    return folder_with(tmp_path_factory.mktemp("model"), num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.slow
def test_two_ranks_share_the_tokens_of_each_row(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path, {"devices": 2, "cp_size": 2}, policy_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"devices": 4, "cp_size": 2, "tp_size": 2}, {"devices": 4, "cp_size": 2}, {"devices": 4, "cp_size": 4}],
    ids=["tp2-cp2", "dp2-cp2", "cp4"],
)
def test_other_layouts(folder: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    compare(folder, tmp_path, layout, policy_steps)


@pytest.mark.slow
def test_a_critic_pairs_and_plain_rows(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path, {"devices": 2, "cp_size": 2}, partial(other_losses, folder=folder))


def test_heads_that_a_context_does_not_divide(folder: Path) -> None:
    config = load_config(folder)
    assert layout_problems(config, Layout(4, 2, 2)) == []
    (problem,) = layout_problems(config, Layout(8, 2, 4))
    assert problem.key == "engine.cp_size"
    assert problem.message == (
        "is 4, which does not divide the 2 key-value heads of the model on each device (config.json: "
        "num_key_value_heads=4; engine.tp_size=2)"
    )
