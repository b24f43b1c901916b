"""A judge: the questions, verdicts of an endpoint, comparisons, and answers that judges fall for."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from areno.config.judge import JudgeConfig
from areno.errors import ArenoError, ConfigError, DataError
from areno.rewards.judge import Judging, Task, add_judged
from areno.rewards.judge_readers import EndpointReader, Reader, RoleReader, Verdict, without_thoughts
from areno.types import RewardOutcome, RewardRecord
from tests.helpers.endpoints import Say, endpoint


def record(completion: str, prompt: str = "1+1?", **row: Any) -> RewardRecord:
    row = {"solutions": ["2"], **row}
    return RewardRecord(
        prompt=prompt, completion=completion, final_answer=completion, solutions=row.get("solutions"), record=row
    )


def judging_of(config: JudgeConfig, reader: Reader, n_samples: int = 1, prompt: Any = "1+1?", **task: Any) -> Judging:
    """A judging in which each prompt has n_samples consecutive samples."""

    def task_of(place: int) -> Task:
        return Task(range(place // n_samples * n_samples, (place // n_samples + 1) * n_samples), prompt, **task)

    return Judging(config, reader, task_of)


def judged(say: Say, *completions: str, n_samples: int = 1, **settings: Any) -> list[RewardOutcome]:
    """The outcomes of completions, judged by an endpoint."""
    with endpoint(say) as (url, _):
        config = JudgeConfig(base_url=url, model="m", **{"retries": 0, **settings})
        with EndpointReader(config) as reader, judging_of(config, reader, n_samples) as judging:
            judging.add({place: record(text) for place, text in enumerate(completions)})
            found = judging.outcomes()
    return [found[place] for place in range(len(completions))]


def question(request: Mapping[str, Any]) -> str:
    return request["messages"][0]["content"]


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

    def complete(self, score: Any) -> None:
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
    assert without_thoughts("<think>so it is 2") == ""
    assert without_thoughts("a</think> b <think> c") == "b"


@pytest.mark.parametrize(("text", "seen"), [("so it is", "[]"), ("so</think>2", "[2]")])
def test_reasoning_that_the_prompt_opens_and_no_tag_ends_is_no_answer(text, seen):
    found = record(text)
    found.rendered_completion = text
    config, reader = JudgeConfig(path="m", template="[{completion}]", refuse_blank=False), Written(gullible)
    judging_of(config, reader, opens_thoughts=True).add({0: found})
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


def test_tokens_with_which_all_labels_begin_follow_the_question(monkeypatch):
    monkeypatch.setattr("areno.rewards.judge_readers.render_generation_prompt", lambda *_, **__: "")
    monkeypatch.setattr("areno.rewards.judge_readers.encode_generation_prompt", lambda *_, **__: [7])
    reader = RoleReader(JudgeConfig(path="m", labels=["1", "2"]), Pieces(), 100)
    asked, seen = reader.ask("?"), []

    def score(rows):
        seen.extend(rows)
        return [[0.0, math.log(0.5), math.log(0.2 * row[-1] / 50)] for row in rows]

    reader.complete(score)
    assert seen == [[7, 1, 49], [7, 1, 50]]
    assert asked.result().probabilities == pytest.approx((49 / 99, 50 / 99))
    assert asked.result().parts["label_mass"] == pytest.approx(0.5 * 0.2 * 99 / 50)
    with pytest.raises(ConfigError, match=r"do not differ in their first token .*\(unkind \[1, 117, "):
        RoleReader(JudgeConfig(path="m", labels=["unkind", "unfair", "good"]), Pieces(), 100)


def test_a_judge_whose_template_begins_with_reasoning_is_refused(monkeypatch):
    monkeypatch.setattr(
        "areno.rewards.judge_readers.render_generation_prompt", lambda *_, **__: "<|user|>?<|im|><think>\n"
    )
    with pytest.raises(ConfigError, match=r"reward.judge.path: is a model whose chat template begins with <think>"):
        RoleReader(JudgeConfig(path="m"), Pieces(), 100)


# Verdicts of an endpoint ----------------------------------------------------------------------------------------------


def test_the_score_is_the_expected_label_under_its_probabilities():
    top = {"4": 0.5, " 5": 0.2, "1": 0.1, "Hm": 0.2}
    [found] = judged(lambda _: ("4", top), "2", labels=[*"12345"])
    expected = (0.5 * 0.75 + 0.2 * 1.0 + 0.1 * 0.0) / 0.8
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert found.parts["judge"] == found.value
    assert found.parts["judge/unreadable"] == 0.0
    assert found.parts["judge/label_mass"] == pytest.approx(0.8)
    assert found.parts["judge/seconds"] > 0


def test_tokens_that_begin_a_label_count_for_it():
    [found] = judged(lambda _: ("Yes", {"Yes": 0.3, "y": 0.2, "NO": 0.4, "n": 0.1}), "2")
    assert found.value == pytest.approx(0.5, abs=1e-12)


def test_tokens_longer_than_a_label_count_for_it():
    [found] = judged(lambda _: ("no, it is", {"no,": 0.6, "yes": 0.2, "not": 0.2}), "2")
    assert found.value == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(("text", "value"), [("<think>\nOkay, no", None), ("**Yes**", 1.0), (None, None)])
def test_a_model_that_begins_with_something_else_gives_no_score_by_its_noise(text, value):
    """The labels have a millionth of the probability."""
    top = {"<think>": 0.999, "no": 3e-7, "yes": 7e-7}
    [found, _] = judged(lambda request: "yes" if "fine" in question(request) else (text, top), "2", "fine")
    assert found.value == value
    assert found.parts["judge/label_mass"] == pytest.approx(1e-6)
    assert found.parts["judge/unreadable"] == float(value is None)
    if value is None:
        assert "enable_thinking=false" in found.message


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", 1.0), ("**Yes**, it is", 1.0), ("No.", 0.0), ("<think>yes?</think> no", 0.0), ("nothing", None)],
)
def test_replies_without_probabilities_are_read_as_text(text, value):
    [found, _] = judged(lambda request: "yes" if "fine" in question(request) else text, "2", "fine")
    assert found.value == value
    assert found.parts["judge/unreadable"] == float(value is None)
    if value is None:
        assert found.status == "error"
        assert "names none of no, yes: 'nothing'" in found.message


def test_an_unreadable_reply_is_asked_for_once_more():
    def say(request):
        return "yes" if len(request["messages"]) == 3 else "Well, let me see"

    assert judged(say, "2")[0].value == 1.0


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('{"reason": "r", "verdict": "yes"}', 1.0),
        ('Here: {"verdict": "No"} done', 0.0),
        ('{"verdict": "maybe"}', None),
        ("[]", None),
    ],
)
def test_json_verdicts(reply, value):
    with endpoint(lambda _: reply) as (url, requests):
        config = JudgeConfig(base_url=url, model="m", verdict="json", max_tokens=7, retries=0)
        with EndpointReader(config) as reader, judging_of(config, reader) as judging:
            judging.add({0: record("2")})
            assert judging.outcomes()[0].value == value
    schema = requests[-1]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["verdict"]["enum"] == ["no", "yes"]
    assert requests[-1]["max_tokens"] == 7


def test_an_endpoint_that_lists_fewer_tokens_is_asked_for_five(caplog):
    top = {"yes": 0.5, "no": 0.5}
    found = judged(lambda request: 400 if request.get("top_logprobs", 0) > 5 else ("yes", top), "2", "3")
    assert [each.value for each in found] == [0.5, 0.5]
    assert "the endpoint refuses top_logprobs=20 " in caplog.text
    assert "asking for top_logprobs=5" in caplog.text


@pytest.mark.parametrize(("verdict", "field"), [("json", "response_format"), ("labels", "logprobs")])
def test_an_endpoint_that_refuses_a_field_is_asked_without_it(verdict, field, caplog):
    def say(request):
        return 400 if field in request else '{"verdict": "yes"}' if verdict == "json" else "yes"

    assert [each.value for each in judged(say, "2", "3", verdict=verdict)] == [1.0, 1.0]
    assert caplog.text.count("the endpoint refuses") == 1


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with endpoint(lambda _: "yes") as (url, requests):
        EndpointReader(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY")).close()
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match=r"reward.judge.api_key_env: names a variable that the environment lacks"):
            EndpointReader(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))
    assert requests[0]["key"] == "Bearer secret"


MALFORMED = [
    b"<html>Sign in</html>",
    b'{"object": "error"}',
    b'{"choices": [',
    b'{"choices": []}',
    b'{"choices": [{"message": null}]}',
    b'{"choices": [{"message": {"content": 5}}]}',
    b'{"choices": [{"message": {"content": "yes"}, "logprobs": {"content": [{"token": "y", "top_logprobs": [5]}]}}]}',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_replies_are_reward_errors_and_refused_before_the_run(body):
    found = judged(lambda request: body if "bad" in question(request) else "yes", "bad", "2")
    assert [(each.status, each.value) for each in found] == [("error", None), ("ok", 1.0)]
    with endpoint(lambda _: body) as (url, _), pytest.raises(ConfigError, match=rf"base_url: is {url}, which does not"):
        EndpointReader(JudgeConfig(base_url=url, model="m", retries=0))


def test_log_probabilities_without_a_list_are_read_as_text():
    body = b'{"choices": [{"message": {"content": "yes"}, "logprobs": {"content": [{"token": "y", "logprob": -1}]}}]}'
    assert judged(lambda _: body, "2")[0].value == 1.0


def test_a_key_that_no_request_can_carry_is_an_error_before_the_run(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "schlüssel")
    with endpoint(lambda _: "yes") as (url, _), pytest.raises(ConfigError, match="which does not answer"):
        EndpointReader(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))


def test_the_endpoint_sees_no_other_names_of_the_environment_and_errors_hide_the_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-mine")
    told = b'{"error": {"message": "no account for sesame"}}'
    refused = pytest.raises(ConfigError, match=r"no account for \*\*\*")
    with endpoint(lambda _: (401, told)) as (url, requests), refused as caught:
        EndpointReader(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))
    assert "sesame" not in str(caught.value)
    assert requests[0]["key"] == "Bearer sesame"
    assert not [name for name, value in requests[0]["headers"].items() if "mine" in value]


@pytest.mark.parametrize("status", [401, 404, 400, 0])
def test_an_endpoint_that_does_not_answer_is_an_error_before_the_run(status):
    with endpoint(lambda _: status) as (url, _):
        url = url if status else "http://127.0.0.1:9/v1"
        with pytest.raises(ConfigError, match=rf"reward.judge.base_url: is {url}, which does not answer"):
            EndpointReader(JudgeConfig(base_url=url, model="m", retries=0))


def test_errors_and_timeouts_of_single_questions_are_reward_errors():
    slow = threading.Event()

    def say(request):
        if "late" in question(request):
            slow.wait(20)
        return 500 if "bad" in question(request) else "yes"

    found = judged(say, "bad", "late", "2", timeout_s=1.0)
    slow.set()
    assert [each.status for each in found] == ["error", "timeout", "ok"]
    assert "reward.judge.timeout_s" in found[1].message


@pytest.mark.parametrize("retries", [0, 3])
def test_the_time_limit_holds_for_a_question_with_all_attempts_however_slowly_bytes_come(retries):
    """Each byte resets the client's own limit, and each attempt begins it anew."""

    def drip(request):
        return ("drip", 0.2) if "late" in question(request) else "yes"

    started = time.monotonic()
    [found, _] = judged(drip, "late", "2", timeout_s=1.0, retries=retries)
    assert (found.status, time.monotonic() - started < 8) == ("timeout", True)
    assert "no verdict within 1 s (reward.judge.timeout_s)" in found.message


