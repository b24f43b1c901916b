"""Prefixes that rows share are computed once, and nothing else changes: hidden states, gradients, losses, scores."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.cost.prefix_sharing import PrefixSharing
from areno.engine.engine import Engine
from areno.engine.train import shared_prefixes
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_rows, divide_steps, row_micro_batches
from areno.engine.train.packing import LocalTokens, PrefixPass, StepBatches, pack_group, pack_tokens
from areno.engine.train.recomputation import RecomputationPolicy
from areno.engine.train.shared_prefixes import order_to_share
from areno.errors import EngineError
from areno.layers import rotary
from areno.layers.attention import PrefixKeys
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.models.registry import build_model
from areno.specs.update import UpdateSpec
from tests.helpers.family_cases import CASES, EXPERTS, random_model
from tests.helpers.in_float64 import InFloat64
from tests.helpers.shared_rows import Rows, cases, group, hidden_of_rows, n_nodes, packed, train_rows, tree
from tests.helpers.tiny_backend import VOCAB, WHOLE, make, model_config
from tests.helpers.tiny_engine import engine_spec
from tests.helpers.train_backend import train_backend
from tests.helpers.two_ranks import load

ON = PrefixSharing("on")

FAMILIES = "mistral mistral-window qwen3-window phi3-partial-tied smollm3-window olmo3 gemma3 glm4 gpt-oss-experts"


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of a few tokens share."""
    monkeypatch.setattr(shared_prefixes, "LEAST", 1)


def test_rows_that_share_nothing_are_packed_as_without_sharing() -> None:
    rows = [np.array(row) for row in ([5, 2, 3], [1, 2], [3])]
    local, plain = packed(rows, share=True), packed(rows, share=False)
    assert local.packed.shared is None
    assert torch.equal(local.tokens_n, plain.tokens_n)
    assert order_to_share(rows, ON) is None


# -- one pass ----------------------------------------------------------------------------------------------------------


def in_float64(x_NHD: torch.Tensor, cos_N1F: torch.Tensor, sin_N1F: torch.Tensor) -> torch.Tensor:
    """The rotary embedding. InFloat64 does not reach backward passes of autograd functions."""
    a, b = x_NHD.double().chunk(2, dim=-1)
    return torch.cat((a * cos_N1F - b * sin_N1F, b * cos_N1F + a * sin_N1F), dim=-1)


def gradients(model: Any, rows: Rows, share: bool, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states of all rows, and the gradient of a loss that weighs each of them by a random number."""
    model.zero_grad()
    exact = InFloat64() if next(model.parameters()).dtype == torch.float64 else contextlib.nullcontext()
    with exact:
        hidden = hidden_of_rows(model, rows, share)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed)).to(hidden.dtype)
        (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(found: torch.Tensor, expected: torch.Tensor, bar: float, name: str = "") -> None:
    scale = expected.abs().max()
    assert scale > 0, name
    assert (found - expected).abs().max() <= bar * scale, name


def models() -> tuple[Any, Any]:
    """A model in float32, and its copy in float64."""
    single, double = (
        build_model(model_config(), dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)
    )
    single.init_weights(7)
    with torch.no_grad():
        for one, other in zip(double.parameters(), single.parameters(), strict=True):
            one.copy_(other)
    return single, double


@pytest.mark.parametrize("name", cases(VOCAB))
def test_hidden_states_and_all_gradients_are_those_of_rows_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 to 1e-12. The error of float32 gradients is 2e-6 or, where larger, 1.5 times that of rows apart.

    Rounding errors depend on the loss and the processor, so medians over five losses are compared.
    """
    rows = cases(VOCAB)[name]
    single, double = models()
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(5):
        apart, shared = gradients(single, rows, False, seed), gradients(single, rows, True, seed)
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "_rotate_heads", in_float64)
            exact_apart, exact_shared = (gradients(double, rows, share, seed) for share in (False, True))
        assert_alike(exact_shared[0], exact_apart[0], 1e-12)
        assert_alike(shared[0], apart[0], 2e-6)
        assert len(exact_apart[1]) == len(list(double.parameters()))
        for key, expected in exact_apart[1].items():
            assert_alike(exact_shared[1][key], expected, 1e-12, key)
            of_both = ((found[key] - expected).abs().max() / expected.abs().max() for found in (apart[1], shared[1]))
            errors.setdefault(key, []).append(tuple(map(float, of_both)))
    for key, of_losses in errors.items():
        own_error, error = (statistics.median(of_one) for of_one in zip(*of_losses, strict=True))
        assert error <= max(2e-6, 1.5 * own_error), key


