"""Train backends on several data-parallel ranks against one alone. What the processes of test_zero.py run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.engine.train import optimizer_offload, zero_buffers
from areno.engine.train.backend import TrainBackend
from areno.engine.train.optimizer_offload import HostBuffer
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models.registry import build_model, load_config
from areno.types import TrainSequence
from tests.helpers import warm
from tests.helpers.tiny_engine import train_on
from tests.helpers.train_backend import ALONE, train_backend

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0, gradient_clipping=0.5)
ONE_BY_ONE = MicroBatchSpec(mini_bs=1)


def rows(n: int = 7) -> list[TrainSequence]:
    """Of different lengths, so that two ranks have different numbers of them."""
    drawn = torch.Generator().manual_seed(n)
    made = []
    for index in range(n):
        length = 60 if index == 0 else 4 + index
        tokens = torch.randint(2, 60, (length,), generator=drawn).tolist()
        prompt_mask = [place < 2 for place in range(length)]
        numbers = [0.1 * place for place in range(length)]
        made.append(TrainSequence(prompt_mask, tokens, numbers, numbers, returns=numbers, values=numbers))
    return made


def backend(
    folder: Path, stage: int, dp: ParallelGroup, dtype: torch.dtype = torch.float32, **how: Any
) -> TrainBackend:
    head, kind = how.get("head", "lm"), how.get("kind", "adam")
    model = build_model(load_config(folder, head), dtype=dtype, device="cpu")
    model.init_weights(3)
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    role = {name: value for name, value in how.items() if name not in ("head", "kind")}
    return train_backend(model, optimizer, dp=dp, zero_stage=stage, **role)


def on_ranks(n: int, check: Callable[[Path, ParallelGroup], None], folder: Path) -> None:
    """Call check(folder, dp) in n processes."""
    warm.on_ranks(_rank_main, (n, check, folder), n)


def _rank_main(rank: int, n: int, check: Callable[[Path, ParallelGroup], None], folder: Path) -> None:
    torch.set_num_threads(1)
    zero_buffers.BUCKET = 1  # a bucket for every layer
    zero_buffers.CHUNK = 512
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=n)
    check(folder, ParallelGroup(rank, n, dist.group.WORLD))
    dist.destroy_process_group()


def three_steps(trained: TrainBackend, mb_spec: MicroBatchSpec = ONE_BY_ONE) -> list[dict[str, float]]:
    loss_fn = value_loss_fn if trained.model.config.head == "value" else sft_loss_fn
    return [train_on(trained, rows(n), loss_fn, mb_spec) for n in (7, 5, 3)]


def assert_like(found: list[dict[str, float]], expected: list[dict[str, float]], close: float) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "grad_zero_frac"):
            assert abs(mine[name] - wanted[name]) <= close * max(1.0, abs(wanted[name])), (name, mine, wanted)


def compare_stages(folder: Path, dp: ParallelGroup) -> None:
    """Each stage against one rank: statistics and weights after three steps, in each form of model and optimizer."""
    forms: list[dict[str, Any]] = [{}, {"gradient_checkpointing": True}, {"head": "value"}, {"kind": "adam_8bit"}]
    for how, dtype in itertools.product(forms, (torch.float32, torch.bfloat16)):
        compare_one(folder, dp, (0, 1, 2), dtype, **how)


def quick_checks(folder: Path, dp: ParallelGroup) -> None:
    """What starts so many processes once can check without much time."""
    compare_one(folder, dp, (1, 2), torch.float32)
    compare_one(folder, dp, (1, 2), torch.bfloat16, kind="adam_8bit", head="value")
    count_bytes(folder, dp)
    begin_again(folder, dp)


def compare_one(folder: Path, dp: ParallelGroup, stages: Iterable[int], dtype: torch.dtype, **how: Any) -> None:
    """These stages against one rank."""
    alone = backend(folder, 0, ALONE, dtype, **how)
    expected = three_steps(alone)
    # Gradients of one row are rounded to bf16 before they are summed, by autograd itself.
    close = 1e-5 if dtype == torch.float32 else 1e-2
    # 8-bit moments turn a difference in the last bit into one of a code now and then.
    atol = 2e-4 if how.get("kind") is None and dtype == torch.float32 else 1e-2
    for stage in stages:
        divided = backend(folder, stage, dp, dtype, **how)
        assert_like(three_steps(divided), expected, close)
        assert divided.flat is not None
        for (name, mine), wanted in zip(divided.model.named_parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        everywhere = [torch.empty_like(divided.flat.params) for _ in range(dp.size)]
        dist.all_gather(everywhere, divided.flat.params)
        assert all(torch.equal(each, divided.flat.params) for each in everywhere)


def small_windows() -> None:
    """Windows and parts of which the tiny model has several, with borders amid buckets, parameters and chunks."""
    optimizer_offload.WINDOW, optimizer_offload.PART = 768, 2 * 768


def state_of(trained: TrainBackend) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, wherever they are."""
    assert trained.flat is not None
    assert trained.optimizer is not None
    buffers = {"masters": trained.flat.masters, **trained.optimizer.moments}
    found = {name: torch.cat(of.parts) if isinstance(of, HostBuffer) else of for name, of in buffers.items()}
    return {name: tensor.clone() for name, tensor in {**found, "params": trained.flat.params}.items()}


