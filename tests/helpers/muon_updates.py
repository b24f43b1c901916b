"""Updates by Muon on any layout of ranks, against float64 formulas on the whole matrices of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areno.config.optimizers import MuonConfig, OptimizerConfig
from areno.engine.train.backend import TrainBackend
from areno.layers.config import AdapterSpec
from areno.models.adapters import add_adapters, init_adapters
from areno.models.registry import build_model, load_config
from tests.helpers.lora_models import ALL
from tests.helpers.tp_ranks import Groups
from tests.helpers.train_backend import train_backend

LR, DECAY, EPS, BETAS, CLIP = 0.02, 0.1, 1e-8, (0.9, 0.999), 0.5
STEPS = 50


def optimizer(kind: Any = "muon", **muon: Any) -> OptimizerConfig:
    how = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "beta1": BETAS[0], "beta2": BETAS[1]}
    constant = {"lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0, "gradient_clipping": CLIP}
    return OptimizerConfig(type=kind, muon=MuonConfig(**muon), **how, **constant)


def backend(folder: Path, layout: Groups, adapted: bool = False, muon: Any = None, **how: Any) -> TrainBackend:
    kind = how.pop("kind", "muon")
    model = build_model(load_config(folder), dtype=how.pop("dtype", torch.float32), device="cpu", tp=layout.tp)
    model.init_weights(3)
    if adapted:
        add_adapters(model, AdapterSpec(rank=4, alpha=8.0, targets=ALL))
        init_adapters(model, 5)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".adapter." in name)
    return train_backend(model, optimizer(kind, **(muon or {})), dp=layout.dp, data=layout.data, **how)


def parts(trained: TrainBackend) -> Iterator[tuple[str, str, Any]]:
    """(name, parameter, part) of each trained tensor of the checkpoint."""
    assert trained.flat is not None
    for name in trained.flat.ranges:
        for index, part in enumerate(trained.model.tensor_parts(name)):
            yield f"{name}.{index}", name, part


def drawn(step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A gradient whose singular values differ by a factor of ten."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()) % 997)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (noise * torch.logspace(0, -1, shape[-1], dtype=torch.float64)).float()


def whole_tensors(trained: TrainBackend) -> dict[str, Tensor]:
    """The tensors of one rank alone."""
    whole = dict(trained.model.named_parameters())
    return {key: part.region(whole[name]).double().clone() for key, name, part in parts(trained)}


def step(trained: TrainBackend, number: int) -> None:
    """One update with the gradients that `drawn` returns, as this rank holds them after the backward pass."""
    assert trained.flat is not None
    assert trained.optimizer is not None
    flat = trained.flat
    buffer = torch.zeros(flat.params.numel())
    squares = 0.0
    for key, name, part in parts(trained):
        full = drawn(number, key, part.full_shape)
        squares += float(full.double().square().sum())
        part.region(buffer[flat.ranges[name]].view(flat.shapes[name])).copy_(part.shard_of(full))
    for bucket in flat.buckets:
        flat.grads[bucket.own_grads_range] = buffer[bucket.own]
    trained.optimizer.step(math.sqrt(squares))


def is_matrix(key: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in key for part in ("embed", "head", "router", "score"))


def polynomial_of_singular_values(matrix: Tensor, n_steps: int) -> Tensor:
    """The polynomial of Newton-Schulz on the singular values, without any product of matrices of the iteration."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt().clamp_min(1e-7)
    for _ in range(n_steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u @ torch.diag(values) @ v


class Formulas:
    """Muon and AdamW in float64, from the papers."""

    def __init__(self, tensors: dict[str, Tensor], settings: MuonConfig, gate_and_up_alternate: bool = False):
        self.tensors, self.settings, self.gate_and_up_alternate = tensors, settings, gate_and_up_alternate
        self.first = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        self.second = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}

    def step(self, number: int) -> None:
        grads = {key: drawn(number, key, tuple(tensor.shape)).double() for key, tensor in self.tensors.items()}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for key, tensor in self.tensors.items():
            self._update(key, tensor, grads[key] * min(1.0, CLIP / (norm + 1e-6)), number + 1)

    def _update(self, key: str, tensor: Tensor, grad: Tensor, n: int) -> None:
        if tensor.dim() >= 2:
            tensor.mul_(1 - LR * DECAY)
        if not is_matrix(key, tuple(tensor.shape)):
            first = self.first[key].mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
            second = self.second[key].mul_(BETAS[1]).add_(grad * grad, alpha=1 - BETAS[1])
            tensor -= LR * first / (1 - BETAS[0] ** n) / ((second / (1 - BETAS[1] ** n)).sqrt() + EPS)
            return
        beta = self.settings.momentum
        momentum = self.first[key].mul_(beta).add_(grad, alpha=1 - beta)
        ahead = (1 - beta) * grad + beta * momentum if self.settings.nesterov else momentum
        n = 2 if self.gate_and_up_alternate and "gate_up" in key else 1
        for matrix, slope in ((tensor[i::n], ahead[i::n]) for i in range(n)):
            rows, columns = matrix.shape
            spectral = self.settings.scale_mode == "spectral"
            scale = max(1.0, rows / columns) ** 0.5 if spectral else 0.2 * max(rows, columns) ** 0.5
            matrix -= LR * scale * polynomial_of_singular_values(slope, self.settings.ns_steps)


def largest_error(trained: TrainBackend, before: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of this rank's tensors, the distance to the expected ones divided by the distance that the whole tensor moved."""
    whole = dict(trained.model.named_parameters())
    apart = []
    for key, name, part in parts(trained):
        mine, wanted = part.region(whole[name]).double(), part.shard_of(expected[key])
        apart.append(float((mine - wanted).norm() / (expected[key] - before[key]).norm()))
    return max(apart)


def compare(folder: Path, tp: int, stages: tuple[int, ...], cases: list[dict[str, Any]], most: float = 1e-5) -> None:
    """Each case and ZeRO stage on these ranks, after STEPS updates, against the formulas."""
    layout = Groups.of(tp)
    for case in cases:
        before = whole_tensors(backend(folder, Groups(), **case))
        formulas = Formulas({key: tensor.clone() for key, tensor in before.items()}, MuonConfig(**case.get("muon", {})))
        several = [backend(folder, layout, **case, zero_stage=stage) for stage in stages]
        for number in range(STEPS):
            formulas.step(number)
            for trained in several:
                step(trained, number)
        for stage, trained in zip(stages, several, strict=True):
            found = largest_error(trained, before, formulas.tensors)
            assert found <= most, (case, stage, found)


def same_bits(folder: Path, kind: str) -> None:
    """Data-parallel ranks that divide the optimizer against one rank, with equal gradients: weights to the bit."""
    layout = Groups.of(1)
    alone = backend(folder, Groups(), kind=kind, dtype=torch.bfloat16)
    several = [backend(folder, layout, kind=kind, dtype=torch.bfloat16, zero_stage=stage) for stage in (1, 2)]
    for number in range(5):
        for trained in (alone, *several):
            step(trained, number)
    expected = whole_tensors(alone)
    for trained in several:
        found = whole_tensors(trained)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
