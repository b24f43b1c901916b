"""python -m benchmarks agents, and serve."""

from __future__ import annotations

import json

import pytest
from aiohttp import ClientConnectorError

from benchmarks.__main__ import figures_page, main
from benchmarks.serve import ClientLoad, _send
from benchmarks.turns import speeds
from tests.helpers.agent_model import TOKENIZER, model_folder

TINY = "--device cpu --prompts 2 --samples 2 --prompt-len 6 --new-tokens 5 --repeats 1"


@pytest.mark.slow
def test_agents_are_compared_with_direct_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"agents --shape {model_folder()} --tokenizer {TOKENIZER} {TINY}"
    assert main([*command.split(), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["direct"]["relative"] == 1
    for figures in out.values():
        assert figures["tok_s"] == pytest.approx(2 * 2 * 5 / figures["rollout_s"])
        assert figures["relative"] == pytest.approx(out["direct"]["rollout_s"] / figures["rollout_s"])


def test_the_page_tells_of_slow_repeats() -> None:
    found = speeds(16_384, {"direct": [0.5, 0.4, 0.6], "agents": [0.6, 0.7, 1.9]})
    assert found["agents"]["slowest_s"] == 1.9
    lines = figures_page({**found, "note": "x"}).splitlines()
    assert lines[0].split() == ["rollout_s", "fastest_s", "slowest_s", "tok_s", "relative"]
    assert lines[2].split() == ["agents", "0.7", "0.6", "1.9", "23,406", "0.7143"]
    assert lines[3].split() == ["note", "x"]


@pytest.mark.parametrize("name", ["agents", "serve", "driver"])
def test_texts_need_a_tokenizer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--device", "cpu"]) == 2
    assert "the following arguments are required: --tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_what_clients_get_is_compared_with_direct_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"serve --shape {model_folder()} --tokenizer {TOKENIZER} --device cpu --clients 3"
    work = "--prompts 5 --prompt-len 6 --new-tokens 5 --repeats 1"
    assert main([*command.split(), *work.split(), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out.keys() == {"direct", "answers", "streams", "1 client", "3 clients"}
    for name in ("direct", "answers", "streams"):
        assert out[name]["tok_s"] == pytest.approx(5 * 5 / out[name]["rollout_s"])
        assert out[name]["relative"] == pytest.approx(out["direct"]["rollout_s"] / out[name]["rollout_s"])
    for name in ("1 client", "3 clients"):
        assert 0 < out[name]["first_token_median_s"] <= out[name]["first_token_p99_s"]


@pytest.mark.slow
def test_a_client_that_gets_no_answer_fails() -> None:
    with pytest.raises(ClientConnectorError):
        _send(ClientLoad("http://127.0.0.1:9", ["a"], [1], n_clients=1, stream=False))
