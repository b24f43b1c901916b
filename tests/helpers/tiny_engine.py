"""A random Qwen3 small enough to start, decode and train in milliseconds, and what tests of the engine ask of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import SamplingConfig
from areno.config.run import EngineConfig
from areno.engine.engine import Engine
from areno.engine.train.backend import TrainBackend
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps
from areno.models.registry import build_model, load_config
from areno.schema.fields import settings
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest, SamplingParams, TrainSequence
from tests.helpers.saving import save_weights
from tests.helpers.waiting import until

VOCAB, EOS, CONTEXT = 64, 1, 512
ROLLOUT = RolloutSpec(max_running=16, max_len=96)
Outputs = Mapping[int, list[GenerationOutput]]


def model_folder(folder: Path, vocab_size: int = VOCAB, context: int = CONTEXT, **changes: Any) -> Path:
    """A folder with a config.json and no weights: for `random_init`."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # logits spread enough for the draws to depend on the weights
        "eos_token_id": EOS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def folder_with(path: Path, vocab_size: int = 65, **changes: Any) -> Path:
    """A vocabulary that ranks do not divide, and changes in config.json."""
    return model_folder(path, vocab_size, **changes)


def folder_with_weights(path: Path) -> Path:
    """Write a model folder with random weights, for transformers and peft to load."""
    model = build_model(load_config(model_folder(path)), dtype=torch.float32, device="cpu")
    model.init_weights(11)
    save_weights(model, path)
    return path


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a saved model, each from one file."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(len(file) for file in files)
    return tensors


def wait_saved(engine: Engine) -> None:
    """Until what is saved in the background is on the disk."""
    until(engine.is_saved)


def engine_spec(path: str | Path = "", devices: Sequence[str] = ("cpu",), **options: Any) -> EngineSpec:
    """Return the spec of an engine. `options` are fields of the actor's RoleSpec, of EngineConfig and of EngineSpec."""
    actor, engine, own = {"optimizer": OptimizerConfig()}, {}, {}
    for name, value in options.items():
        part = actor if name in RoleSpec.__dataclass_fields__ else engine if name in settings(EngineConfig) else own
        part[name] = value
    role = RoleSpec(path=str(path), **actor)
    return EngineSpec(actor=role, devices=list(devices), engine=EngineConfig(**engine), **own)


def spec(folder: Path | str, devices: int | Sequence[str] = 1, **options: Any) -> EngineSpec:
    """Return an `engine_spec` with random weights and a learning rate that shows after one step.

    devices: So many workers on the CPU, or the devices.
    """
    optimizer = OptimizerConfig(lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    # Recomputation imports torch's compiler, which takes seconds; tests of the train backend cover it.
    options = {"random_init": True, "optimizer": optimizer, "gradient_checkpointing": False, **options}
    return engine_spec(folder, ["cpu"] * devices if isinstance(devices, int) else devices, **options)


def request(request_id: int, n_samples: int = 1, length: int = 5, **params: Any) -> GenerationRequest:
    """Each id has its own prompt and seed. Without settings: up to 12 tokens drawn at temperature 1."""
    rng = random.Random(request_id)
    return GenerationRequest(
        request_id=request_id,
        prompt=[rng.randrange(2, VOCAB) for _ in range(length)],
        n_samples=n_samples,
        seed=request_id + 100,
        params=SamplingParams(**{"max_new_tokens": 12, **params}),
    )


MIXED = [
    request(0, n_samples=3),
    request(1, length=40, temperature=0.7, top_k=20),
    request(2, n_samples=2, greedy=True, ignore_eos=True),
    request(3, n_samples=4, top_p=0.8, max_new_tokens=30),
]


def rollout(engine: Engine, requests: Iterable[GenerationRequest] = MIXED) -> Outputs:
    """One rollout phase."""
    engine.begin_rollout(ROLLOUT)
    outputs = engine.generate(list(requests))
    engine.end_rollout()
    return outputs


def finish(engine: Engine, n: int) -> dict[tuple[int, int], GenerationOutput]:
    """Poll until `n` samples have come, by request id and sample."""
    outputs: dict[tuple[int, int], GenerationOutput] = {}
    while len(outputs) < n:
        for output in engine.poll(30.0):
            assert (output.request_id, output.sample) not in outputs
            outputs[output.request_id, output.sample] = output
    return outputs


def train_rows(outputs: Outputs, requests: Iterable[GenerationRequest] = MIXED) -> list[TrainSequence]:
    """A row for each sample; odd samples are good, even ones bad."""
    rows = []
    for item in requests:
        for output in outputs[item.request_id]:
            n_prompt, n_new = len(item.prompt), len(output.tokens)
            rows.append(
                TrainSequence(
                    prompt_mask=[True] * n_prompt + [False] * n_new,
                    tokens=item.prompt + output.tokens,
                    logprobs=[0.0] * n_prompt + output.logprobs,
                    advantages=[0.0] * n_prompt + [1.0 if output.sample % 2 else -0.5] * n_new,
                    reward=float(output.sample % 2),
                )
            )
    return rows


def train_on(
    backend: TrainBackend, rows: Sequence[TrainSequence], loss_fn: Any, mb_spec: MicroBatchSpec, **how: Any
) -> dict[str, float]:
    """What Engine.train does, with the backend of one rank."""
    update = UpdateSpec(mb_spec, **how)
    checked = read_rows(rows, backend.model.config.vocab_size)
    shares = divide_steps(checked, update, backend.context.dp.size, backend.role.section)
    return backend.train(shares[backend.context.dp.rank], loss_fn, update).stats


def scored(engine: Engine, role: str, token_rows: Any, temperature: float = 1.0) -> list[list[float]]:
    """Log-probabilities as lists, which compare by ==."""
    return [row.tolist() for row in engine.logprobs(role, token_rows, SamplingConfig(temperature=temperature))]


def values(engine: Engine, role: str, token_rows: Any) -> list[list[float]]:
    """Values as lists, which compare by ==."""
    return [row.tolist() for row in engine.values(role, token_rows)]


def tokens_of(outputs: Outputs) -> dict[int, list[list[int]]]:
    return {request_id: [output.tokens for output in samples] for request_id, samples in outputs.items()}


def logprobs_of(outputs: Outputs) -> list[float]:
    return [value for _, samples in sorted(outputs.items()) for output in samples for value in output.logprobs]