def assert_same_in_host(plain: TrainBackend, in_host: TrainBackend) -> None:
    """To the bit, and masters and moments really are in host memory."""
    assert plain.flat is not None
    assert in_host.flat is not None
    assert in_host.optimizer is not None
    moments = in_host.optimizer.moments.values()
    assert all(isinstance(moment, HostBuffer) and len(moment.parts) > 1 for moment in moments)
    assert isinstance(in_host.flat.masters, HostBuffer) == (plain.flat.masters is not plain.flat.params)
    expected, found = state_of(plain), state_of(in_host)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def compare_in_host(folder: Path, dp: ParallelGroup) -> None:
    """Masters and moments in host memory against those on the device, with each stage and optimizer."""
    small_windows()
    kinds = ("adam", "adam_8bit", "sgd")
    for stage, kind, dtype in itertools.product((0, 1, 2), kinds, (torch.float32, torch.bfloat16)):
        plain, in_host = (backend(folder, stage, dp, dtype, kind=kind, offload=away) for away in (False, True))
        assert three_steps(in_host) == three_steps(plain)
        assert_same_in_host(plain, in_host)


def count_bytes(folder: Path, dp: ParallelGroup) -> None:
    """What each rank holds of a model with a head of its own: the whole, a part, a part of the gradients, too."""
    for stage in (0, 1, 2):
        flat = (made := backend(folder, stage, dp, torch.bfloat16)).flat
        assert flat is not None
        assert made.optimizer is not None
        n, parts = flat.params.numel(), dp.size if stage else 1
        assert flat.masters.numel() == made.optimizer.moments["exp_avg"].numel() == n // parts
        layers = [bucket for bucket in flat.buckets if 0 <= bucket.stage < len(made.model.layers)]
        assert len(flat.buckets) == (len(made.model.layers) + 2 if stage else 1)
        of_layers = sum(bucket.place.stop - bucket.place.start for bucket in layers)
        n_grads = n if stage < 2 else n - of_layers + of_layers // parts
        assert flat.grads.numel() == n_grads
        most = max(bucket.place.stop - bucket.place.start for bucket in layers)
        assert flat.workspace.numel() == (2 * most if stage == 2 else 0)


def begin_again(folder: Path, dp: ParallelGroup) -> None:
    """A rank that runs out of memory amid its backward passes repeats them alone, to the same result."""
    for stage in (1, 2):
        plain, short = (backend(folder, stage, dp) for _ in range(2))
        expected = three_steps(plain)
        failures = iter([2, 9, 13] if dp.rank == 1 else [])  # by the number of backward passes that begin
        _run_short_of_memory(short, failures)
        assert_like(three_steps(short), expected, 0.0)
        assert short.passes.kept_layers.n_less == (3 if dp.rank == 1 else 0)  # type: ignore[attr-defined]
        for mine, wanted in zip(short.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine, wanted)


def _run_short_of_memory(short: TrainBackend, failures: Any) -> None:
    """Let the backward pass of these numbers fail in the first layer, when the buckets after it are under way."""
    count, failing = 0, next(failures, None)

    def fails(_: torch.Tensor) -> None:
        nonlocal count, failing
        count += 1
        if count == failing:
            failing = next(failures, None)
            raise torch.OutOfMemoryError("CUDA out of memory")

    def hook(_module: Any, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            args[0].register_hook(fails)

    short.model.layers[0].mlp.register_forward_pre_hook(hook)

    def keep_less() -> bool:
        short.passes.kept_layers.n_less += 1  # type: ignore[attr-defined]
        return True

    short.passes.kept_layers.n_less = 0  # type: ignore[attr-defined]
    short.passes.kept_layers.recompute_more = keep_less  # type: ignore[method-assign]


def in_backward() -> bool:
    """Whether a layer is being computed again."""
    return torch._C._current_graph_task_id() != -1
