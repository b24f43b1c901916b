"""python -m areno.bench agents, and serve."""

from __future__ import annotations

import json

import pytest

from areno.bench.__main__ import main
from areno.bench.areno_contender import sampling_page, speeds
from areno.bench.serving import ClientLoad, Clients, serving_page
from areno.bench.work import Work
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
    seconds = {"direct": [0.5, 0.4, 0.6], "agents": [0.6, 0.7, 1.9]}
    found = speeds(Work.fixed(8, 8, 256, 256), seconds, "direct")
    assert found["agents"]["slowest_s"] == 1.9
    line = sampling_page(found, title="rollout", base="direct").splitlines()[-1]
    assert line.split()[:6] == ["agents", "0.700", "s", "0.600", "to", "1.900"]


def test_agents_need_a_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--device", "cpu"]) == 2
    assert "--tokenizer: is missing; agents need one with a chat template" in capsys.readouterr().err


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
    page = serving_page(out)
    assert "direct" in page
    assert "3 clients" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve", "--tokenizer: is missing; serve needs one"),
        (f"serve --tokenizer {TOKENIZER} --samples 2", "--samples: is for other works; serve has 1 for each"),
    ],
)
def test_what_serving_needs(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments.split(), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_client_that_gets_no_answer_is_told() -> None:
    with Clients(1) as clients, pytest.raises(RuntimeError, match="a client failed: Client"):
        clients.run(
            ClientLoad(url="http://127.0.0.1:9", model="m", prompts=["a"], new_lens=[1], n_clients=1, stream=False)
        )
