"""Benchmarks of a tiny model on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areno.bench import __main__ as bench
from areno.bench.arguments import Settings, parse
from areno.cost.time import Rates

TINY_ROLLOUT = "--device cpu --prompts 2 --samples 3 --prompt-len 6 --new-tokens 5 --repeats 2"
TINY = f"{TINY_ROLLOUT} --tokens-per-mb 64"
H200 = Rates(copy_bytes_s=4.3e12, matmul_flops_s=770e12)


def settings(command: str) -> Settings:
    return parse(command.split())


def found(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert bench.main([*command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)
