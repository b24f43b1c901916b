"""The decoder with its kernels, interpreted or on a GPU: the completions are those of the plain torch path."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from areno.engine.decoder.attention_split import AttentionSplit
from areno.kernels.attention import choose_backend
from areno.kernels.sampling import SamplingFlags, can_sample_hidden
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.models.registry import build_model
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tiny_decoder import MIXED, forward_logits, make_decoder, mixed_outputs, model, prompt, request, run


def decode_in_groups(device: str, use_graphs: bool) -> None:
    """Groups that read their prompts together draw what one pass over each row says; with few blocks, so preempted."""
    groups = [request(1, 9, n_samples=2, max_new_tokens=2), request(2, 22, n_samples=5, max_new_tokens=7)]
    decoder = make_decoder(model(device), n_blocks=14, attn_backend="sdpa", use_graphs=use_graphs)
    n_groups = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areno.engine.decoder.attention_split.MIN_SAVING", 0)

        def counted(*args, **kwargs) -> AttentionSplit:
            nonlocal n_groups
            made = split(*args, **kwargs)
            n_groups += 0 if made.prefix_groups_GR is None else int((made.prefix_groups_GR[:, 0] >= 0).sum())
            return made

        split = decoder.runner._split
        patch.setattr(decoder.runner, "_split", counted)
        for item in groups:
            decoder.submit(item)
        outputs = run(decoder)
    assert n_groups > 3
    assert decoder.stats.preemptions > 0
    for (request_id, sample), output in outputs.items():
        item = groups[request_id - 1]
        logits = forward_logits(item.prompt + output.tokens, model(device))[len(item.prompt) - 1 : -1].cpu().double()
        numbers = uniform(torch.tensor(sample_keys(item.seed, [sample])[0]), torch.arange(len(output.tokens)))
        drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), numbers[:, None], right=True)[:, 0]
        assert output.tokens == drawn.tolist()
        expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_groups_read_their_prompts_with_interpreted_kernels() -> None:
    run_interpreted(
        "from tests.engine.decoder.test_decoder_kernels import decode_in_groups; decode_in_groups('cpu', False)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
def test_groups_read_their_prompts_on_the_gpu(use_graphs: bool) -> None:
    decode_in_groups("cuda", use_graphs)


@pytest.mark.gpu
def test_on_the_gpu_fp32_gives_the_tokens_of_the_cpu() -> None:
    on_gpu = make_decoder(model("cuda"), attn_backend="sdpa", max_prefill_tokens=7)
    for item in MIXED:
        on_gpu.submit(item)
    outputs = run(on_gpu)
    for key, output in mixed_outputs().items():
        assert outputs[key].tokens == output.tokens
        assert outputs[key].logprobs == pytest.approx(output.logprobs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_what_eager_runs(dtype: torch.dtype) -> None:
    of = model("cuda", dtype)
    backend = choose_backend("native", "cuda", dtype)
    results = []
    for use_graphs in (False, True):
        decoder = make_decoder(of, use_graphs=use_graphs, attn_backend=backend)
        for _ in range(2):  # the second round replays what the first captured
            for item in MIXED:
                decoder.submit(item)
            results.append(run(decoder))
            decoder.reset_cache()
        assert (decoder.stats.graph_replays > 0) == use_graphs
    for other in results[1:]:
        agreeing = sum(other[key].tokens == output.tokens for key, output in results[0].items())
        # Padding a batch may round a bfloat16 product otherwise, and then a draw near a border goes the other way.
        assert agreeing == len(results[0]) if dtype == torch.float32 else agreeing >= len(results[0]) - 3


@pytest.mark.gpu
def test_samples_drawn_from_hidden_states_are_those_drawn_from_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    of = model("cuda", torch.bfloat16)
    found = []
    for needs_logits in (False, True):
        calls: list[int] = []

        def chosen(hidden_BD: torch.Tensor, flags: SamplingFlags, calls=calls, needs_logits=needs_logits) -> bool:
            calls.append(len(hidden_BD))
            return not needs_logits and can_sample_hidden(hidden_BD, flags)

        monkeypatch.setattr("areno.engine.decoder.runner.can_sample_hidden", chosen)
        decoder = make_decoder(of, use_graphs=True, attn_backend="varlen", max_running=64, n_blocks=512)
        for number in range(1, 9):
            decoder.submit(request(number, n_samples=8, temperature=0.5 + number / 8))
        found.append(run(decoder))
        assert max(calls) == 64
    same = [key for key, output in found[0].items() if output.tokens == found[1][key].tokens]
    assert len(same) >= 60  # a draw near the border of two tokens may go the other way
    for key in same:
        assert found[0][key].logprobs == pytest.approx(found[1][key].logprobs, abs=1e-3)


@pytest.mark.gpu
def test_graphs_see_weights_that_were_updated_in_place() -> None:
    of = build_model(model().config, dtype=torch.float32, device="cuda")
    of.load_state_dict(model().state_dict())
    decoder = make_decoder(of, use_graphs=True)
    decoder.submit(request(1))
    run(decoder)
    of.init_weights(5)
    decoder.reset_cache()
    decoder.submit(request(1))
    (output,) = run(decoder).values()
    row = prompt(1, 9) + output.tokens
    expected = forward_logits(row, of).cpu().log_softmax(-1)[8:-1].gather(1, torch.tensor(output.tokens)[:, None])
    assert output.logprobs == pytest.approx(expected.flatten().tolist(), abs=1e-3)


@pytest.mark.gpu
def test_bfloat16_logprobs_on_the_gpu_are_near_those_of_one_pass() -> None:
    of = model("cuda", torch.bfloat16)
    backend = choose_backend("native", "cuda", torch.bfloat16)
    decoder = make_decoder(of, use_graphs=True, attn_backend=backend, max_prefill_tokens=11)
    for item in MIXED:
        decoder.submit(item)
    by_id = {item.request_id: item for item in MIXED}
    differences = []
    for (request_id, _), output in run(decoder).items():
        item = by_id[request_id]
        logits = forward_logits(item.prompt + output.tokens, of)[len(item.prompt) - 1 : -1]
        expected = (logits / item.params.temperature).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(output.tokens, device="cuda")[:, None]).flatten().tolist()
        differences += [abs(a - b) for a, b in zip(output.logprobs, expected, strict=True)]
    assert sum(differences) / len(differences) < 0.03


def test_no_number_of_rows_has_kernels_compiled_again() -> None:
    """The rows of a batch are read at addresses whose alignment depends on how many rows there are."""
    paged, sampling = pytest.importorskip("areno.kernels.paged.triton"), import_module("areno.kernels.sampling.triton")
    of_rows = {"slots_ptr", "positions_ptr", "lengths_ptr", "shared_ptr", "n_parts", "own_splits", "n_group_splits"}
    n_found = 0
    delta = import_module("areno.kernels.delta.triton")
    kernels = paged._split_kernel, paged._combine_splits_kernel, sampling._scan_kernel, sampling._draw_kernel
    for kernel in (*kernels, delta._convolve_kernel, delta._head_kernel):
        for param in kernel.params:
            if param.name in of_rows:
                n_found += 1
                is_number = not param.name.endswith("_ptr")
                assert param.do_not_specialize if is_number else param.do_not_specialize_on_alignment, param.name
    assert n_found == 15
