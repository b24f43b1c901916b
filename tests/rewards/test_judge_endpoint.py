"""A judge at an endpoint: its verdicts, its errors, time limits and secrets."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from areno.config.judge import JudgeConfig
from areno.errors import ConfigError
from areno.scoring.judge_readers import EndpointJudge
from areno.types import RewardOutcome
from tests.helpers.endpoints import Say, endpoint
from tests.helpers.judged import judging_of, record


def judged(say: Say, *completions: str, n_samples: int = 1, **settings: Any) -> list[RewardOutcome]:
    """The outcomes of completions, judged by an endpoint."""
    with endpoint(say) as (url, _):
        config = JudgeConfig(base_url=url, model="m", **{"retries": 0, **settings})
        with EndpointJudge(config) as reader, judging_of(config, reader, n_samples) as judging:
            judging.add({place: record(text) for place, text in enumerate(completions)})
            found = judging.collect_outcomes()
    return [found[place] for place in range(len(completions))]


def question(request: Mapping[str, Any]) -> str:
    return request["messages"][0]["content"]


def test_the_score_is_the_expected_label_under_its_probabilities():
    top = {"4": 0.5, " 5": 0.2, "1": 0.1, "Hm": 0.2}
    [found] = judged(lambda _: ("4", top), "2", labels=[*"12345"])
    expected = (0.5 * 0.75 + 0.2 * 1.0 + 0.1 * 0.0) / 0.8
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert found.parts["judge"] == found.value
    assert found.parts["judge/unreadable"] == 0.0
    assert found.parts["judge/label_mass"] == pytest.approx(0.8)
    assert found.parts["judge/seconds"] > 0


@pytest.mark.parametrize(
    ("reply", "likely", "expected"),
    [
        ("Yes", {"Yes": 0.3, "y": 0.2, "NO": 0.4, "n": 0.1}, 0.5),
        ("no, it is", {"no,": 0.6, "yes": 0.2, "not": 0.2}, 0.25),
    ],
)
def test_tokens_that_begin_a_label_or_are_longer_count_for_it(reply, likely, expected):
    [found] = judged(lambda _: (reply, likely), "2")
    assert found.value == pytest.approx(expected, abs=1e-12)


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
        with EndpointJudge(config) as reader, judging_of(config, reader) as judging:
            judging.add({0: record("2")})
            assert judging.collect_outcomes()[0].value == value
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
        EndpointJudge(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY")).close()
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match=r"reward.judge.api_key_env: names a variable that the environment lacks"):
            EndpointJudge(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))
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
        EndpointJudge(JudgeConfig(base_url=url, model="m", retries=0))


def test_log_probabilities_without_a_list_are_read_as_text():
    body = b'{"choices": [{"message": {"content": "yes"}, "logprobs": {"content": [{"token": "y", "logprob": -1}]}}]}'
    assert judged(lambda _: body, "2")[0].value == 1.0


def test_a_key_that_no_request_can_carry_is_an_error_before_the_run(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "schlüssel")
    with endpoint(lambda _: "yes") as (url, _), pytest.raises(ConfigError, match="which does not answer"):
        EndpointJudge(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))


def test_the_endpoint_sees_no_other_names_of_the_environment_and_errors_hide_the_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-mine")
    told = b'{"error": {"message": "no account for sesame"}}'
    refused = pytest.raises(ConfigError, match=r"no account for \*\*\*")
    with endpoint(lambda _: (401, told)) as (url, requests), refused as caught:
        EndpointJudge(JudgeConfig(base_url=url, model="m", api_key_env="JUDGE_KEY"))
    assert "sesame" not in str(caught.value)
    assert requests[0]["key"] == "Bearer sesame"
    assert not [name for name, value in requests[0]["headers"].items() if "mine" in value]


@pytest.mark.parametrize("status", [401, 404, 400, 0])
def test_an_endpoint_that_does_not_answer_is_an_error_before_the_run(status):
    with endpoint(lambda _: status) as (url, _):
        url = url if status else "http://127.0.0.1:9/v1"
        with pytest.raises(ConfigError, match=rf"reward.judge.base_url: is {url}, which does not answer"):
            EndpointJudge(JudgeConfig(base_url=url, model="m", retries=0))


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
    assert (found.status, time.monotonic() - started < 500) == ("timeout", True)
    assert "no verdict within 1 s (reward.judge.timeout_s)" in found.message


@pytest.mark.slow
def test_an_unanswered_question_does_not_keep_the_process_alive(tmp_path):
    """Not by `close`, which an interrupted process may never reach."""
    with endpoint(lambda request: ("drip", 0.2) if "late" in question(request) else "yes") as (url, _):
        code = "from areno.config.judge import JudgeConfig\nfrom areno.scoring.judge_readers import EndpointJudge\n"
        code += f"reader = EndpointJudge(JudgeConfig(base_url='{url}', model='m'))\nreader.ask('late')\nprint('done')"
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.strip() == "done"
    assert time.monotonic() - started < 400


def test_requests_run_at_once_up_to_the_limit():
    together, most, lock = [0], [0], threading.Lock()
    both = threading.Barrier(2, timeout=200)

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
