"""Each family with layers as wide as its models have, on CUDA: rollout, log-probabilities and gradient against
transformers in float32. In bf16 ours may be as far from it as transformers' own bf16.

On a CPU the same code runs with a tiny model, so that a fault of the test itself shows there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.engine.engine import Engine
from areno.loss_fns import gspo_loss_fn, sft_loss_fn
from areno.models.registry import load_config
from areno.specs.engine import EngineSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers import tiny_shape
from tests.helpers.family_cases import CASES, SHAPE, TWO_ROPES
from tests.helpers.moe_models import GLM, OSS
from tests.helpers.tiny_engine import Outputs, request, spec, train_rows

# Prompts that share blocks, within a window and beyond it, and completions that leave it.
REQUESTS = [
    request(number, n_samples=n_samples, length=length, max_new_tokens=40, ignore_eos=True)
    for number, (length, n_samples) in enumerate([(5, 3), (70, 8), (200, 2), (100, 1), (300, 8)])
]
TINY = [request(0, n_samples=3, length=20), request(1, length=40), request(2, n_samples=2)]
WIDE = {
    **SHAPE,
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.03,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
DELTA = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# As in the models of each family: the size of a head, how many query heads share a key head, and what is rotated.
REAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 128}),
    "mistral": (transformers.MistralConfig, {"head_dim": 128, "sliding_window": 64}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 8, "intermediate_size": 2048}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            **OSS,
            "hidden_size": 1440,  # narrower than the heads, and no power of two
            "intermediate_size": 1440,
            "num_attention_heads": 32,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 64,
            "swiglu_limit": 7.0,
        },
    ),
    "phi3 mini": (
        transformers.Phi3Config,
        {"hidden_size": 1536, "num_key_value_heads": 16, "sliding_window": 127},  # heads of 96
    ),
    "phi4 mini": (
        transformers.Phi3Config,
        {
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "num_hidden_layers": 3,
            "head_dim": 256,
            "num_attention_heads": 8,
            "query_pre_attn_scalar": 256,
            "sliding_window": 64,
            "layer_types": WINDOWS,
            "rope_parameters": TWO_ROPES,
            "tie_word_embeddings": False,  # tied ones of random numbers, scaled up, say the last token again
        },
    ),
    "olmo2": (transformers.Olmo2Config, {"num_key_value_heads": 16}),
    "olmo3": (
        transformers.Olmo3Config,
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 16,
            "sliding_window": 64,
            "layer_types": WINDOWS,
            "rope_parameters": TWO_ROPES,
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "glm4": (transformers.Glm4Config, {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 2}),
    "glm4 experts": (
        transformers.Glm4MoeConfig,
        {
            **GLM,
            "head_dim": 128,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "qwen3.5": (transformers.Qwen3_5TextConfig, {**DELTA, "num_hidden_layers": 4}),
    "qwen3.5 experts": (
        transformers.Qwen3_5MoeTextConfig,
        {
            **DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
    ),
}


@dataclass(frozen=True)
class Model:
    """A folder, what is asked of it, and where."""

    folder: Path
    device: str
    requests: list[Any]

    def spec(self, dtype: str, **settings: Any) -> EngineSpec:
        settings = {"dtype": dtype, "random_init": False, "gradient_checkpointing": True, **settings}
        return replace(spec(self.folder, **settings), devices=[self.device])

    def reference(self, dtype: torch.dtype) -> Any:
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(self.folder, dtype=dtype, attn_implementation="eager").to(self.device)


@pytest.fixture(
    scope="module",
    params=["tiny gemma3", "tiny phi3", *(pytest.param(name, marks=pytest.mark.gpu) for name in REAL)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, name = tmp_path_factory.mktemp("model"), request.param.removeprefix("tiny ")
    tiny = name != request.param
    kind, extra = (CASES if tiny else REAL)[name]
    tiny_shape.random_model(kind(**{**(SHAPE if tiny else WIDE), **extra}), folder)
    return Model(folder, "cpu" if tiny else "cuda:0", TINY if tiny else REQUESTS)


def completions(lines: Iterator[Any], outputs: Outputs, requests: list[Any]) -> np.ndarray:
    """Of lines with a number for each token, those of the completions."""
    news = [len(output.tokens) for item in requests for output in outputs[item.request_id]]
    return np.concatenate([np.asarray(line, np.float64)[-n:] for line, n in zip(lines, news, strict=True)])


def logprobs_by(reference: Any, tokens: list[list[int]]) -> Iterator[torch.Tensor]:
    """Of each row, from its second token."""
    for row in tokens:
        ids = torch.tensor(row, device=reference.device)
        logits = reference(ids[None]).logits[0, :-1].float()
        yield logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def sample(engine: Engine, model: Model) -> tuple[Outputs, list[TrainSequence]]:
    """One rollout phase, and the rows for training."""
    engine.begin_rollout(RolloutSpec(max_running=16, max_len=400))
    outputs = engine.generate(model.requests)
    engine.end_rollout()
    return outputs, train_rows(outputs, model.requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_agrees_with_transformers(model: Model, dtype: str) -> None:
    with Engine(model.spec(dtype), "inline") as engine:
        outputs, rows = sample(engine, model)
        tokens = [list(row.tokens) for row in rows]
        trained = completions(iter(engine.logprobs("actor", tokens)), outputs, model.requests)
        norm = engine.train(rows, sft_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=2048)))["grad_norm"]
    sampled = completions((row.logprobs for row in rows), outputs, model.requests)

    exact = model.reference(torch.float32)
    lines = list(logprobs_by(exact, tokens))
    expected = completions((line.detach().cpu() for line in lines), outputs, model.requests)
    assert expected.std() > 0.5  # a model that says nothing would agree with anything
    news = (len(row.logprobs) - list(row.prompt_mask).index(False) for row in rows)
    torch.cat([-line[-n:] for line, n in zip(lines, news, strict=True)]).mean().backward()
    grads = [parameter.grad for parameter in exact.parameters() if parameter.grad is not None]
    expected_norm = torch.stack([grad.norm() for grad in grads]).norm().item()

    if dtype == "float32":
        for found in (sampled, trained):
            np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)
        assert norm == pytest.approx(expected_norm, rel=1e-3)
        return
    with torch.no_grad():
        lines = (line.cpu() for line in logprobs_by(model.reference(torch.bfloat16), tokens))
        theirs = np.abs(completions(lines, outputs, model.requests) - expected).mean()
    told = {name: np.abs(found - expected).mean() / theirs for name, found in (("s", sampled), ("t", trained))}
    assert max(told.values()) < 1.2, f"{told}, transformers {theirs}"
    assert norm == pytest.approx(expected_norm, rel=0.05)


def test_rounding_makes_no_ratio(model: Model) -> None:
    """In bf16 and with unchanged weights, the ratio of every update of a batch is 1 to the bit."""
    if load_config(model.folder).experts is not None:
        pytest.skip("a router may choose other experts where two are nearly equal")
    frozen = OptimizerConfig(lr=1e-30, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    with Engine(model.spec("bfloat16", optimizer=frozen), "inline") as engine:
        _, rows = sample(engine, model)
        update = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=1024), n_minibatches=3, seed=1)
        stats = engine.train(rows, partial(gspo_loss_fn, clip_eps=1e-9), update)
    assert (stats["ratio_mean"], stats["ratio_std"], stats["ratio_max"]) == (1.0, 0.0, 1.0)
    assert stats["clip_frac"] == 0.0
    assert stats["logp_abs_diff_mean"] > 0.0


def test_an_exact_engine_of_a_family(model: Model) -> None:
    config = load_config(model.folder)
    if config.delta is not None or (model.device != "cpu" and config.experts is not None):
        pytest.skip("engine.exact has no recurrent states, and on a GPU no experts")
    dtype = "float32" if model.device == "cpu" else "bfloat16"
    with Engine(model.spec(dtype, exact=True, optimizer=None), "inline") as engine:
        outputs, rows = sample(engine, model)
        trained = engine.logprobs("actor", [list(row.tokens) for row in rows])
    sampled = [output.logprobs for item in model.requests for output in outputs[item.request_id]]
    assert [list(line)[-len(new) :] for line, new in zip(trained, sampled, strict=True)] == sampled
