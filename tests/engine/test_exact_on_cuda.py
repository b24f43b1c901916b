"""engine.exact where much is computed beside a sample: 64 samples of prompts that share blocks, and too few blocks.

On CUDA (`-m gpu`) in bf16 with layers of the sizes of Qwen3-0.6B, CUDA graphs, and library and Triton products. On a
CPU in fp32 the same code runs with a tiny model, so that a fault of a test itself shows there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.bench.work import model_folder
from areno.config.rollout import DecoderConfig, SamplingConfig
from areno.engine.engine import Engine
from areno.kernels.fixed_order import SPAN
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationRequest
from tests.helpers.parked import in_pieces, told
from tests.helpers.tiny_engine import Outputs, engine_spec, logprobs_of, request, tokens_of, train_rows

PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
# 8 prompts, shorter and longer than a span, with 8 samples each.
LENGTHS = [20, 64, 100, SPAN - 1, SPAN, SPAN + 5, SPAN + 70, 2 * SPAN + 30]


@dataclass(frozen=True)
class Case:
    """A model on a device, with nothing to train. n_new: tokens of the longest completions."""

    device: str
    shape: str
    n_layers: int
    dtype: str
    n_new: int

    @property
    def roomy(self) -> RolloutSpec:
        """All samples at once, with all the blocks that they need."""
        return RolloutSpec(max_running=64, max_len=max(LENGTHS) + self.n_new)

    def requests(self, params: dict[str, Any]) -> list[GenerationRequest]:
        """Completions of several lengths, so that what is beside a sample changes all the time."""
        lengths = [self.n_new - 5 * (number % 3) for number in range(len(LENGTHS))]
        return [
            request(number, n_samples=8, length=length, max_new_tokens=n_new, ignore_eos=True, **params)
            for number, (length, n_new) in enumerate(zip(LENGTHS, lengths, strict=True))
        ]


CPU, CUDA = Case("cpu", "tiny", 2, "float32", 16), Case("cuda:0", "qwen3-0.6b", 4, "bfloat16", 90)
pytestmark = pytest.mark.parametrize(
    ("case", "params"),
    [
        pytest.param(CPU, FILTERED, id="cpu-top-p, top-k"),
        pytest.param(CPU, PLAIN, id="cpu-plain", marks=pytest.mark.slow),
        pytest.param(CUDA, FILTERED, id="cuda-top-p, top-k", marks=pytest.mark.gpu),
        pytest.param(CUDA, PLAIN, id="cuda-plain", marks=pytest.mark.gpu),
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def engine(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path, _ = model_folder(case.shape, tmp_path_factory.mktemp("model"))
    file = Path(path) / "config.json"
    # Weights that are spread enough for completions to differ.
    changes = {"num_hidden_layers": case.n_layers, "initializer_range": 0.1}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    settings = engine_spec(path, [case.device], dtype=case.dtype, random_init=True, exact=True, optimizer=None)
    with Engine(settings, "inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def params(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def at_once(case: Case, engine: Engine, params: dict[str, Any]) -> Outputs:
    """All 64 samples, at the same time."""
    outputs, preempted = sampled(engine, [case.requests(params)], case.roomy)
    assert not preempted
    return outputs


def sampled(engine: Engine, parts: list[list[GenerationRequest]], spec: RolloutSpec) -> tuple[Outputs, int]:
    """What one part after another draws in one rollout phase, and how often a sample was preempted."""
    engine.begin_rollout(spec)
    outputs = {number: samples for part in parts for number, samples in engine.generate(part).items()}
    preempted = sum(stats.preemptions for stats in engine.rollout_stats())
    engine.end_rollout()
    return outputs, preempted


def hold_equal(outputs: Outputs, expected: Outputs) -> None:
    assert tokens_of(outputs) == tokens_of(expected)
    assert logprobs_of(outputs) == logprobs_of(expected)  # as bits: none of them is nan or 0.0


def test_training_computes_the_same_bits(case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs) -> None:
    rows = train_rows(at_once, case.requests(params))
    assert len({tuple(row.tokens) for row in rows}) > 32  # they are not all alike
    sampling = SamplingConfig(temperature=params["temperature"])
    scored = engine.logprobs("actor", [list(row.tokens) for row in rows], sampling)
    for row, again in zip(rows, scored, strict=True):
        drawn = ~np.asarray(row.prompt_mask)
        assert np.array_equal(np.asarray(row.logprobs, dtype=np.float32)[drawn], again[drawn])


def test_preempted_for_lack_of_blocks(case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs) -> None:
    """Room for the prompts once, and for a fifth of the completions."""
    n_tokens = max(sum(LENGTHS), max(LENGTHS) + case.n_new) + 64 * (case.n_new // 5)
    few = replace(case.roomy, decoder=DecoderConfig(max_kv_tokens=n_tokens))
    outputs, preempted = sampled(engine, [case.requests(params)], few)
    assert preempted
    hold_equal(outputs, at_once)


def test_32_samples_at_a_time(case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs) -> None:
    """4 prompts with 8 samples each, then the other 4."""
    requests = case.requests(params)
    outputs, _ = sampled(engine, [requests[:4], requests[4:]], case.roomy)
    hold_equal(outputs, at_once)


def test_places_for_32_samples(case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs) -> None:
    """Whenever one is done, the next one begins, and prompts are computed in chunks."""
    few = replace(case.roomy, max_running=32, decoder=DecoderConfig(max_prefill_tokens=150))
    outputs, _ = sampled(engine, [case.requests(params)[::-1]], few)
    hold_equal(outputs, at_once)


@pytest.mark.slow
def test_prompts_cut_into_chunks(case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs) -> None:
    """Chunks of numbers of tokens for which a library may choose another kernel than for their neighbours."""
    requests = case.requests(params)
    expected = {number: at_once[number][:1] for number in at_once}
    for n_tokens in (13, 45, 90, 97, 105, 111, 125, 143):
        one_by_one = replace(case.roomy, max_running=1, decoder=DecoderConfig(max_prefill_tokens=n_tokens))
        outputs, _ = sampled(engine, [[replace(each, n_samples=1) for each in requests]], one_by_one)
        hold_equal(outputs, expected)


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", [7, 64])
def test_interrupted_and_continued(
    case: Case, engine: Engine, params: dict[str, Any], at_once: Outputs, n_steps: int
) -> None:
    expected = {(number, each.sample): told(each) for number, samples in at_once.items() for each in samples}
    found = in_pieces(engine, case.roomy, case.requests(params), n_steps)
    assert {key: told(output) for key, output in found.items()} == expected