@pytest.mark.parametrize("family", FAMILIES.split())
def test_families_share(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows, norms of several kinds, layers without positions, sinks and experts."""
    monkeypatch.setattr(rotary, "_rotate_heads", in_float64)
    assert family in CASES or family in EXPERTS
    random_model(family, tmp_path)
    model = load(tmp_path).double()
    rows = [*group(14, [3, 12, 0], 101), *tree(3, 101)]
    expected, of_rows = gradients(model, rows, share=False)
    found, of_forest = gradients(model, rows, share=True)
    assert_alike(found, expected, 1e-12)
    for key, gradient in of_rows.items():
        assert_alike(of_forest[key], gradient, 1e-12, key)


def test_padding_is_a_row_of_its_own() -> None:
    """As sequence parallelism adds it."""
    rows = cases(VOCAB)["mixed"]
    packed_rows = pack_tokens(rows, torch.device("cpu"), share=True)
    model = make().model
    expected = hidden_of_rows(model, rows, share=False)
    multiple = len(packed_rows.tokens_N) + 3
    local = LocalTokens.for_rank(packed_rows, ParallelGroup(), "sdpa", multiple)
    assert len(local.tokens_n) == multiple
    hidden_ND = model(local.tokens_n, local.positions_n, local.attend)
    assert packed_rows.shared is not None
    assert_alike(hidden_ND.index_select(0, packed_rows.shared.indices_U), expected, 2e-6)


# -- steps and scores --------------------------------------------------------------------------------------------------

LOSSES = {
    "sft": sft_loss_fn,
    "grpo": partial(grpo_loss_fn, kl_coef=0.1),
    "gspo": partial(gspo_loss_fn, clip_eps=0.3),
}


def step(backend: Any, rows: list[Any], loss_fn: Any, share: Any, spec: MicroBatchSpec = WHOLE, **how: Any) -> Any:
    update = UpdateSpec(spec, **how)
    checked = read_rows(rows, VOCAB)
    (steps,) = divide_steps(checked, update, sharing=PrefixSharing(share))
    assert all(one.shares == (share == "on") for one in steps)
    return backend.train(steps, loss_fn, update)


def assert_same_step(one: Any, other: Any, found: Any, expected: Any) -> None:
    assert_alike(one.flat.grads, other.flat.grads, 2e-6)
    counts = {"computed_tokens", "row_tokens"}
    for name in expected.stats.keys() - counts:
        assert found.stats[name] == pytest.approx(expected.stats[name], rel=1e-4, abs=2e-5), name
    assert found.stats["row_tokens"] == expected.stats["row_tokens"] == expected.stats["computed_tokens"]
    assert found.stats["computed_tokens"] < found.stats["row_tokens"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["group of 8, empty answers", "mixed", "equal rows"])
def test_a_step_is_that_of_rows_apart(name: str, loss: str, recompute: bool) -> None:
    rows = train_rows(cases(VOCAB)[name])
    one, other = make(recompute=recompute), make(recompute=recompute)
    found, expected = (step(each, rows, LOSSES[loss], share) for each, share in ((one, "on"), (other, "off")))
    assert_same_step(one, other, found, expected)


@pytest.mark.parametrize("spec", [MicroBatchSpec(mini_bs=2), MicroBatchSpec(max_tokens_per_mb=30)])
def test_micro_batches_of_any_size_share(spec: MicroBatchSpec) -> None:
    rows = train_rows(cases(VOCAB)["mixed"])
    one, other = make(), make()
    found, expected = (step(one, rows, LOSSES["grpo"], "on", spec), step(other, rows, LOSSES["grpo"], "off"))
    assert_same_step(one, other, found, expected)


def test_pairs_share_their_prompt() -> None:
    rows = train_rows([row for seed in range(3) for row in group(9, [4, 6], VOCAB, seed)], prompt=9)
    one, other = make(), make()
    how = {"rows_per_unit": 2}
    found, expected = (
        step(each, rows, partial(dpo_loss_fn, beta=0.1), share, **how) for each, share in ((one, "on"), (other, "off"))
    )
    assert_same_step(one, other, found, expected)
    assert found.stats["computed_tokens"] == 3 * (9 + 4 + 6)


def test_old_logprobs_of_later_steps_come_from_shared_rows_too() -> None:
    rows = train_rows(cases(VOCAB)["mixed"])
    one, other = make(), make()
    how = {"n_minibatches": 3, "seed": 1}
    found, expected = (step(each, rows, LOSSES["grpo"], s, **how) for each, s in ((one, "on"), (other, "off")))
    for shared, apart in zip(found.old_logprobs, expected.old_logprobs, strict=True):
        np.testing.assert_allclose(shared, apart, atol=2e-5)
    assert_alike(one.flat.params, other.flat.params, 1e-4)


def test_four_steps_end_at_the_same_weights() -> None:
    """Their distance is at most a thousandth of the distance that the weights moved."""
    from areno.config.models import OptimizerConfig

    rows = train_rows(cases(VOCAB)["mixed"])
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    one, other = make(optimizer), make(optimizer)
    before = one.flat.params.clone()
    for _ in range(4):
        step(one, rows, LOSSES["grpo"], "on")
        step(other, rows, LOSSES["grpo"], "off")
    moved = (other.flat.params - before).norm()
    assert moved > 1e-2
    assert (one.flat.params - other.flat.params).norm() <= 1e-3 * moved


def test_the_prompt_of_a_group_passes_the_model_once() -> None:
    seen: list[int] = []
    backend = make()
    backend.model.embed.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    rows = [row for seed in range(4) for row in group(20, [5, 6, 7], VOCAB, seed)]
    step(backend, train_rows(rows), LOSSES["grpo"], "on")
    assert sum(seen) == 4 * (20 + 5 + 6 + 7)
    seen.clear()
    backend.score_sharing = ON
    backend.logprobs(rows, SamplingConfig(), WHOLE)
    assert sum(seen) == 4 * (20 + 5 + 6 + 7)


@pytest.mark.parametrize("name", cases(VOCAB))
def test_scores_are_those_of_rows_apart(name: str) -> None:
    rows = cases(VOCAB)[name]
    backend = make()
    expected = backend.logprobs(rows, SamplingConfig(temperature=0.7), WHOLE)
    backend.score_sharing = ON
    for spec in (WHOLE, MicroBatchSpec(max_tokens_per_mb=25), MicroBatchSpec(mini_bs=1)):
        found = backend.logprobs(rows, SamplingConfig(temperature=0.7), spec)
        for shared, apart, row in zip(found, expected, rows, strict=True):
            assert len(shared) == len(row)
            np.testing.assert_allclose(shared, apart, atol=2e-5)


def test_a_model_with_recurrent_states_does_not_share(tmp_path: Path) -> None:
    random_model("qwen3.5", tmp_path)
    backend = train_backend(load(tmp_path), None, share_prefixes="on")
    assert backend.score_sharing == backend.train_sharing == PrefixSharing("off")
    rows = group(14, [3, 12, 0], 101)
    assert all(len(scores) for scores in backend.logprobs(rows, SamplingConfig(), WHOLE))


# -- prefixes of several micro-batches ---------------------------------------------------------------------------------

LINKED = {"groups": MicroBatchSpec(max_tokens_per_mb=60), "tree": MicroBatchSpec(max_tokens_per_mb=100)}


def linked_rows(name: str) -> Rows:
    """Rows with common prefixes that do not fit one micro-batch of LINKED."""
    if name == "tree":
        return [np.concatenate([np.arange(4), row]) for row in tree(3, VOCAB, 3)]
    rows = [*group(9, [8, 11, 9, 12, 7, 10, 8], VOCAB, 1), *group(5, [4], VOCAB, 2), *group(6, [10] * 5, VOCAB, 3)]
    random.Random(1).shuffle(rows)
    return rows


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["groups", "tree"])
def test_a_step_with_linked_micro_batches_is_that_of_rows_apart(name: str, loss: str, recompute: bool) -> None:
    rows, seen = train_rows(linked_rows(name)), []
    one, other = make(recompute=recompute), make(recompute=recompute)
    ((the_step,),) = divide_steps(read_rows(rows, VOCAB), UpdateSpec(LINKED[name]), sharing=ON)
    assert any(len(group) > 1 for group in the_step.groups)
    one.model.embed.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    found = step(one, rows, LOSSES[loss], "on", LINKED[name])
    expected = step(other, rows, LOSSES[loss], "off", LINKED[name])
    assert_same_step(one, other, found, expected)
    assert sum(seen) == found.stats["computed_tokens"]
    if name == "groups":
        assert sum(seen) == n_nodes([np.array(row.tokens) for row in rows])  # each prompt once
    assert max(seen) <= LINKED[name].max_tokens_per_mb


def test_linked_micro_batches_of_float64_have_the_gradients_of_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-12, with gradients of keys and values that pass through two levels of prefixes."""
    monkeypatch.setattr(rotary, "_rotate_heads", in_float64)
    _, model = models()
    model.requires_grad_(True)
    rows = linked_rows("tree")
    expected, of_rows = gradients(model, rows, share=False)
    model.zero_grad()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected.dtype)
    starts = np.cumsum([0, *map(len, rows)])
    (batches,) = row_micro_batches([[row] for row in rows], LINKED["tree"], sharing=ON)[0]
    packs = pack_group([[rows[i] for i in batch] for batch in batches], torch.device("cpu"), share=True)
    (prefix,) = {id(packed.prefix): packed.prefix for packed in packs}.values()

    def run(packed: Any, stores: Any = None) -> torch.Tensor:
        local = LocalTokens.for_rank(packed, ParallelGroup(), "sdpa", stores=stores)
        return model(local.tokens_n, local.positions_n, local.attend)

    with InFloat64():
        prefix.begin(run)
        for batch, packed in zip(batches, packs, strict=True):
            hidden = prefix.join(run(packed)).index_select(0, packed.shared.indices_U)
            of_batch = torch.cat([weights[starts[i] : starts[i + 1]] for i in batch])
            assert_alike(hidden, torch.cat([expected[starts[i] : starts[i + 1]] for i in batch]), 1e-12)
            (hidden * of_batch).sum().backward()
        output, gradient = prefix.output_and_gradient()
        output.backward(gradient)
    for key, found in model.named_parameters():
        assert_alike(found.grad, of_rows[key], 1e-12, key)


