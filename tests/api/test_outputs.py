"""Samples on their way to the driver: lists for who reads them, arrays for who does not."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from areno.api.session import sequence_of
from areno.engine.processes.messages import WorkerOutputs
from areno.engine.reports import RolloutStats
from areno.trainers.rows import token_arrays
from areno.types import RETURNED, TOKEN_SCORE, GenerationOutput, RolloutSequence

NUMBERS = {"tokens": int, "logprobs": float, "versions": int}


def output(tokens: list[int], versions: list[int] | None = None, **more: Any) -> GenerationOutput:
    logprobs = [-0.1 * (place + 1) for place in range(len(tokens))]  # no float32 holds these
    given = {"request_id": 7, "sample": 0, "finish_reason": "stop", **more}
    return GenerationOutput(tokens=tokens, logprobs=logprobs, versions=versions or [3] * len(tokens), **given)


def sent(*outputs: GenerationOutput) -> list[GenerationOutput]:
    """As the driver gets them."""
    message = pickle.loads(pickle.dumps(WorkerOutputs(list(outputs), RolloutStats()), pickle.HIGHEST_PROTOCOL))
    assert (type(message), message.stats) == (WorkerOutputs, RolloutStats())
    return message.outputs


def sequence() -> RolloutSequence:
    return sequence_of(sent(output([5, 6, 7]))[0])


def test_what_arrives_is_what_was_sent() -> None:
    scores = [[(1, -0.5), (2, -1.5)], [(3, -0.25)]]
    outputs = [
        output([5, 2**31 - 1], top_logprobs=scores, prompt_logprobs=[(-1.0, [(4, -1.0)])], cached_tokens=9),
        output([], finish_reason="abort", sample=1),
        output([8, 9, 10], [3, 3, 4], finish_reason=None),
        output([11], [0], sample=2),
        output([12, 13], [4, 5], finish_reason="length"),
        output([], sample=RETURNED, finish_reason="abort"),
        GenerationOutput(
            request_id=1, sample=0, tokens=[1], logprobs=[-math.inf], versions=[1 << 40], finish_reason="stop"
        ),
    ]
    arrived = sent(*outputs)
    assert arrived == outputs
    for one in arrived:
        for name, kind in NUMBERS.items():
            assert type(getattr(one, name)) is list
            assert {type(number) for number in getattr(one, name)} <= {kind}
    assert sent() == []
    assert sent(*sent(*outputs)) == outputs  # such as from a node of another machine


def test_top_scores_are_an_array_until_they_are_read() -> None:
    scores = [[(1, -0.5), (2, -1.5)], [(3, -0.25), (1, -2.0)]]
    arrived = sent(output([2, 4], top_logprobs=np.array(scores, TOKEN_SCORE)))[0]
    found = sequence_of(arrived)
    assert found.top_tokens is not None
    assert found.top_tokens.tolist() == [[1, 2, -1], [3, 1, 4]]
    assert vars(arrived)["top_logprobs"].nbytes == 4 * 12
    assert arrived.top_logprobs == scores


def test_routes_arrive_with_their_sample() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    without, arrived = sent(output([1, 2]), output([3], routes=routes))
    assert without.routes is None
    np.testing.assert_array_equal(arrived.routes, routes)
    assert arrived.routes is not None
    assert arrived.routes.dtype == np.uint8
    assert sequence_of(arrived).routes is arrived.routes


def test_numbers_are_arrays_until_they_are_read_and_one_list_from_then_on() -> None:
    found = sequence()
    arrays = token_arrays([1, 2], found)
    assert (found.n_tokens, arrays.oldest_version) == (3, 3)
    assert arrays.tokens.tolist() == [1, 2, 5, 6, 7]
    assert arrays.logprobs.tolist() == [0.0, 0.0, *output([5, 6, 7]).logprobs]
    assert all(isinstance(vars(found)[name], np.ndarray) for name in ("resp_tokens", "resp_logprobs", "resp_versions"))
    tokens = found.resp_tokens
    assert tokens == [5, 6, 7]
    assert found.resp_tokens is tokens
    tokens.append(8)
    found.resp_tokens += [9]
    assert (found.resp_tokens, found.n_tokens) == ([5, 6, 7, 8, 9], 5)
    assert arrays.tokens.tolist() == [1, 2, 5, 6, 7]  # a sample that was made of it is not changed
    found.resp_tokens = (1, 2)
    assert (found.resp_tokens, found.n_tokens) == ([1, 2], 2)


def test_what_scripts_do_with_samples() -> None:
    found, prompt = sequence(), [1, 2]
    assert prompt + found.resp_tokens == [1, 2, 5, 6, 7]
    assert (found.resp_tokens[-1:], found.resp_tokens[::2], found.resp_versions) == ([7], [5, 7], [3, 3, 3])
    assert json.loads(json.dumps(dataclasses.asdict(found))) == dataclasses.asdict(found)
    assert dataclasses.asdict(found)["resp_logprobs"] == output([5, 6, 7]).logprobs
    assert "resp_tokens=[5, 6, 7]" in repr(sequence())
    assert [field.name for field in dataclasses.fields(found)][:2] == ["resp_tokens", "resp_logprobs"]
    given = RolloutSequence(resp_tokens=[5, 6, 7], resp_logprobs=output([5, 6, 7]).logprobs, resp_versions=[3] * 3)
    assert sequence() == given
    assert given == sequence()
    assert sequence() != dataclasses.replace(given, resp_tokens=[5, 6])


@pytest.mark.parametrize("is_read", [False, True])
def test_copies_are_of_their_own(is_read: bool) -> None:
    found = sequence()
    if is_read:
        assert found.resp_tokens
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other == found
        other.resp_tokens.append(1)
        assert other != found
    shorter = dataclasses.replace(found, resp_tokens=found.resp_tokens[:1])
    assert (shorter.resp_tokens, shorter.resp_logprobs) == ([5], found.resp_logprobs)
    assert copy.copy(found) == found


def test_a_sequence_of_a_script_has_no_versions_unless_it_is_given_some() -> None:
    one, other = (RolloutSequence(resp_tokens=[1], resp_logprobs=[-1.0]) for _ in range(2))
    assert one == other
    assert token_arrays([1], one).oldest_version is None
    one.resp_versions.append(1)
    assert (one.resp_versions, other.resp_versions) == ([1], [])
    with pytest.raises(TypeError, match="resp_logprobs"):
        RolloutSequence(resp_tokens=[1])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="tokens"):
        GenerationOutput(request_id=1, sample=0, logprobs=[], versions=[], finish_reason=None)  # type: ignore[call-arg]
