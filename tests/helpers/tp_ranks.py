"""Train backends on tensor-parallel ranks against one alone: losses, gradients, scores and weights.

What the processes of test_shared_heads.py and test_sequence_parallel.py run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.train import gradients, zero_buffers
from areno.engine.train.backend import TrainBackend
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models.registry import build_model, load_config
from areno.specs.update import UpdateSpec
from tests.helpers import warm
from tests.helpers.train_backend import ALONE, train_backend
from tests.helpers.zero_ranks import OPTIMIZER, assert_like, assert_same_in_host, rows, small_windows

SEVERAL = MicroBatchSpec(max_tokens_per_mb=37)  # less than the longest row has


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of one of data * cp * tp ranks, in the order of areno/engine/processes/process_groups.py."""

    tp: ParallelGroup = ALONE
    cp: ParallelGroup = ALONE
    dp: ParallelGroup = ALONE
    data: ParallelGroup = ALONE

    @staticmethod
    def of(tp: int, cp: int = 1) -> Groups:
        """A collective call."""
        ranks = torch.arange(dist.get_world_size()).view(-1, cp, tp)
        return Groups(
            tp=_group(ranks.flatten(0, 1)),
            cp=_group(ranks.transpose(1, 2).flatten(0, 1)),
            dp=_group(ranks.flatten(0, 1).T),
            data=_group(ranks.flatten(1).T),
        )


def _group(ranks: torch.Tensor) -> ParallelGroup:
    if ranks.shape[1] == 1:
        return ALONE
    mine = next(row for row in ranks.tolist() if dist.get_rank() in row)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return ParallelGroup(mine.index(dist.get_rank()), len(mine), group)


def on_ranks(n: int, check: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call check(folder, *args) in n processes."""
    warm.on_ranks(_rank_main, (n, check, folder, args), n)


def _rank_main(rank: int, n: int, check: Callable[..., None], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    zero_buffers.BUCKET = 1  # a bucket for every layer
    zero_buffers.CHUNK = gradients.CHUNK = 512
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=n)
    check(folder, *args)
    dist.destroy_process_group()


def backend(folder: Path, layout: Groups, **how: Any) -> TrainBackend:
    """Of a model with weights, norms and biases from a seed."""
    made = {"head": "lm", "kind": "adam"} | how
    head, kind = made.pop("head"), made.pop("kind")
    model = build_model(load_config(folder, head), dtype=torch.float32, device="cpu", tp=layout.tp)
    model.init_weights(3)
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "score.weight" or parameter.dim() == 1:
                for part in model.tensor_parts(name):
                    full = torch.randn(part.full_shape, generator=drawn) * 0.3
                    part.region(parameter).add_(part.shard_of(full))
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    return train_backend(model, optimizer, dp=layout.dp, cp=layout.cp, data=layout.data, **made)


def train(trained: TrainBackend, n_rows: int) -> dict[str, float]:
    """One optimizer step."""
    loss_fn = value_loss_fn if trained.model.config.head == "value" else sft_loss_fn
    update = UpdateSpec(SEVERAL)
    context = trained.context
    checked = read_rows(rows(n_rows), trained.model.config.vocab_size)
    shares = divide_steps(checked, update, context.data.size, trained.role.section, None, context.cp.size)
    return trained.train(shares[context.data.rank], loss_fn, update).stats


def full_gradients(trained: TrainBackend) -> dict[str, torch.Tensor]:
    """By the name of the parameter and the place of the checkpoint tensor in it."""
    found, tp = {}, trained.model.tp
    for name, parameter in trained.model.named_parameters():
        assert parameter.grad is not None
        for index, part in enumerate(trained.model.tensor_parts(name)):
            full = torch.zeros(part.full_shape)
            for owner in range(tp.size):
                part.gather(parameter.grad, tp, owner, full if owner == tp.rank else None)
            found[f"{name}.{index}"] = full
    return found


def scores(trained: TrainBackend) -> list[np.ndarray]:
    tokens = [np.array(row.tokens) for row in rows(5)]
    if trained.model.config.head == "value":
        return [*trained.values(tokens, SEVERAL), np.array(trained.rewards(tokens, SEVERAL))]
    return trained.logprobs(tokens, SamplingConfig(temperature=0.7), SEVERAL)


def compare(folder: Path, layout: Groups, alone: dict[str, Any], **how: Any) -> None:
    """One step is that of one rank to 1e-5, and so is what follows from it, as far as rounding allows.

    alone: what the backend of one rank is given of `how`.
    """
    one, several = backend(folder, Groups(), **alone), backend(folder, layout, **alone, **how)
    for mine, wanted in zip(scores(several), scores(one), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5, rtol=1e-5)
    assert_like([train(several, 7)], [train(one, 7)], 1e-5)
    assert several.flat is not None
    if several.flat.dp.size == 1:  # every rank has the whole gradient
        expected = full_gradients(one)
        for name, grad in full_gradients(several).items():
            close = 1e-5 * float(expected[name].abs().max())
            torch.testing.assert_close(
                grad, expected[name], atol=close, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert_like([train(several, 5)], [train(one, 5)], 1e-3)
    atol = 1e-2 if alone.get("kind") == "adam_8bit" else 1e-3
    whole = dict(one.model.named_parameters())
    for name, parameter in several.model.named_parameters():
        for part, full in zip(several.model.tensor_parts(name), one.model.tensor_parts(name), strict=True):
            mine, wanted = part.region(parameter), part.shard_of(full.region(whole[name].detach()))
            torch.testing.assert_close(mine, wanted, atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    _assert_copies_are_equal(several)


def _assert_copies_are_equal(trained: TrainBackend) -> None:
    """What several ranks hold has the same bits everywhere."""
    tp = trained.model.tp
    for name, parameter in trained.model.named_parameters():
        for part in trained.model.tensor_parts(name):
            n = tp.size if part.dim is None else part.copies
            if n > 1:
                mine = part.region(parameter).flatten()
                for theirs in tp.gather_from_replicas(mine, n):
                    assert torch.equal(theirs, mine), name


def compare_in_host(folder: Path, tp: int) -> None:
    """Masters and moments in host memory against those on the device, with shards and copies of key-value heads."""
    small_windows()
    layout = Groups.of(tp)
    for kind, stage in (("adam", 0), ("adam_8bit", 0), ("sgd", 0), ("adam", 1), ("adam_8bit", 2)):
        how = {"kind": kind, "zero_stage": stage}
        plain, in_host = backend(folder, layout, **how), backend(folder, layout, **how, offload=True)
        assert [train(in_host, n) for n in (7, 5)] == [train(plain, n) for n in (7, 5)]
        assert_same_in_host(plain, in_host)
