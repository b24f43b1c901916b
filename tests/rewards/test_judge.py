"""A judge: the questions, verdicts of a model of the run, comparisons, and answers that judges fall for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from areno.config.judge import JudgeConfig
from areno.engine.decoder.grammar import Vocabulary
from areno.errors import ConfigError, DataError
from areno.scoring.judge import add_judge_scores
from areno.scoring.judge_readers import RoleJudge, Verdict, strip_reasoning
from areno.scoring.pool import no_reward_error
from areno.types import RewardOutcome, RewardRecord
from tests.helpers.judged import judging_of, record
from tests.helpers.tiny_backend import model_config

# Questions ------------------------------------------------------------------------------------------------------------


class Written:
    """A reader whose verdict is a function of the question: probabilities of the labels. None: it fails."""

    is_early = False

    def __init__(self, judge: Callable[[str], Sequence[float] | None]):
        self._judge, self.questions = judge, []

    def ask(self, question: str) -> Future[Verdict]:
        self.questions.append(question)
        future: Future[Verdict] = Future()
        found = self._judge(question)
        future.set_result(Verdict(status="error", message="down") if found is None else Verdict(tuple(found)))
        return future

    def answer_questions(self, score: Any, write: Any) -> None:
        pass


def questions_of(found: RewardRecord, prompt: Any = "1+1?", **settings: Any) -> list[str]:
    config, reader = JudgeConfig(path="m", **settings), Written(lambda _: (0.0, 1.0))
    judging_of(config, reader, prompt=prompt).add({0: found})
    return reader.questions


def test_a_template_reads_the_row_and_skips_reasoning():
    found = record("<think>hm, 3?</think>\n2", answer_kind={"unit": "apples"}, solutions=["2", "two"])
    template = "{prompt}|{completion}|{solutions}|{answer_kind}|{{}}"
    assert questions_of(found, template=template) == ['1+1?|2|2 or two|{"unit": "apples"}|{}']


def test_braces_in_answers_are_not_fields():
    assert questions_of(record("{prompt} {}"), template="{completion}") == ["{prompt} {}"]


def test_unclosed_reasoning_is_no_answer():
    assert strip_reasoning("<think>so it is 2") == ""
    assert strip_reasoning("a</think> b <think> c") == "b"


@pytest.mark.parametrize(("text", "seen"), [("so it is", "[]"), ("so</think>2", "[2]")])
def test_reasoning_that_the_prompt_opens_and_no_tag_ends_is_no_answer(text, seen):
    found = record(text)
    found.rendered_completion = text
    config, reader = JudgeConfig(path="m", template="[{completion}]", refuse_blank=False), Written(gullible)
    judging_of(config, reader, opens_reasoning=True).add({0: found})
    assert reader.questions == [seen]


def test_the_prompt_of_an_agent_is_the_task_and_not_its_turns():
    found = record("2")
    found.messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "a tool"}]
    found.messages += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]
    assert questions_of(found, template="{prompt}>{completion}") == ["1+1?>2"]


def test_a_conversation_is_told_by_roles():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    found = questions_of(record("2"), prompt, template="{prompt}>{completion}")
    assert found == ["system: Be brief.\nuser: 1+1?>2"]


def test_a_field_that_a_row_lacks_is_named():
    with pytest.raises(DataError, match=r"no field solutions, .* or set reward.judge.rubric"):
        questions_of(record("2", solutions=None))
    with pytest.raises(DataError, match=r"no field hint, .* or set reward.judge.template"):
        questions_of(record("2"), template="{completion} {hint}")


# A judge of the run ---------------------------------------------------------------------------------------------------


class Pieces:
    """A tokenizer whose words begin with a token of their own, as those of sentencepiece do for digits."""

    def __init__(self, template: str | None = "{{ messages[0]['content'] }}"):
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *map(ord, text)]


def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary("", model_config(), tokenizer=tokenizer)


def test_tokens_with_which_all_labels_begin_follow_the_question(monkeypatch):
    monkeypatch.setattr("areno.scoring.judge_readers.render_generation_prompt", lambda *_, **__: "")
    monkeypatch.setattr("areno.scoring.judge_readers.encode_generation_prompt", lambda *_, **__: [7])
    reader = RoleJudge(JudgeConfig(path="m", labels=["1", "2"]), vocabulary(Pieces()))
    asked, seen = reader.ask("?"), []

    def score(rows):
        seen.extend(rows)
        return [[0.0, math.log(0.5), math.log(0.2 * row[-1] / 50)] for row in rows]

    reader.answer_questions(score, write=None)
    assert seen == [[7, 1, 49], [7, 1, 50]]
    assert asked.result().probabilities == pytest.approx((49 / 99, 50 / 99))
    assert asked.result().parts["label_mass"] == pytest.approx(0.5 * 0.2 * 99 / 50)
    with pytest.raises(ConfigError, match=r"do not differ in their first token .*\(unkind \[1, 117, "):
        RoleJudge(JudgeConfig(path="m", labels=["unkind", "unfair", "good"]), vocabulary(Pieces()))


def test_a_judge_whose_template_begins_with_reasoning_is_refused(monkeypatch):
    monkeypatch.setattr(
        "areno.scoring.judge_readers.render_generation_prompt", lambda *_, **__: "<|user|>?<|im|><think>\n"
    )
    with pytest.raises(ConfigError, match=r"reward.judge.path: is a model whose chat template begins with <think>"):
        RoleJudge(JudgeConfig(path="m"), vocabulary(Pieces()))


# Comparisons ----------------------------------------------------------------------------------------------------------


def compared(prefers: Callable[[str, str], float | None], *answers: str, **settings: Any) -> list[RewardOutcome]:
    """The outcomes of a group. prefers: from (first, second) to the probability that the first is better."""

    def judge(question: str) -> tuple[float, float] | None:
        p = prefers(*question.split("|"))
        return None if p is None else (p, 1 - p)

    config = JudgeConfig(path="m", compare=True, template="{first}|{second}", **settings)
    judging = judging_of(config, Written(judge), len(answers))
    judging.add({place: record(text) for place, text in enumerate(answers)})
    found = judging.collect_outcomes()
    return [found[place] for place in range(len(answers))]


def test_the_reward_is_the_share_of_comparisons_won():
    found = compared(lambda first, second: float(first > second), "a", "c", "b")
    assert [each.value for each in found] == [0.0, 1.0, 0.5]
    assert all(each.parts["judge/disagreement"] == 0.0 and each.parts["judge/first"] == 0.5 for each in found)


def test_a_preference_for_a_position_cancels_out_and_is_measured():
    found = compared(lambda first, second: 1.0, "a", "b", "c")
    assert [each.value for each in found] == [0.5, 0.5, 0.5]
    assert all(each.parts["judge/disagreement"] == 1.0 and each.parts["judge/first"] == 1.0 for each in found)
    mild = compared(lambda first, second: 0.3 * (first > second) + 0.6, "a", "b")
    assert [each.value for each in mild] == pytest.approx([0.35, 0.65])
    assert mild[0].parts["judge/first"] == pytest.approx(0.75)


def test_each_answer_meets_the_chosen_number_of_opponents():
    reader = Written(lambda _: (1.0, 0.0))
    config = JudgeConfig(path="m", compare=True, opponents=1, template="{first}|{second}")
    judging = judging_of(config, reader, 4)
    judging.add({place: record(text) for place, text in enumerate("abcd")})
    assert sorted(reader.questions) == sorted(
        ["a|b", "b|a", "b|c", "c|b", "c|d", "d|c", "d|a", "a|d"],
    )


def test_groups_are_compared_apart_and_equal_answers_are_even():
    reader = Written(lambda question: (1.0, 0.0) if question == "a|b" else (0.0, 1.0))
    config = JudgeConfig(path="m", compare=True, template="{first}|{second}")
    judging = judging_of(config, reader, 2)
    judging.add({0: record("a"), 3: record("x"), 2: record("x"), 1: record("b")})
    assert sorted(reader.questions) == ["a|b", "b|a"]
    assert [judging.collect_outcomes()[place].value for place in range(4)] == [1.0, 0.0, 0.5, 0.5]


def test_comparisons_that_fail_are_counted_and_no_score_rests_on_a_blank_opponent_alone():
    found = compared(lambda first, second: None, "a", "", "b")
    assert [each.value for each in found] == [None, 0.0, None]
    assert [each.parts.get("judge/failed") for each in found] == [1.0, None, 1.0]
    partly = compared(lambda first, second: None if "c" in first + second else 0.5, "a", "b", "c")
    assert [each.value for each in partly] == [0.5, 0.5, None]
    assert [each.parts["judge/failed"] for each in partly] == [0.5, 0.5, 1.0]


def test_an_answer_without_opponents_has_no_score():
    [found] = compared(lambda first, second: 1.0, "a")
    assert (found.value, found.status) == (None, "error")
    assert "no other answer to this prompt" in found.message


# Answers that judges fall for (arXiv 2507.08794) ----------------------------------------------------------------------

MASTER_KEYS = ["", " ", ".", ",", ":", "Thought process:", "Let's solve this problem step by step.", "Solution"]


def gullible(_: str) -> tuple[float, float]:
    """A judge that says yes to everything."""
    return 0.0, 1.0


def test_blank_answers_get_nothing_and_openers_of_reasoning_depend_on_the_judge():
    config, reader = JudgeConfig(path="m"), Written(gullible)
    judging = judging_of(config, reader)
    judging.add({place: record(text) for place, text in enumerate(MASTER_KEYS)})
    found = judging.collect_outcomes()
    assert [found[place].value for place in range(8)] == [0.0] * 5 + [1.0] * 3
    assert [found[place].parts["judge/blank"] for place in range(8)] == [1.0] * 5 + [0.0] * 3
    assert len(reader.questions) == 3


def test_without_the_guard_the_judge_reads_blank_answers():
    config, reader = JudgeConfig(path="m", refuse_blank=False), Written(gullible)
    judging = judging_of(config, reader)
    judging.add({place: record(text) for place, text in enumerate(MASTER_KEYS)})
    assert {each.value for each in judging.collect_outcomes().values()} == {1.0}
    assert len(reader.questions) == len(MASTER_KEYS) - 1  # "" and " " are one question


def test_a_blank_answer_loses_each_comparison():
    found = compared(lambda first, second: 0.5, "", "a", ":", "b")
    assert [each.value for each in found] == pytest.approx([0, (1 + 1 + 0.5) / 3] * 2)
    assert [each.parts["judge/blank"] for each in found] == [1, 0, 1, 0]


def test_a_blank_answer_gets_the_lowest_reward_of_a_negative_weight():
    config = JudgeConfig(path="m", weight=-1.0)
    judging = judging_of(config, Written(gullible))
    judging.add({0: record(""), 1: record("2")})
    assert judging.collect_outcomes()[0].value == 1.0
    found = compared(lambda first, second: 0.5, "", "a", "b", weight=-1.0)
    assert [each.value for each in found] == [1.0, 0.25, 0.25]


# The sum with other rewards -------------------------------------------------------------------------------------------


def test_the_weighted_score_is_added_and_failures_stay():
    records = [record("2")] * 3
    own = [RewardOutcome(1.0), RewardOutcome(None, "timeout", "late"), RewardOutcome(0.5, parts={"f": 2.0})]
    scores = [RewardOutcome(0.25, parts={"judge": 0.25}), RewardOutcome(1.0), RewardOutcome(None, "error", "no label")]
    found = add_judge_scores(records, own, scores, weight=2.0)
    assert [each.value for each in found] == [1.5, None, None]
    assert [each.status for each in found] == ["ok", "timeout", "error"]
    assert found[0].parts == {"fn": 1.0, "judge": 0.25}
    assert add_judge_scores(records, own, scores, weight=2.0, source="model")[0].parts == {"model": 1.0, "judge": 0.25}


def test_a_judge_without_a_verdict_is_named():
    found = add_judge_scores([record("2")], None, [RewardOutcome(None, "error", "no label")], weight=1.0)
    expected = r"reward.judge: no reward could be computed for any of the 1 samples; the last: error: no label"
    assert str(no_reward_error(found)) == expected
