"""Rows of runs with a teacher: what they need is checked before models load, and prompts without room are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.errors import DataError
from tests.helpers.distill_runs import DISTILL, NO_PATH, ROWS, run


def test_what_a_later_row_lacks_is_said_before_models_load(tmp_path: Path) -> None:
    given = ["on_policy_share=0.5", "teacher.loss_type=jsd"]
    for name, settings, message in (
        ("response", given, r"row 20: .*response.*; the rows that the student does not answer need one.*on_policy_sh"),
        ("solved", ["teacher.loss_type=jsd"], r"row 20: .*solved.*, which teacher\.prompt_key asks for"),
    ):
        rows = [*ROWS, {key: value for key, value in ROWS[0].items() if key != name}]
        with pytest.raises(DataError, match=message):
            run("distill", tmp_path, *DISTILL, NO_PATH, "teacher.prompt_key=solved", *settings, rows=rows)


@pytest.mark.parametrize("more", [[], ["teacher.loss_type=jsd"], ["teacher.loss_type=jsd", "on_policy_share=0.5"]])
def test_rows_whose_teacher_has_no_room_for_an_answer_are_skipped(
    more: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {**ROWS[0], "solved": "1+" * 60 + "9="}  # 122 tokens and an answer of 8 in a context of 128
    settings = [*DISTILL, NO_PATH, "teacher.prompt_key=solved", "gconfig.max_new_tokens=8", *more]
    found = run("distill", tmp_path / "run", *settings, "train_dataset.shuffle=false", rows=[long, *ROWS])
    assert found.series("rollout/skipped_long").values == [1, 0]
    assert "row 0: field solved (teacher.prompt_key) has 122 tokens, which leave no room for 8 tokens" in caplog.text
    with pytest.raises(DataError, match="every row of the data given is too long: field solved"):
        run("distill", tmp_path / "none", *settings, rows=[long] * 8)


def test_given_answers_are_cut_where_the_teacher_has_no_more_room(tmp_path: Path) -> None:
    rows = [{**row, "response": "7" * 300, "solved": "1+" * 40} for row in ROWS]
    settings = [*DISTILL, NO_PATH, "teacher.prompt_key=solved", "teacher.loss_type=jsd", "on_policy_share=0"]
    found = run("distill", tmp_path, *settings, rows=rows)
    assert found.series("train/response_len").values == [48, 48]  # of a context of 128
