"""The benchmark on several devices: arguments, floors and a run."""

from __future__ import annotations

import json

import pytest

from areno.bench.__main__ import main
from areno.bench.arguments import parse
from areno.bench.device import min_decode_s, min_prefill_s
from areno.bench.work import Workload
from areno.cost.flops import TokenCost
from areno.cost.time import Rates
from areno.errors import ConfigError

COST = TokenCost(n_params=100, body_params=70, head_params=30, kv_bytes=10, attn_flops=4, itemsize=2)


def test_floors_of_several_devices() -> None:
    work, one = (
        Workload.fixed(n_prompts=2, n_samples=2, prompt_len=10, new_tokens=3),
        Rates(copy_bytes_s=50.0, matmul_flops_s=1e12),
    )
    two = one.for_devices(2)
    assert two == Rates(copy_bytes_s=100.0, matmul_flops_s=2e12)
    # Two ranks of one copy have half of all each. Two copies have all of the weights each, and half of the keys.
    assert min_decode_s(COST, work, two, shared=False) == min_decode_s(COST, work, one, shared=False) / 2
    assert min_decode_s(COST, work, two, shared=False, copies=2) == pytest.approx((400 + 440 + 400 + 480) / 100)
    assert min_prefill_s(COST, work, two, copies=2) == pytest.approx((400 + 10 * 20) / 100)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (["rollout", "--world-size", "3", "--tp-size", "2"], "multiple of --tp-size"),
        (["rollout", "--against", "transformers"], "--against: invalid choice"),
    ],
)
def test_several_devices_for_what_cannot_have_them(given: list[str], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        parse([*given, "--device", "cpu", "--shape", "tiny"])


@pytest.mark.slow
def test_a_step_on_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--world-size", "2", "--tp-size", "2", "--device", "cpu"]
    lengths = ["--prompts", "2", "--samples", "2", "--prompt-len", "8", "--new-tokens", "4", "--repeats", "1"]
    assert main(["step", "--shape", "tiny", *layout, *lengths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device_name"].startswith("2 x CPU")
    assert found["settings"]["tp_size"] == 2
    assert found["areno"]["tp_sums"] == "gloo"
    assert found["areno"]["step_s"] > 0
