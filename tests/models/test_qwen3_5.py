"""What only Qwen3.5 has: recurrent states in an engine, text within a model with images, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from areno.bench.device import min_decode_s, min_prefill_s
from areno.bench.work import Workload, model_folder
from areno.config.experiments import ExperimentConfig
from areno.config.layout import Layout
from areno.config.models import ModelConfig, OptimizerConfig
from areno.cost.flops import TokenCost
from areno.cost.time import Rates
from areno.engine.engine import Engine
from areno.errors import EngineError
from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_step
from areno.models.known_shapes import resolve_model_config
from areno.models.parameters import n_parameters
from areno.models.registry import layout_problems, load_config, parse_config
from areno.plan.plan import engine_problems
from areno.types import GenerationRequest, SamplingParams
from tests.helpers.delta_loop import random_tokens, random_weights
from tests.helpers.family_cases import CASES, SHAPE, random_model, read_and_saved_as_text
from tests.helpers.family_engines import step
from tests.helpers.family_rollouts import decode, trained_logprobs
from tests.helpers.interpreted import run_interpreted
from tests.helpers.lora_models import apart
from tests.helpers.published import VISION
from tests.helpers.tiny_engine import request, rollout, scored, spec
from tests.helpers.two_ranks import load, random_rows

TEXT = CASES["qwen3.5"][1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("qwen3.5", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_rollouts_agree_with_training_over_updates(folder: Path) -> None:
    """Each rollout begins anew with weights that were changed."""
    with Engine(spec(folder, random_init=False), "inline") as engine:
        for _ in range(3):
            _, sampled, trained, stats = step(engine)
            assert apart(sampled, trained) < 1e-4
            assert stats["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "adam_8bit"])
def test_a_run_goes_on_from_its_state(kind: Any, folder: Path, tmp_path: Path) -> None:
    """The weights of convolutions have three dimensions."""
    optimizer = OptimizerConfig(type=kind, lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    settings = spec(folder, random_init=False, optimizer=optimizer)
    with Engine(settings, "inline") as engine:
        step(engine)
        engine.save_state(str(tmp_path / "state"))
        expected = step(engine)[2]
        assert engine.is_state_written(wait=True)
    with Engine(settings, "inline") as engine:
        engine.load_state(str(tmp_path / "state"))
        assert step(engine)[2] == expected


def test_a_later_turn_is_computed_from_its_first_token(folder: Path) -> None:
    """Keys of the first turn are in the cache, but no state that goes with them."""
    with Engine(spec(folder, random_init=False), "inline") as engine:
        first = request(0, length=40)
        [found] = rollout(engine, [first])[0]
        second = GenerationRequest(
            request_id=1,
            prompt=[*first.prompt, *found.tokens, 5, 6],
            n_samples=2,
            seed=1,
            params=SamplingParams(max_new_tokens=20, ignore_eos=True),
        )
        outputs = rollout(engine, [second])[1]
        rows = [[*second.prompt, *out.tokens] for out in outputs]
        trained = [line[len(second.prompt) :] for line in scored(engine, "actor", rows)]
        assert apart([out.logprobs for out in outputs], trained) < 1e-4
        assert [out.cached_tokens for out in outputs] == [0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_model_with_images(tied: bool, tmp_path: Path) -> None:
    """It is read, and saved as a text model. Layers that predict more tokens at once are left alone."""
    torch.manual_seed(0)
    text = {**SHAPE, **TEXT, "tie_word_embeddings": tied}
    whole = transformers.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    reference = transformers.Qwen3_5ForConditionalGeneration(whole).eval()
    reference.save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    values = json.loads(file.read_text())
    values["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    file.write_text(json.dumps(values))
    rows = random_rows(101, (20, 7))
    model, expected, again = read_and_saved_as_text(reference, tmp_path / "in", rows, "Qwen3_5ForCausalLM")
    assert (model.head is None) == tied
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


def decode_with_kernels(folder: str, device: str, use_graphs: bool) -> None:
    """What the kernels sample is what one pass of plain torch says, in fp32."""
    plain, model = load(Path(folder)), load(Path(folder)).to(device)
    settings = ({}, {"max_prefill_tokens": 7, "n_blocks": 21}) if device == "cuda" else ({"n_blocks": 21},)
    for changes in settings:
        outputs, decoder = decode(model, use_graphs=use_graphs, **changes)
        assert (decoder.stats.graph_replays > 0) == use_graphs
        with mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=False):
            expected = trained_logprobs(plain, outputs)
        assert apart([out.logprobs for out in outputs.values()], expected) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-experts"])
def test_decoding_with_interpreted_kernels(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    run_interpreted(
        f"from tests.models.test_qwen3_5 import decode_with_kernels as f; f({str(tmp_path)!r}, 'cpu', False)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-experts"])
def test_decoding_on_the_gpu(case: str, use_graphs: bool, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    decode_with_kernels(str(tmp_path), "cuda", use_graphs)


@pytest.mark.gpu
def test_chunks_and_steps_on_the_gpu_are_those_of_the_cpu() -> None:
    weights, given, slots = random_weights(), random_tokens(300), torch.tensor([2, 0])
    on_gpu = DeltaWeights(*(each.cuda() if isinstance(each, torch.Tensor) else each for each in weights))
    starts = [0, 130, 131, 300]
    expected, behind = delta_rows(
        given, weights, RowChunks.from_starts(starts, torch.device("cpu")), return_states=True
    )
    found, after = delta_rows(
        given.cuda(), on_gpu, RowChunks.from_starts(starts, torch.device("cuda")), return_states=True
    )
    assert behind is not None
    assert after is not None
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)
    for ours, theirs in zip(after, behind, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-3)
    for dtype in (torch.float32, torch.bfloat16):
        one, states = given[:2].to(dtype), DeltaStates(behind.inputs_SXw.to(dtype), behind.matrices_SHKV)
        their_states = DeltaStates(*(each.cuda() for each in states))
        expected = delta_step(one, weights, states, slots)
        found = delta_step(one.cuda(), on_gpu, their_states, slots.cuda())
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2)
        torch.testing.assert_close(their_states.matrices_SHKV.cpu(), states.matrices_SHKV, atol=1e-4, rtol=1e-3)


def test_what_states_do_not_allow_is_refused(folder: Path) -> None:
    config = load_config(folder)
    [problem] = layout_problems(config, Layout(2, 1, 2))
    assert str(problem).startswith("engine.cp_size: is 2, but the model has layers with a recurrent state")
    [problem] = layout_problems(config, Layout.single_replica(4))
    assert "2 (linear key heads)" in str(problem)
    experiment = ExperimentConfig(experiment_name="e", actor=ModelConfig(path="x"))
    assert not [*engine_problems(experiment, config, "cpu")]
    experiment.engine.exact = True
    [problem] = engine_problems(experiment, config, "cpu")
    assert str(problem).startswith("engine.exact: is true, but training and decoding compute the recurrent states")
    with pytest.raises(EngineError, match=r"engine\.exact is not supported for a model with recurrent states"):
        Engine(spec(folder, random_init=False, exact=True), "inline")


def test_qwen3_6_is_the_same_family() -> None:
    """The fields of its published config.json, which names the architecture of Qwen3.5."""
    text = {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }
    values = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    config, known = parse_config(values, "config.json"), resolve_model_config("Qwen/Qwen3.6-27B", "actor.path")
    assert replace(config, hf={}) == replace(known, hf={})
    assert 26.8e9 < n_parameters(config) < 27e9


def test_the_shape_of_the_4b_model(tmp_path: Path) -> None:
    hybrid = TokenCost.from_config(load_config(model_folder("qwen3.5-4b", tmp_path)[0]), 2)
    assert hybrid.kv_bytes == 8 * 2 * 4 * 256 * 2
    assert hybrid.attn_flops == 8 * 16 * 256 * 2 * 2
    assert hybrid.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


PLAIN = TokenCost(n_params=100, body_params=70, head_params=30, kv_bytes=10, attn_flops=4, itemsize=2)


def test_floors_move_states_twice_in_a_step_and_once_behind_a_prompt() -> None:
    work = Workload.fixed(n_prompts=2, n_samples=2, prompt_len=10, new_tokens=3)
    moving = Rates(copy_bytes_s=100.0, matmul_flops_s=1e12)
    cost = replace(PLAIN, state_bytes=50, rule_flops=7.0)
    for shared in (False, True):
        more = min_decode_s(cost, work, moving, shared=shared) - min_decode_s(PLAIN, work, moving, shared=shared)
        assert more == pytest.approx(2 * 4 * 2 * 50 / 100)
    assert min_prefill_s(cost, work, moving) - min_prefill_s(PLAIN, work, moving) == pytest.approx(4 * 50 / 100)
    multiplying = Rates(copy_bytes_s=1e12, matmul_flops_s=10.0)
    more = min_decode_s(cost, work, multiplying, shared=True) - min_decode_s(PLAIN, work, multiplying, shared=True)
    assert more == pytest.approx(2 * 4 * 7 / 10)
    assert min_prefill_s(cost, work, multiplying) - min_prefill_s(PLAIN, work, multiplying) == pytest.approx(
        20 * 7 / 10
    )
