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
    return {
        name: _change(optimizer, rate, name, weight.double(), scale * gradient[name].double(), moments)
        for name, weight in weights.items()
    }


# What AdamW updates in Muon, beside norms and biases.
_NOT_MATRICES = ("embed", "lm_head", "score", "router", ".gate.weight", "shared_expert_gate")


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon orthogonalises the update of a weight: the projections of layers, adapters and experts."""
    return weight.dim() > 1 and "conv1d" not in name and not any(part in name for part in _NOT_MATRICES)


def _orthogonal(matrix: Tensor, n_steps: int) -> Tensor:
    """Apply the polynomial of Newton-Schulz to the singular values of matrices (..., R, C)."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-7)
    for _ in range(n_steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u @ (values[..., None] * v)


def _direction(settings: Any, name: str, slope: Tensor, moments: Moments) -> Tensor:
    """Return the update of Muon for a learning rate of 1."""
    beta = settings.momentum
    momentum = beta * moments.first.get(name, torch.zeros_like(slope)) + (1 - beta) * slope
    moments.first[name] = momentum
    ahead = beta * momentum + (1 - beta) * slope if settings.nesterov else momentum
    parts = ahead.chunk(2, dim=1) if slope.dim() == 3 and "gate_up" in name else (ahead,)  # gate and up are apart
    found = []
    for part in parts:
        rows, columns = part.shape[-2:]
        spectral = settings.scale_mode == "spectral"
        scale = max(1.0, rows / columns) ** 0.5 if spectral else 0.2 * max(rows, columns) ** 0.5
        found.append(scale * _orthogonal(part, settings.ns_steps))
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


def _change(optimizer: Any, rate: float, name: str, weight: Tensor, slope: Tensor, moments: Moments) -> Tensor:
    decays = weight.dim() > 1  # norms and biases do not decay
    decay = -rate * optimizer.weight_decay * weight if decays else torch.zeros_like(weight)
    if optimizer.type == "sgd":
        return decay - rate * slope
    if optimizer.type == "muon" and is_matrix(name, weight):
        return decay - rate * _direction(optimizer.muon, name, slope, moments)
    beta1, beta2, n = optimizer.beta1, optimizer.beta2, moments.n_updates
    first = beta1 * moments.first.get(name, torch.zeros_like(slope)) + (1 - beta1) * slope
    second = beta2 * moments.second.get(name, torch.zeros_like(slope)) + (1 - beta2) * slope**2
    moments.first[name], moments.second[name] = first, second
    return decay - rate * (first / (1 - beta1**n)) / ((second / (1 - beta2**n)).sqrt() + optimizer.eps)
