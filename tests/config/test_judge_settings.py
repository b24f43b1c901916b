"""The settings of a judge: what is refused before anything starts, and the questions of the rubrics."""

from __future__ import annotations

import json

import pytest

from areno.config.judge import JudgeConfig
from areno.config.reward import RewardOnlyConfig
from areno.errors import ConfigError
from areno.schema.build import build

REMOTE = {"base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": 2.0}, r"weight: is set, but neither path nor base_url is, so there is no judge"),
        ({"path": "m", **REMOTE}, r"path: is m, but base_url is http://h/v1; the judge is one of the two"),
        ({"base_url": "http://h/v1"}, r"model: is null; name the model of the endpoint http://h/v1"),
        ({"base_url": "h:1", "model": "m"}, r"base_url: is 'h:1'; an address such as"),
        ({"path": "m", "concurrency": 2}, r"concurrency: is 2, but (reward.judge.)?base_url is null"),
        ({**REMOTE, "offload": True}, r"offload: is true, but (reward.judge.)?path is null, so no model is loaded"),
        (
            {"path": "m", "verdict": "json", "max_tokens": 48},
            r"max_tokens: is 48, but the verdict alone may take 33 tokens; raise it to at least 49",
        ),
        ({**REMOTE, "labels": ["1"]}, r"labels: is \['1'\]; at least two different labels"),
        ({**REMOTE, "labels": ["No", "no"]}, r"labels: .* at least two different labels"),
        ({**REMOTE, "labels": ["1", "10"]}, r"labels: .* where a label begins another one"),
        ({**REMOTE, "labels": ["unhelpful", "unclear", "good"]}, r"labels: .* where labels begin with the same letter"),
        ({"base_url": "http://h:port/v1", "model": "m"}, r"base_url: is 'http://h:port/v1'; an address such as"),
        ({"base_url": "http:///v1", "model": "m"}, r"base_url: is 'http:///v1'; an address such as"),
        ({**REMOTE, "compare": True, "labels": ["1", "2"]}, r"labels: .* the labels are A and B"),
        ({**REMOTE, "opponents": 2}, r"opponents: is 2, but (reward.judge.)?compare is false"),
        ({**REMOTE, "template": "Is {prompt} good?"}, r"template: has no \{completion\}, which stands for an answer"),
        ({**REMOTE, "template": "{completion} {first}"}, r"template: has \{first\}, which only .*compare=true"),
        ({**REMOTE, "template": "{first}", "compare": True}, r"template: has no \{second\}"),
        ({**REMOTE, "template": "{completion} {"}, r"template: cannot be filled in"),
        ({**REMOTE, "template": "{completion} {0}"}, r"template: cannot be filled in: \{0\} is no name"),
        ({**REMOTE, "template": "{completion}", "rubric": "quality"}, r"rubric: .* the template says"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(RewardOnlyConfig, {"reward": {"judge": settings}}, [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "http://me:sesame@h/v1"}, r"base_url: has a user name or password"),
        ({"api_key_env": "sk-sesame"}, r"api_key_env: is no name of an environment variable"),
    ],
)
def test_secrets_in_settings_are_refused_and_not_shown(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(RewardOnlyConfig, {"reward": {"judge": {**REMOTE, **settings}}}, [])
    assert "sesame" not in str(caught.value)


def test_labels_of_a_role_may_begin_with_the_same_letter():
    assert JudgeConfig(path="m", labels=["bad", "better"]).label_names == ["bad", "better"]


def test_settings_of_a_written_verdict_are_checked_together():
    judge = {"path": "m", "verdict": "json", "max_tokens": 8, "labels": ["1", "1"], "template": "{prompt}"}
    with pytest.raises(ConfigError) as caught:
        build(RewardOnlyConfig, {"reward": {"judge": judge}}, [])
    assert all(f"reward.judge.{name}: " in str(caught.value) for name in ("max_tokens", "labels", "template"))


def test_an_endpoint_may_have_any_number_of_tokens():
    assert JudgeConfig(**REMOTE, verdict="json", max_tokens=8).max_tokens == 8


def test_the_longest_label_decides_how_many_tokens_a_verdict_takes():
    """In bytes of the reply in JSON: a token has at least one."""
    config = JudgeConfig(path="m", verdict="json", labels=["no", 'so "so" \u00e9'])
    reply = json.dumps({"reason": "", "verdict": config.label_names[1]}, ensure_ascii=False)
    assert config.n_verdict_tokens == len(reply.encode()) + 1


def test_labels_may_begin_each_other_in_json():
    config = JudgeConfig(**REMOTE, verdict="json", labels=["1", "10"])
    assert config.label_names == ["1", "10"]


@pytest.mark.parametrize("rubric", ["correct", "quality"])
@pytest.mark.parametrize("compare", [False, True])
def test_rubrics_ask_about_all_that_they_need(rubric, compare):
    template = JudgeConfig(path="m", rubric=rubric, compare=compare).question_template
    text = template.format(prompt="P?", solutions="S", completion="C", first="F", second="G")
    assert ("S" in text.split("[Reference answer]\n")[-1].split()) == (rubric == "correct")
    assert ("[Answer A]\nF" in text, "[Answer B]\nG" in text, "[Answer]\nC" in text) == (compare, compare, not compare)
    labels = "A or B" if compare else "no or yes" if rubric == "correct" else "one of 1, 2, 3, 4 or 5"
    assert f"Reply with {labels}" in text
