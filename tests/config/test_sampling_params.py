"""Sampling settings: declared once, they are checked alike in a configuration and in a script."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from areno import SamplingParams
from areno.config.rollout import GenerationConfig, SamplingConfig
from areno.errors import ConfigError, DataError
from areno.plan.argument_checks import check_sampling
from areno.plan.plan import sampling_params
from areno.schema.fields import settings

WRONG: list[tuple[str, Any, str]] = [
    ("max_new_tokens", 0, "is 0; it must be more than 0"),
    ("max_new_tokens", 1.5, "is 1.5; an integer is expected"),
    ("min_new_tokens", -1, "is -1; it must be at least 0"),
    ("min_new_tokens", 17, "is 17, more than max_new_tokens=16"),
    ("temperature", -1.0, "is -1.0; it must be "),
    ("temperature", float("inf"), "is inf; a finite number is expected"),
    ("top_p", 0.0, "is 0.0; it must be more than 0"),
    ("top_p", 1.01, "is 1.01; it must be at most 1"),
    ("top_k", 0, "is 0, which keeps no token"),
    ("top_k", -2, "is -2; it must be at least -1"),
    ("frequency_penalty", 2.1, "is 2.1; it must be at most 2"),
    ("greedy", 1, "is 1; true or false is expected"),
    ("ignore_eos", None, "is null; true or false is expected"),
    ("stop", "x", "is 'x'; a list is expected"),
    ("stop", ["x", ""], "contains an empty string"),
    ("stop_token_ids", [3, 0.5], r"\[1\] is 0.5; an integer is expected"),
    ("stop_token_ids", [3, -1], r"is \[3, -1\]; token ids are at least 0"),
    ("top_k", 2**31, "is 2147483648; it must be at most 2147483647"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_configuration_and_a_script_refuse_the_same_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: {message}"):
        GenerationConfig(**{"max_new_tokens": 16, name: value})
    with pytest.raises(ConfigError, match=f"^SamplingParams.{name}: {message}"):
        check_sampling(1, SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "1", "is '1'; expected float, at least 0"),
        ("stop", [5], r"is \[5\]; expected list of str"),
        ("max_context_len", 0, "is 0; it must be more than 0"),
        ("max_prompt_len", "8", "is '8'; an integer is expected"),
    ],
)
def test_a_script_is_refused_what_a_file_may_say(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^SamplingParams.{name}: {message}"):
        check_sampling(1, SamplingParams(**{name: value}))


def test_all_wrong_values_are_reported_at_once_and_a_value_set_later_is_checked_too() -> None:
    params = SamplingParams(top_p=2.0, greedy="no")  # type: ignore[arg-type]
    params.top_k = 0
    with pytest.raises(ConfigError) as caught:
        check_sampling(1, params)
    assert {problem.key for problem in caught.value.problems} == {
        f"SamplingParams.{name}" for name in ("top_p", "greedy", "top_k")
    }
    with pytest.raises(DataError, match="sampling_params is a dict"):
        check_sampling(1, {"top_k": 1})
    with pytest.raises(ConfigError, match="n_samples: is 0"):
        check_sampling(0, SamplingParams())


def test_a_script_may_use_temperature_0_and_numbers_of_numpy() -> None:
    check_sampling(1, SamplingParams(temperature=0))
    check_sampling(1, SamplingParams(top_k=np.int64(3), top_p=np.float32(0.5), stop_token_ids=(np.int64(4),)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"temperature: is 0.0; it must be at least 1e-05"):
        GenerationConfig(temperature=0)


def test_arguments_have_the_defaults_of_the_fields_and_unknown_ones_are_refused() -> None:
    signature = inspect.signature(SamplingParams)
    assert {name: p.default for name, p in signature.parameters.items()} == asdict(SamplingParams())
    assert {name: setting.default() for name, setting in settings(SamplingParams).items()} == asdict(SamplingParams())
    assert signature.parameters["min_new_tokens"].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match="no setting 'temprature'; did you mean temperature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 0.5  # type: ignore[attr-defined]


def test_params_travel_and_compare_by_value() -> None:
    params = SamplingParams(True, 0.5, 3, 7, 9, 0.2, ["x"], [4], True, False, 8, min_new_tokens=2)
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params != SamplingParams()
    assert (params.max_context_len, params.temperature, params.max_prompt_len) == (9, 0.2, 8)


def test_a_gconfig_section_reaches_the_decoder_whole() -> None:
    values = {bool: True, int: 4, float: 0.5, list[str] | None: ["a"], list[int] | None: [5]}
    known = settings(SamplingConfig)
    changes = {name: values[setting.hint] for name, setting in known.items()} | {"skip_special_tokens": False}
    gconfig = GenerationConfig(max_tokens=99, **changes)
    params = sampling_params(gconfig)
    assert params.max_context_len == 99
    for name, setting in known.items():
        assert asdict(params)[name] == asdict(gconfig)[name]
        assert asdict(params)[name] != setting.default(), name
