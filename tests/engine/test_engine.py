"""Engine: the same in the driver's own process and in a spawned one, in and out of order, with and without errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig
from areno.engine.decoder_maker import DecoderMaker
from areno.engine.engine import Engine
from areno.engine.reports import RolloutStats
from areno.engine.worker import Worker
from areno.errors import CheckpointError, DataError, EngineError
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import GenerationOutput, GenerationRequest, TrainSequence
from tests.helpers.tiny_engine import (
    MIXED,
    ROLLOUT,
    VOCAB,
    finish,
    logprobs_of,
    model_folder,
    request,
    rollout,
    scored,
    spec,
    tokens_of,
    train_rows,
)

AT_TEMPERATURE_1 = [item for item in MIXED if item.params.temperature == 1]
LONG, ENDLESS = 80, 20_000  # tokens; the latter take half a minute: the driver does something meanwhile
CONTEXT = ENDLESS + 10
LONG_ROLLOUT = RolloutSpec(max_running=6, max_len=CONTEXT)
ROWS = [[3, 4, 5, 6], [7, 8], [9] * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_no_more_requests_are_under_way_than_asked_for(engine: Engine, at_once: int) -> None:
    expected = tokens_of(rollout(engine))
    left = {item.request_id: item.n_samples for item in MIXED}
    submitted: list[int] = []
    under_way: list[int] = []
    submit = engine.submit

    def spy(requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        submitted.extend(item.request_id for item in requests)
        submit(requests)

    def watch(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
        for output in outputs:
            left[output.request_id] -= 1
        under_way.append(sum(left[request_id] > 0 for request_id in submitted))

    engine.begin_rollout(ROLLOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", spy)
        outputs = engine.generate(MIXED, watch, at_once)
    engine.end_rollout()
    assert tokens_of(outputs) == expected
    assert max(under_way) <= at_once
    assert submitted == [item.request_id for item in MIXED]


def test_both_forms_sample_and_train_alike(engines: dict[str, Engine]) -> None:
    results = []
    for each in engines.values():
        outputs = rollout(each)
        before = scored(each, "actor", ROWS)
        stats = each.train(train_rows(outputs, AT_TEMPERATURE_1), partial(grpo_loss_fn, clip_eps=0.2))
        results.append((outputs, before, stats, scored(each, "actor", ROWS), rollout(each)))
    (outputs, before, stats, after, later), (outputs_2, _, stats_2, after_2, later_2) = results
    assert {key: len(samples) for key, samples in outputs.items()} == {0: 3, 1: 1, 2: 2, 3: 4}
    assert tokens_of(outputs) == tokens_of(outputs_2)
    assert logprobs_of(outputs) == pytest.approx(logprobs_of(outputs_2), abs=1e-5)
    assert stats.keys() == stats_2.keys()
    measured = {"memory_gib", "step_train_time_s"}
    for name in stats.keys() - measured:
        assert stats[name] == pytest.approx(stats_2[name], rel=1e-4, abs=1e-5), name
    assert stats["grad_norm"] > 0
    assert stats["logp_abs_diff_max"] < 1e-4
    for row, row_2, old in zip(after, after_2, before, strict=True):
        assert row == pytest.approx(row_2, abs=1e-4)
        assert row != pytest.approx(old, abs=1e-3)
    assert tokens_of(later) == tokens_of(later_2) != tokens_of(outputs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_and_scoring_agree(engine: Engine, temperature: float) -> None:
    requests = [request(i, n_samples=2, temperature=temperature, max_new_tokens=30) for i in range(4)]
    outputs = rollout(engine, requests)
    rows = [item.prompt + output.tokens for item in requests for output in outputs[item.request_id]]
    rescored = scored(engine, "actor", rows, temperature)
    assert [len(row) for row in rescored] == [len(row) for row in rows]
    assert all(row[0] == 0.0 for row in rescored)
    assert [v for row in rescored for v in row[5:]] == pytest.approx(logprobs_of(outputs), abs=1e-4)


@pytest.mark.slow
def test_requests_join_others_and_outputs_come_as_they_finish(engine: Engine) -> None:
    joining = [request(7, n_samples=2, max_new_tokens=5, ignore_eos=True)]
    joining.append(request(8, max_new_tokens=LONG, ignore_eos=True))
    engine.begin_rollout(LONG_ROLLOUT)
    alone = engine.generate(joining)
    engine.submit([request(i, max_new_tokens=ENDLESS, ignore_eos=True) for i in range(3)])
    assert engine.poll(0.0) == []  # nothing is finished, decoding is under way
    engine.submit(joining)
    order: list[GenerationOutput] = []
    while len(order) < 3:
        order += engine.poll(30.0)
    engine.end_rollout()
    assert [output.request_id for output in order] == [7, 7, 8]
    joined = sorted(order, key=lambda output: (output.request_id, output.sample))
    assert [output.tokens for output in joined] == [output.tokens for output in [*alone[7], *alone[8]]]
    assert (joined[2].finish_reason, len(joined[2].tokens)) == ("length", LONG)


@pytest.mark.slow
def test_abort_ends_a_request_and_no_other(engine: Engine) -> None:
    whole = rollout(engine, [request(1, n_samples=2, max_new_tokens=LONG, ignore_eos=True)])[1]
    engine.begin_rollout(LONG_ROLLOUT)
    for i, length in enumerate((LONG, ENDLESS)):
        engine.submit([request(i, n_samples=2, max_new_tokens=length, ignore_eos=True)])
    early = engine.poll(0.0)
    engine.abort(1)
    engine.abort(99)  # unknown, or finished already
    outputs = finish(engine, 4 - len(early))
    outputs |= {(output.request_id, output.sample): output for output in early}
    assert [outputs[0, sample].finish_reason for sample in (0, 1)] == ["length"] * 2
    for sample in (0, 1):
        assert outputs[1, sample].finish_reason == "abort"
        n_tokens = len(outputs[1, sample].tokens)
        assert outputs[1, sample].tokens[:LONG] == whole[sample].tokens[:n_tokens]
        assert n_tokens < ENDLESS
    engine.submit([request(1)])  # the id is free again
    assert finish(engine, 1)
    engine.end_rollout()


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_a_phase_may_end_with_requests_under_way(engine: Engine, drop: bool) -> None:
    expected = rollout(engine)
    engine.begin_rollout(ROLLOUT)
    engine.submit([request(i, n_samples=4, max_new_tokens=40, ignore_eos=True) for i in range(6)])
    engine.submit([request(6, max_new_tokens=1)])
    engine.poll(0.0)
    engine.end_rollout(drop)
    with pytest.raises(EngineError, match="outside a rollout phase; call begin_rollout"):
        engine.submit([request(0)])
    again = rollout(engine)
    assert tokens_of(again) == tokens_of(expected)


def test_a_bad_request_is_refused_with_all_that_came_along(engine: Engine) -> None:
    engine.begin_rollout(ROLLOUT)
    engine.submit([request(0, max_new_tokens=60, ignore_eos=True)])
    refused = {
        "request id 0 is already under way": [request(5), request(0)],
        "request id 6 is already under way": [request(6), request(6)],
        f"request 8 .* leaves no room for a completion in a context of {CONTEXT}": [request(8, length=CONTEXT)],
        "request 8 .* n_samples is 0": [request(7), request(8, n_samples=0)],
        "request 9 .* vocabulary is 0..63": [dataclasses.replace(request(9), prompt=[VOCAB])],
    }
    for message, requests in refused.items():
        with pytest.raises(EngineError, match=message):
            engine.submit(requests)
    engine.submit([request(i) for i in (5, 6, 7, 8)])  # none of these is taken
    assert len(finish(engine, 5)) == 5
    assert engine.poll(0.0) == []
    engine.end_rollout()


def test_stop_strings_without_a_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    with Engine(spec(folder, tokenizer_path=str(tmp_path)), "inline") as engine:
        engine.begin_rollout(ROLLOUT)
        with pytest.raises(EngineError, match="set tokenizer_path, or use stop_token_ids"):
            engine.generate([request(0, stop=["x"])])
        engine.end_rollout()
        assert len(rollout(engine)) == 4


def test_errors_arrive_as_they_are_and_work_goes_on(engine: Engine, tmp_path: Path) -> None:
    expected = scored(engine, "actor", ROWS)
    with pytest.raises(DataError, match=r"^row 1: tokens is empty"):
        engine.train([TrainSequence([True, False], [3, 4]), TrainSequence([], [])], sft_loss_fn)
    with pytest.raises(DataError, match=r"^token_rows\[1\] is empty"):
        engine.logprobs("actor", [[1], []])
    with pytest.raises(EngineError, match="no role 'critic'; loaded are: actor; call ensure_roles for 'critic'"):
        scored(engine, "critic", ROWS)
    engine.begin_rollout(ROLLOUT)
    with pytest.raises(EngineError, match="train was called inside a rollout phase"):
        engine.train([TrainSequence([True, False], [3, 4])], sft_loss_fn)
    engine.end_rollout()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine.save(str(tmp_path / "file" / "model"))
    assert scored(engine, "actor", ROWS) == expected


def test_the_weights_version_counts_applied_updates(folder: Path) -> None:
    def broken(pack: Any, logprobs_N: torch.Tensor) -> Any:
        return logprobs_N.sum() * float("nan"), {}

    rows = [TrainSequence([True, False, False], [3, 4, 5])] * 4
    with Engine(spec(folder), "inline") as engine:
        assert engine.weights_version == 0
        engine.train(rows, sft_loss_fn)
        assert engine.weights_version == 1
        engine.train(rows, sft_loss_fn, UpdateSpec(MicroBatchSpec(), n_minibatches=2))
        engine.train(rows, broken)
        assert {v for samples in rollout(engine).values() for output in samples for v in output.versions} == {3}
        engine.ensure_roles(
            {"critic": RoleSpec(path=str(folder), head="lm", key="x.path", optimizer=engine.spec.actor.optimizer)}
        )
        engine.train(rows, sft_loss_fn, role="critic")
        assert engine.weights_version == 3
    with Engine(spec(folder, optimizer=None), "inline") as engine:
        assert engine.weights_version == 0


def test_progress_counts_this_phase(engine: Engine) -> None:
    requests = [request(i, ignore_eos=True) for i in range(5)]
    for _ in range(2):
        engine.begin_rollout(ROLLOUT)
        seen: list[tuple[int, RolloutStats]] = []
        engine.generate(requests, lambda outputs, stats: seen.append((len(outputs), stats[0])))  # noqa: B023
        engine.end_rollout()
        assert sum(n for n, _ in seen) == 5
        last = seen[-1][1]
        assert (last.generated_tokens, last.running, last.waiting, last.preemptions) == (60, 0, 0, 0)


def test_what_is_saved_is_what_transformers_loads(engine: Engine, tmp_path: Path) -> None:
    engine.save(str(tmp_path / "saved"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for row, own in zip(ROWS, scored(engine, "actor", ROWS), strict=True):
        tokens = torch.tensor(row)
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)
        assert own[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    with Engine(spec(tmp_path / "saved", random_init=False), "inline") as again:
        assert scored(again, "actor", ROWS) == [pytest.approx(row) for row in scored(engine, "actor", ROWS)]
        assert again.info.n_params == engine.info.n_params == sum(p.numel() for p in model.parameters())


def test_reference_is_the_starting_actor_and_stays(folder: Path) -> None:
    with Engine(spec(folder), "inline") as engine:
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="ref.path")})
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="roles['ref'].path")})  # the same model
        start = scored(engine, "actor", ROWS)
        assert scored(engine, "ref", ROWS) == start
        engine.train(train_rows(rollout(engine)), partial(grpo_loss_fn, clip_eps=0.2))
        assert scored(engine, "ref", ROWS) == start
        assert scored(engine, "actor", ROWS) != start


def test_reference_from_another_folder(folder: Path, tmp_path: Path) -> None:
    with Engine(spec(folder, seed=2), "inline") as other:
        other.save(str(tmp_path / "other"))
        expected = scored(other, "actor", ROWS)
    with Engine(spec(folder), "inline") as engine:
        engine.ensure_roles({"ref": RoleSpec(path=str(tmp_path / "other"), head="lm", key="ref.path")})
        assert scored(engine, "ref", ROWS) == [pytest.approx(row) for row in expected]
        assert scored(engine, "actor", ROWS) != expected


def test_reference_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    with Engine(spec(model_folder(tmp_path / "shape", vocab_size=VOCAB + 1)), "inline") as other:
        other.save(str(tmp_path / "other"))
    role = RoleSpec(path=str(tmp_path / "other"), head="lm", key="ref.path")
    with (
        Engine(spec(folder), "inline") as engine,
        pytest.raises(EngineError, match=r"ref.path has a vocabulary of 65 tokens, the actor one of 64"),
    ):
        engine.ensure_roles({"ref": role})


@pytest.mark.slow
def test_size_of_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def room(max_running: int = 4, **decoder: Any) -> int:
        engine.begin_rollout(RolloutSpec(max_running=max_running, max_len=64, decoder=DecoderConfig(**decoder)))
        assert engine.limits is not None
        tokens = engine.limits.kv_tokens
        engine.end_rollout()
        return tokens

    with Engine(spec(folder), "inline") as engine:
        needed = room()
        assert 4 * 64 <= needed <= 4 * (64 + 32) + 32
        assert room(max_running=8) > needed
        assert 100 <= room(max_kv_tokens=100) <= 160
        assert room(max_kv_tokens=1_000_000) == needed
        engine.begin_rollout(RolloutSpec(max_running=4, max_len=64, decoder=DecoderConfig(max_kv_tokens=64)))
        with pytest.raises(EngineError, match=r"does not fit the KV cache .* raise rollout\.max_kv_tokens"):
            engine.submit([request(0, length=40, max_new_tokens=80)])
        few = engine.generate([request(i, n_samples=3, max_new_tokens=40, ignore_eos=True) for i in range(3)])
        engine.end_rollout()
        assert tokens_of(few) == tokens_of(
            rollout(engine, [request(i, n_samples=3, max_new_tokens=40, ignore_eos=True) for i in range(3)])
        )
        block_bytes = 2 * 2 * 32 * 2 * 16 * 4  # k and v, layers, tokens, heads, head size, fp32
        monkeypatch.setattr(DecoderMaker, "free_bytes", lambda _: 10 * block_bytes)
        assert room(mem_fraction=0.5) == 5 * 32
        assert room(mem_fraction=0.2) == 64
        with pytest.raises(EngineError, match=r"room for 32 tokens.*64: lower gconfig.max_new_tokens.*mem_fraction"):
            room(mem_fraction=0.1)


def test_without_an_optimizer_there_is_no_training(folder: Path) -> None:
    with Engine(spec(folder, optimizer=None), "inline") as engine:
        assert len(scored(engine, "actor", ROWS)) == 3
        with pytest.raises(EngineError, match="built without an optimizer"):
            engine.train([TrainSequence([True, False], [3, 4])], sft_loss_fn)
    with pytest.raises(EngineError, match="the engine is closed"):
        scored(engine, "actor", ROWS)
    engine.close()


def test_mixed_requests_depend_on_nothing_else(engine: Engine) -> None:
    together = rollout(engine)
    for item in MIXED:
        assert tokens_of(rollout(engine, [item]))[item.request_id] == tokens_of(together)[item.request_id]


def test_a_worker_that_tidies_up_after_a_rollout_samples_the_same(folder: Path) -> None:
    with Engine(spec(folder), "inline") as engine:
        worker: Worker = engine.workers.worker  # type: ignore[union-attr]
        outputs = []
        for tidies in (False, True, True):
            outputs.append(tokens_of(rollout(engine)))
            assert worker.decoder is not None
            n_free, n_blocks = worker.decoder.blocks.n_available, worker.decoder.blocks.n_blocks
            if tidies:
                assert n_free < n_blocks
                worker.release_departed_blocks()
                assert worker.decoder.blocks.n_available == n_blocks
        assert outputs[0] == outputs[1] == outputs[2]
