"""The schedule of the learning rate, AdamW (1711.05101), Muon and SGD as they are written down, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

_DEFAULT_LENGTH = 1000


def learning_rate(optimizer: Any, step: int, length: int | None) -> float:
    """Return the learning rate of update `step`, counted from 0. `length`: the number of updates of the run."""
    total = optimizer.lr_decay_steps or length or _DEFAULT_LENGTH
    warmup = round(optimizer.warmup_steps_proportion * total)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    lowest = optimizer.min_lr_ratio * optimizer.lr
    past = min(1.0, (step - warmup) / max(1, total - warmup))
    shares = {"constant": 1.0, "linear": 1 - past, "cosine": (1 + math.cos(math.pi * past)) / 2}
    share = shares[optimizer.lr_scheduler_type]
    return optimizer.lr if share == 1.0 else lowest + (optimizer.lr - lowest) * share


@dataclass
class Moments:
    """What Adam remembers of earlier gradients."""

    n_updates: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def optimizer_step(
    optimizer: Any, rate: float, weights: Tensors, gradient: Tensors, moments: Moments, *, clips: bool = True
) -> Tensors:
    """Return the change of each weight in one update, and bring the moments up to date."""
    norm = math.sqrt(sum(float(slope.double().square().sum()) for slope in gradient.values()))
    scale = min(1.0, optimizer.gradient_clipping / (norm + 1e-6)) if clips and optimizer.gradient_clipping else 1.0
    moments.n_updates += 1
    has_biases = any(name.endswith("gate_up_proj_bias") for name in weights)
    return {
        name: _change(optimizer, rate, name, weight.double(), scale * gradient[name].double(), moments, has_biases)
        for name, weight in weights.items()
    }


# What AdamW updates in Muon, beside norms and biases.
_NOT_MATRICES = ("embed", "lm_head", "score", "router", ".gate.weight", "shared_expert_gate")


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon orthogonalises the update of a weight: the projections of layers, adapters and experts."""
    return decays(name, weight) and "conv1d" not in name and not any(part in name for part in _NOT_MATRICES)


def decays(name: str, weight: Tensor) -> bool:
    """Whether weight decay applies: not to norms and biases, some of which are stacked by expert."""
    return weight.dim() > 1 and not name.endswith("bias")


def _orthogonal(matrix: Tensor, n_steps: int) -> Tensor:
    """Apply the polynomial of Newton-Schulz to the singular values of matrices (..., R, C)."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-7)
    for _ in range(n_steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u @ (values[..., None] * v)


def _gate_and_up(stack: Tensor, has_biases: bool) -> tuple[Tensor, ...]:
    """Return views of experts' matrices (E, rows, columns). With biases, as in gpt-oss, their columns alternate."""
    return (stack[..., ::2].mT, stack[..., 1::2].mT) if has_biases else stack.chunk(2, dim=1)


def _direction(settings: Any, name: str, slope: Tensor, moments: Moments, has_biases: bool) -> Tensor:
    """Return the update of Muon for a learning rate of 1."""
    beta = settings.momentum
    momentum = beta * moments.first.get(name, torch.zeros_like(slope)) + (1 - beta) * slope
    moments.first[name] = momentum
    ahead = beta * momentum + (1 - beta) * slope if settings.nesterov else momentum
    found = torch.empty_like(ahead)
    are_apart = slope.dim() == 3 and "gate_up" in name
    parts, places = ((_gate_and_up(x, has_biases) if are_apart else (x,)) for x in (ahead, found))
    for part, place in zip(parts, places, strict=True):
        rows, columns = part.shape[-2:]
        spectral = settings.scale_mode == "spectral"
        scale = max(1.0, rows / columns) ** 0.5 if spectral else 0.2 * max(rows, columns) ** 0.5
        place.copy_(scale * _orthogonal(part, settings.ns_steps))
    return found


def _change(
    optimizer: Any, rate: float, name: str, weight: Tensor, slope: Tensor, moments: Moments, has_biases: bool
) -> Tensor:
    decay = -rate * optimizer.weight_decay * weight if decays(name, weight) else torch.zeros_like(weight)
    if optimizer.type == "sgd":
        return decay - rate * slope
    if optimizer.type == "muon" and is_matrix(name, weight):
        return decay - rate * _direction(optimizer.muon, name, slope, moments, has_biases)
    beta1, beta2, n = optimizer.beta1, optimizer.beta2, moments.n_updates
    first = beta1 * moments.first.get(name, torch.zeros_like(slope)) + (1 - beta1) * slope
    second = beta2 * moments.second.get(name, torch.zeros_like(slope)) + (1 - beta2) * slope**2
    moments.first[name], moments.second[name] = first, second
    return decay - rate * (first / (1 - beta1**n)) / ((second / (1 - beta2**n)).sqrt() + optimizer.eps)
