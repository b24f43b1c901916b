"""Completions by the model of a role, in a decoder of their own beside the actor's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areno.config.judge import JudgeConfig
from areno.config.rollout import DecoderConfig
from areno.engine import decoder_maker
from areno.engine.decoder.decoder import Decoder
from areno.engine.engine import Engine
from areno.engine.roles import _offloaded_buffers
from areno.errors import ConfigError, DataError, EngineError, GrammarError
from areno.scoring.judge_readers import json_grammar
from areno.specs.role import RoleSpec
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.critics import critic
from tests.helpers.judge_model import char_judge, written_by_hand
from tests.helpers.lora_models import engine_of as engine_with
from tests.helpers.lora_models import lora, train
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import (
    ROLLOUT,
    folder_with_weights,
    logprobs_of,
    request,
    rollout,
    spec,
    tokens_of,
)

FORMS: dict[str, dict[str, Any]] = {
    "inline": {},
    "tp": {"devices": 2, "tp_size": 2},
    "dp": {"devices": 2},
    "cuda": {"devices": ["cuda:0"]},
}
CONFIG = JudgeConfig(path="m", verdict="json", max_tokens=60)
QUESTIONS = ["Is 1+1=2 right?", "Is it?", "1+1=3. Is it right? Reply with no or yes.", "?", "Why not, then? " * 8]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_weights(tmp_path_factory.mktemp("actor"))


def role(judge: Path, **more: Any) -> RoleSpec:
    return RoleSpec(path=str(judge), own_tokenizer=True, key="reward.judge.path", **more)


ON_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ON_TWO_RANKS = [pytest.param(form, marks=pytest.mark.slow) for form in ("tp", "dp")]


@pytest.fixture(scope="module", params=["inline", *ON_TWO_RANKS, ON_CUDA])
def engine(request: pytest.FixtureRequest, folder: Path, judge: Path) -> Iterator[Engine]:
    workers = "inline" if request.param in ("inline", "cuda") else "spawn"
    with Engine(spec(folder, random_init=False, **FORMS[request.param]), workers) as built:
        built.ensure_roles({"judge": role(judge)})
        yield built


def asked(judge: Path, *questions: str, grammar: bool = True, **params: Any) -> list[GenerationRequest]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    how = SamplingParams(**{"greedy": True, "max_new_tokens": CONFIG.max_tokens, **params})
    text = json_grammar(CONFIG) if grammar else None
    return [
        GenerationRequest(request_id=7, prompt=tokenizer.encode(question), params=how, grammar=text)
        for question in questions
    ]


def texts(judge: Path, found: list[list[GenerationOutput]]) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    return [tokenizer.decode(output.tokens, skip_special_tokens=True) for [output] in found]


def test_replies_of_a_role_are_those_of_transformers_and_a_matcher_by_hand(engine: Engine, judge: Path) -> None:
    found = engine.complete("judge", asked(judge, *QUESTIONS))
    expected = [written_by_hand(judge, question, ["no", "yes"], CONFIG.max_tokens) for question in QUESTIONS]
    assert texts(judge, found) == expected
    assert [output.finish_reason for [output] in found] == ["stop"] * len(QUESTIONS)
    assert max(map(len, expected)) + 1 == CONFIG.max_tokens - 1  # some reasons were ended by the limit, before a "no"


@pytest.mark.slow
def test_samples_of_the_actor_are_the_same_bits_with_replies_between_them(engine: Engine, judge: Path) -> None:
    requests = [request(index, n_samples=3, length=9) for index in range(5)]
    alone = [rollout(engine, requests) for _ in range(2)]
    before = rollout(engine, requests)
    engine.complete("judge", asked(judge, *QUESTIONS))
    after = rollout(engine, requests)
    for found in (*alone, before, after):
        assert tokens_of(found) == tokens_of(alone[0])
        assert logprobs_of(found) == logprobs_of(alone[0])


@pytest.mark.slow
def test_an_open_rollout_phase_continues_after_replies(engine: Engine, judge: Path) -> None:
    requests = [request(index, n_samples=3, length=9, max_new_tokens=60, ignore_eos=True) for index in range(5)]
    expected = rollout(engine, requests)
    engine.begin_rollout(ROLLOUT)
    engine.hold_decoding()  # so that some tokens are sampled before the replies, and some after them
    engine.submit(requests)
    finished, _ = engine.advance(1, 20)
    assert not finished
    replies = texts(judge, engine.complete("judge", asked(judge, *QUESTIONS)))
    outputs: dict[int, list[GenerationOutput]] = {}
    while sum(map(len, outputs.values())) < 15:
        for output in engine.advance(15)[0]:
            outputs.setdefault(output.request_id, []).append(output)
    engine.end_rollout()
    assert replies == texts(judge, engine.complete("judge", asked(judge, *QUESTIONS)))
    outputs = {number: sorted(found, key=lambda each: each.sample) for number, found in outputs.items()}
    assert tokens_of(outputs) == tokens_of(expected)
    assert logprobs_of(outputs) == logprobs_of(expected)


def test_completions_without_a_grammar_are_drawn_by_seed(engine: Engine, judge: Path) -> None:
    requests = asked(judge, *["Hm"] * 3, grammar=False, greedy=False, max_new_tokens=8)
    for seed, each in enumerate(requests):
        each.seed, each.n_samples = seed, 2
    found = [engine.complete("judge", requests) for _ in range(2)]
    drawn = [[tuple(output.tokens) for output in each] for each in found[0]]
    assert drawn == [[tuple(output.tokens) for output in each] for each in found[1]]
    assert len({tokens for each in drawn for tokens in each}) == 6
    assert [[output.sample for output in each] for each in found[0]] == [[0, 1]] * 3


@pytest.mark.slow
def test_a_decoder_of_replies_is_freed_and_that_of_the_actor_stays(
    folder: Path, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Decoder]] = []

    class Watched(Decoder):
        def __init__(self, *args: Any, **how: Any):
            super().__init__(*args, **how)
            made.append(weakref.ref(self))

    monkeypatch.setattr(decoder_maker, "Decoder", Watched)
    with Engine(spec(folder, random_init=False), "inline") as engine:
        engine.ensure_roles({"judge": role(judge)})
        for _ in range(2):
            rollout(engine)
            engine.complete("judge", asked(judge, *QUESTIONS))
        gc.collect()
        assert [ref() is not None for ref in made] == [True, False, False]
        rollout(engine)
        assert len(made) == 3


@pytest.mark.slow
def test_fewer_samples_at_once_and_a_smaller_cache_give_the_same_replies(engine: Engine, judge: Path) -> None:
    requests = asked(judge, *QUESTIONS)
    small = DecoderConfig(max_kv_tokens=256, max_prefill_tokens=64)
    assert texts(judge, engine.complete("judge", requests, small, 2)) == texts(
        judge, engine.complete("judge", requests)
    )
    assert engine.complete("judge", []) == []


@pytest.mark.slow
def test_the_base_of_adapters_replies_as_if_there_were_none(folder: Path) -> None:
    """And the samples of the actor keep their adapters."""
    base = RoleSpec(path=str(folder), own_tokenizer=False, key="reward.judge.path")
    requests = [request(index, greedy=True, length=6) for index in range(4)]

    def replies(engine: Engine, name: str) -> list[list[int]]:
        return [list(output.tokens) for [output] in engine.complete(name, requests)]

    with engine_with(folder, None) as plain:
        expected = replies(plain, "actor")
        assert expected == [list(output.tokens) for [output] in rollout(plain, requests).values()]
    with engine_with(folder, lora(folder)) as adapted:
        adapted.ensure_roles({"judge": base})
        train(adapted)
        own = [list(output.tokens) for [output] in rollout(adapted, requests).values()]
        assert replies(adapted, "judge") == expected != own
        assert [list(output.tokens) for [output] in rollout(adapted, requests).values()] == own
        assert replies(adapted, "actor") == own


@pytest.mark.slow
def test_wrong_requests_are_refused_and_the_engine_goes_on(engine: Engine, folder: Path, judge: Path) -> None:
    too_long = asked(judge, "x" * 2048)
    for call, error, message in (
        (lambda: engine.complete("ref", asked(judge, "?")), EngineError, "there is no role 'ref'"),
        (lambda: engine.complete("judge", too_long), EngineError, "leaves no room for a completion"),
        (
            lambda: engine.complete("judge", asked(judge, "")),
            DataError,
            r"token_rows\[0\] is empty",  # the name of the argument of Trainer.complete
        ),
        (lambda: engine.complete("judge", asked(judge, "?", top_p=2.0)), ConfigError, "top_p"),
    ):
        with pytest.raises(error, match=message):
            call()
    broken = asked(judge, "?")
    broken[0].grammar = "start: /("
    with pytest.raises(GrammarError, match="cannot be compiled"):
        engine.complete("judge", broken)
    tiny = DecoderConfig(max_kv_tokens=32)
    with pytest.raises(EngineError, match=r"does not fit the KV cache .* raise rollout.max_kv_tokens"):
        engine.complete("judge", asked(judge, *QUESTIONS), tiny)
    engine.ensure_roles({"critic": critic(folder)})
    with pytest.raises(EngineError, match="has a value head"):
        engine.complete("critic", asked(judge, "?"))
    engine.release_role("critic")
    assert texts(judge, engine.complete("judge", asked(judge, QUESTIONS[0])))


def test_an_offloaded_model_comes_for_the_call_and_leaves_after_it(folder: Path, judge: Path) -> None:
    """The CPU in the part of the device: a model that is away has no memory."""
    with Engine(spec(folder, random_init=False), "inline") as engine:
        engine.ensure_roles({"judge": role(judge)})
        requests = asked(judge, *QUESTIONS)
        expected = texts(judge, engine.complete("judge", requests))
        moved = worker_of(engine).roles["judge"]
        weights = list(moved.backend.model.parameters())
        moved.offload = _offloaded_buffers(moved.backend, keeps_weights=False)
        for _ in range(2):
            assert not any(each.untyped_storage().nbytes() for each in weights)
            assert texts(judge, engine.complete("judge", requests)) == expected
        with pytest.raises(EngineError, match="does not fit the KV cache"):
            engine.complete("judge", requests, DecoderConfig(max_kv_tokens=32))
        assert not any(each.untyped_storage().nbytes() for each in weights)


def test_a_model_without_finite_numbers_is_an_error(folder: Path, tmp_path: Path) -> None:
    broken = char_judge(tmp_path / "broken")
    model = transformers.AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight.fill_(1e38)  # finite, as a folder must be, and the logits are not
    model.save_pretrained(broken)
    with Engine(spec(folder, random_init=False), "inline") as engine:
        engine.ensure_roles({"judge": role(broken)})
        with pytest.raises(EngineError, match=r"the model of reward.judge.path produced non-finite logits"):
            engine.complete("judge", asked(broken, "?", grammar=False))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_a_call_on_a_gpu_leaves_the_memory_as_it_was(folder: Path, judge: Path, offload: bool) -> None:
    expected = [written_by_hand(judge, question, ["no", "yes"], CONFIG.max_tokens) for question in QUESTIONS]
    with Engine(spec(folder, ["cuda:0"], random_init=False), "inline") as engine:
        engine.ensure_roles({"judge": role(judge, offload=offload)})
        requests = asked(judge, *QUESTIONS)
        taken = []
        for _ in range(3):
            rollout(engine)
            assert texts(judge, engine.complete("judge", requests)) == expected
            gc.collect()
            taken.append(torch.cuda.memory_allocated())
        assert taken[1] == taken[2]
