"""agent.export_style: the rows of a sample, one for each turn or one for the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.agents.trajectories import BadTrajectory, LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.recipes.online_dpo import OnlineDPOConfig
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder
from areno.types import TokenRow
from tests.helpers.agent_runs import run
from tests.helpers.conversations import OTHER, USER, turn_of
from tests.helpers.tokenizers import load_tokenizer


def turns_and_rows(export_style: str | None, *answers: str, edited: bool = False) -> tuple[list[Any], list[TokenRow]]:
    """A conversation with these answers. With `edited`, the last request has a first message of its own."""
    tokenizer = load_tokenizer("tiny")
    prompts = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    messages, turns = [USER], []
    for number, answer in enumerate(answers):
        if edited and number == len(answers) - 1:
            messages = [OTHER, *messages[1:]]
        turns.append(turn_of(prompts, list(messages), f"{answer}<|im_end|>", None))
        messages += [turns[-1]["message"], OTHER]
    builder = RowBuilder(prompts, LossMaskPolicy(), len(tokenizer), "s", export_style=export_style)
    return turns, builder.build_trajectory(turns).rows


def arrays(rows: list[TokenRow]) -> list[Any]:
    return [[np.asarray(values).tolist() for values in (row.tokens, row.trained, row.logprobs)] for row in rows]


def test_individual_makes_a_row_of_each_turn_whose_prompt_is_masked() -> None:
    turns, rows = turns_and_rows("individual", "one", "two", "three")
    assert len(rows) == len(turns) == 3
    for turn, row in zip(turns, rows, strict=True):
        prompt, [choice] = turn["tokens"]["prompt_token_ids"], turn["tokens"]["choices"]
        assert row.tokens == [*prompt, *choice["token_ids"]]
        assert row.trained.tolist() == [False] * len(prompt) + [True] * len(choice["token_ids"])
    assert rows[2].tokens[: len(rows[1].tokens)] == rows[1].tokens


def test_concat_makes_the_default_rows_of_a_linear_history() -> None:
    default, concat = (turns_and_rows(style, "one", "two", "three")[1] for style in (None, "concat"))
    assert arrays(concat) == arrays(default)
    assert len(concat) == 1


def test_concat_refuses_a_history_that_is_not_linear() -> None:
    assert len(turns_and_rows(None, "one", "two", edited=True)[1]) == 2
    with pytest.raises(BadTrajectory, match=r"turn 1 does not continue .* agent\.export_style=concat"):
        turns_and_rows("concat", "one", "two", edited=True)


def test_pairs_need_one_row_for_each_sample() -> None:
    with pytest.raises(ConfigError, match=r"agent\.export_style: is 'individual', but pairs"):
        load(OnlineDPOConfig, "quickstart", ["agent.fn=agent.py", "agent.export_style=individual"])


@pytest.mark.slow
def test_the_turns_of_a_run_are_rows_with_the_advantage_of_their_sample(tmp_path: Path) -> None:
    settings = ["engine.exact=true", "total_train_steps=1"]
    whole = run(tmp_path / "whole", "two_turns.py", *settings)
    single = run(tmp_path / "single", "two_turns.py", "agent.export_style=individual", *settings)
    assert [len(played.rows[0]) for played in (whole, single)] == [16, 32]
    assert single.series("train/logp_abs_diff_max") == [0.0]
    assert single.series("rollout/rewards_mean") == whole.series("rollout/rewards_mean")
    for first, second in zip(single.rows[0][::2], single.rows[0][1::2], strict=True):
        trained = [np.asarray(row.advantages)[~np.asarray(row.prompt_mask)] for row in (first, second)]
        assert set(trained[0]) == set(trained[1])
        assert np.asarray(second.tokens)[: len(first.tokens)].tolist() == np.asarray(first.tokens).tolist()