def test_an_unanswered_question_does_not_keep_the_process_alive(tmp_path):
    """Not by `close`, which an interrupted process may never reach."""
    with endpoint(lambda request: ("drip", 0.2) if "late" in question(request) else "yes") as (url, _):
        code = "from areno.config.judge import JudgeConfig\nfrom areno.rewards.judge_readers import EndpointReader\n"
        code += f"reader = EndpointReader(JudgeConfig(base_url='{url}', model='m'))\nreader.ask('late')\nprint('done')"
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "done"
    assert time.monotonic() - started < 40


def test_requests_run_at_once_up_to_the_limit():
    together, most, lock = [0], [0], threading.Lock()
    both = threading.Barrier(2, timeout=20)

    def say(request):
        if "[Answer]" not in question(request):
            return "yes"
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
        both.wait()
        with lock:
            together[0] -= 1
        return "yes"

    assert len(judged(say, *map(str, range(6)), concurrency=2)) == 6
    assert most[0] == 2


# Comparisons ----------------------------------------------------------------------------------------------------------


def compared(prefers: Callable[[str, str], float | None], *answers: str, **settings: Any) -> list[RewardOutcome]:
    """The outcomes of a group. prefers: from (first, second) to the probability that the first is better."""

    def judge(question: str) -> tuple[float, float] | None:
        p = prefers(*question.split("|"))
        return None if p is None else (p, 1 - p)

    config = JudgeConfig(path="m", compare=True, template="{first}|{second}", **settings)
    judging = judging_of(config, Written(judge), len(answers))
    judging.add({place: record(text) for place, text in enumerate(answers)})
    found = judging.outcomes()
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
    assert [judging.outcomes()[place].value for place in range(4)] == [1.0, 0.0, 0.5, 0.5]


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
    found = judging.outcomes()
    assert [found[place].value for place in range(8)] == [0.0] * 5 + [1.0] * 3
    assert [found[place].parts["judge/blank"] for place in range(8)] == [1.0] * 5 + [0.0] * 3
    assert len(reader.questions) == 3