@pytest.mark.parametrize("name", LINKED)
def test_linked_micro_batches_score_as_rows_apart(name: str) -> None:
    rows = linked_rows(name)
    backend = make()
    expected = backend.logprobs(rows, SamplingConfig(), WHOLE)
    backend.score_sharing = ON
    for shared, apart in zip(backend.logprobs(rows, SamplingConfig(), LINKED[name]), expected, strict=True):
        np.testing.assert_allclose(shared, apart, atol=2e-5)
    assert backend.passes.prefix is None


def test_old_logprobs_of_linked_micro_batches() -> None:
    rows = train_rows(linked_rows("groups"))
    one, other = make(), make()
    how = {"n_minibatches": 2, "seed": 1}
    found, expected = (
        step(each, rows, LOSSES["grpo"], s, LINKED["groups"], **how) for each, s in ((one, "on"), (other, "off"))
    )
    for shared, apart in zip(found.old_logprobs, expected.old_logprobs, strict=True):
        assert sorted(shared) == pytest.approx(sorted(apart), abs=2e-5)
    assert_alike(one.flat.params, other.flat.params, 1e-4)


def test_halved_micro_batches_stay_linked() -> None:
    rows = read_rows(train_rows(linked_rows("groups")), VOCAB)
    ((the_step,),) = divide_steps(rows, UpdateSpec(LINKED["groups"]), sharing=ON)
    before = [len(linked) for linked in the_step.groups]
    old = [torch.arange(sum(row.n_tokens for row in batch)) for batch in the_step.micro_batches]
    tokens = [row.tokens for batch in the_step.micro_batches for row in batch]
    packs = StepBatches(the_step, 1, torch.device("cpu"))
    assert packs.halve(old)
    after = [len(linked) for linked in the_step.groups]
    assert max(after) > max(before) > 1
    assert after.count(1) > before.count(1)
    for row, same in zip(tokens, itertools.chain(*the_step.micro_batches), strict=True):
        assert np.array_equal(row, same.tokens)
    assert torch.equal(torch.cat([pack.old_logprobs for _, pack in packs]), torch.cat(old))


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_a_step_of_linked_micro_batches_that_runs_out_of_memory_is_halved(
    what: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = train_rows(linked_rows("groups"))
    one, other = make(), make()
    passes = one.model if what == "forward" else one._gradients
    run, count = getattr(passes, what), itertools.count()

    def fail_once(*args: Any, **how: Any) -> Any:
        found = run(*args, **how)
        if next(count) == place:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(passes, what, fail_once)
    found = step(one, rows, LOSSES["grpo"], "on", LINKED["groups"], may_halve=True)
    assert found.n_halvings == 1
    assert_same_step(one, other, found, step(other, rows, LOSSES["grpo"], "off", LINKED["groups"]))
    assert one.passes.prefix is None


def test_prefixes_that_do_not_fit_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the micro-batch before has kept activations, which a repeated step would not."""
    backend = make(recompute=True)
    backend.passes.kept_layers = RecomputationPolicy(backend.model, lambda: 2**40)
    step(backend, train_rows(group(9, [4, 6], VOCAB)), LOSSES["grpo"], "on")
    tries = []

    def fail(*args: Any) -> None:
        tries.append(args)
        assert len(tries) < 5
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PrefixKeys, "store", fail)
    with pytest.raises(EngineError, match="out of device memory in training"):
        step(backend, train_rows(group(9, [8] * 9, VOCAB)), LOSSES["grpo"], "on", LINKED["groups"])


def test_the_gradient_of_prefixes_is_summed_in_float32() -> None:
    """In bfloat16, a sum of ones would stay 256."""
    prefix = PrefixPass(pack_tokens([np.arange(2)], torch.device("cpu")))
    hidden = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    prefix.begin(lambda packed, stores: hidden * 1)
    for _ in range(600):
        prefix.join(torch.zeros(1, 4, dtype=torch.bfloat16)).sum().backward()
    output, gradient = prefix.output_and_gradient()
    output.backward(gradient)
    assert hidden.grad is not None
    assert hidden.grad.unique().tolist() == [600]


# -- engines -----------------------------------------------------------------------------------------------------------


def test_exact_log_probabilities_are_equal_to_the_bit() -> None:
    """With and without sharing, also for prompts that end inside a span of keys."""
    found = {}
    rows = [*group(70, [9, 30], 16, 1), *group(150, [100, 3, 3], 16, 2), *tree(3, 16, turn=12)]
    for share in ("on", "off"):
        spec = engine_spec("examples/quickstart/model", exact=True, share_prefixes=share)
        with Engine(spec) as engine:
            short = [row[:128] for row in rows]
            found[share] = engine.logprobs("actor", short, SamplingConfig())
    for one, other in zip(found["on"], found["off"], strict=True):
        assert np.array_equal(one, other)


def test_share_rows_keeps_groups_together() -> None:
    spec = engine_spec("examples/quickstart/model")
    with Engine(spec) as engine:
        rows = [row for seed in range(4) for row in group(30, [5, 6], 16, seed)]
        shares, _ = divide_rows(rows, 2, engine.info, ON)
    assert sorted(itertools.chain(*shares)) == list(range(8))
    assert all({i // 2 * 2, i // 2 * 2 + 1} <= set(share) for share in shares for i in share)


def test_routes_of_shared_tokens_are_the_known_ones() -> None:
    """The decoder knows no route of a row's last token, also where a longer row continues that row."""
    one, other = group(6, [0, 4], VOCAB)
    none = np.iinfo(np.uint8).max
    routes = [np.arange(len(row), dtype=np.uint8).reshape(-1, 1, 1).repeat(2, 2) for row in (one, other)]
    for each in routes:
        each[-1] = none
    found = pack_tokens([one, other], torch.device("cpu"), routes, share=True)
    assert found.shared is not None
    assert found.routes_NLk is not None
    assert found.routes_NLk[:, 0, 0].tolist() == [*range(9), none]
    routes[0][2] = 7  # rows that disagree are packed apart
    apart = pack_tokens([one, other], torch.device("cpu"), routes, share=True)
    assert apart.shared is None
    assert apart.routes_NLk is not None
    assert len(apart.routes_NLk) == len(one) + len(other)