def test_without_the_guard_the_judge_reads_blank_answers():
    config, reader = JudgeConfig(path="m", refuse_blank=False), Written(gullible)
    judging = judging_of(config, reader)
    judging.add({place: record(text) for place, text in enumerate(MASTER_KEYS)})
    assert {each.value for each in judging.outcomes().values()} == {1.0}
    assert len(reader.questions) == len(MASTER_KEYS) - 1  # "" and " " are one question


def test_a_blank_answer_loses_each_comparison():
    found = compared(lambda first, second: 0.5, "", "a", ":", "b")
    assert [each.value for each in found] == pytest.approx([0, (1 + 1 + 0.5) / 3] * 2)
    assert [each.parts["judge/blank"] for each in found] == [1, 0, 1, 0]


def test_a_blank_answer_gets_the_lowest_reward_of_a_negative_weight():
    config = JudgeConfig(path="m", weight=-1.0)
    judging = judging_of(config, Written(gullible))
    judging.add({0: record(""), 1: record("2")})
    assert judging.outcomes()[0].value == 1.0
    found = compared(lambda first, second: 0.5, "", "a", "b", weight=-1.0)
    assert [each.value for each in found] == [1.0, 0.25, 0.25]


# The sum with other rewards -------------------------------------------------------------------------------------------


def test_the_weighted_score_is_added_and_failures_stay():
    records = [record("2")] * 3
    own = [RewardOutcome(1.0), RewardOutcome(None, "timeout", "late"), RewardOutcome(0.5, parts={"f": 2.0})]
    scores = [RewardOutcome(0.25, parts={"judge": 0.25}), RewardOutcome(1.0), RewardOutcome(None, "error", "no label")]
    found = add_judged(records, own, scores, weight=2.0)
    assert [each.value for each in found] == [1.5, None, None]
    assert [each.status for each in found] == ["ok", "timeout", "error"]
    assert found[0].parts == {"fn": 1.0, "judge": 0.25}
    assert add_judged(records, own, scores, weight=2.0, source="model")[0].parts == {"model": 1.0, "judge": 0.25}


def test_a_judge_without_any_verdict_ends_the_run():
    with pytest.raises(ArenoError, match=r"reward.judge: no reward could be computed for any .* no label"):
        add_judged([record("2")], None, [RewardOutcome(None, "error", "no label")], weight=1.0)
