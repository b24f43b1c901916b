"""Verdicts that a model of the run writes in JSON: the grammar of the reply, and what is refused at the door."""

from __future__ import annotations

import builtins
import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from areno.config.judge import JudgeConfig, json_reply_text
from areno.engine.decoder.grammar import GrammarCompiler, Vocabulary
from areno.errors import ConfigError
from areno.models.registry import load_config
from areno.scoring.judge_readers import RoleJudge, _parse_json_verdict, _verdict_of_label, json_grammar
from areno.types import RolloutSequence
from tests.helpers.grammars import allowed
from tests.helpers.judge_model import CHARACTERS, char_judge
from tests.helpers.judged import judging_of, record
from tests.helpers.policy_runs import MODEL
from tests.helpers.tiny_backend import model_config

TINY = Path(__file__).parents[1] / "tokenizers/tiny"
LABELS = [["no", "yes"], ["1", "10"], ['so "so"', "\\good\\", "caf\u00e9", "\U0001f600 {}"]]


def said(tokens: list[int]) -> RolloutSequence:
    return RolloutSequence(resp_tokens=tokens, resp_logprobs=[0.0] * len(tokens))


def config_of(labels: list[str], max_tokens: int = 70) -> JudgeConfig:
    return JudgeConfig(path="m", verdict="json", labels=labels, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return char_judge(tmp_path_factory.mktemp("judge"), context=512)


def reader_of(folder: Path, **settings: Any) -> RoleJudge:
    config = JudgeConfig(path=str(folder), verdict="json", **{"max_tokens": 60, **settings})
    return RoleJudge(config, Vocabulary(str(folder), load_config(folder)))


@pytest.mark.parametrize("labels", [["*", "**", "***"], ["(a)", "(b)"], ["[0]", "[1]"], [" yes", "no"], ["'", '"']])
def test_labels_that_begin_with_marks_are_read(labels: list[str]) -> None:
    lowered = [label.casefold() for label in labels]
    for place, label in enumerate(labels):
        verdict = _parse_json_verdict(json_reply_text("It is so.", label), lowered)
        assert verdict.probabilities == tuple(float(other == place) for other in range(len(labels)))
        assert _verdict_of_label(f"{label.strip()} \n", lowered, {}).probabilities == verdict.probabilities


def test_a_context_without_room_for_a_question_is_refused(judge: Path) -> None:
    message = "reward.judge.max_tokens: is 512; the context of the judge, 512 tokens, must also hold a question"
    with pytest.raises(ConfigError, match=message):
        reader_of(judge, max_tokens=512)
    assert reader_of(judge, max_tokens=511)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("max_tokens", [90, pytest.param(115, marks=pytest.mark.slow)])
def test_any_walk_through_the_grammar_ends_in_time_with_a_label(labels: list[str], max_tokens: int) -> None:
    """Also that of a model which never ends its reason, and writes it in bytes, some of which are half a letter."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    eos = tokenizer.eos_token_id
    grammar = GrammarCompiler(tokenizer, len(tokenizer), [eos]).compile(json_grammar(config_of(labels, max_tokens)))
    rng, seen, longest = random.Random(max_tokens), set(), 0
    for walk in range(8):
        state, tokens = grammar.start(), list[int]()
        while not state.finished:
            may = [token for token in allowed(state.allowed_token_mask()) if token < len(tokenizer)]
            if walk % 4:
                may = [token for token in may if '"' not in tokenizer.decode([token]) and token != eos] or may
            if walk % 4 == 3:
                may = [token for token in may if len(tokenizer.decode([token])) == 1] or may
            tokens.append(rng.choice(may))
            state.accept(tokens[-1])
            assert not state.error
        assert len(tokens) <= max_tokens
        longest = max(longest, len(tokens))
        reply = json.loads(tokenizer.decode(tokens, skip_special_tokens=True))
        assert list(reply) == ["reason", "verdict"]
        assert reply["verdict"] in labels
        seen.add(reply["verdict"])
    assert len(seen) > 1
    assert longest > max_tokens - 16  # reasons use the room that there is


def test_replies_become_verdicts_by_their_labels(judge: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    reader, seen = reader_of(judge), []

    def write(rows: Any, params: Any, *, grammar: str | None) -> list[RolloutSequence]:
        seen.append(([tokenizer.decode(row) for row in rows], params.greedy, params.max_new_tokens, grammar))
        texts = ['{"reason": "", "verdict": "yes"}</s>', '{"reason": "so", "verdict": "no"}</s>', '{"reason": "cut']
        return [said(tokenizer.encode(text)) for text in texts]

    asked = [reader.ask(question) for question in ("a?", "b?", "c?", "x" * 453)]
    reader.answer_questions(score=lambda rows: [], write=write)
    assert seen == [(["a?", "b?", "c?"], True, 60, json_grammar(config_of(["no", "yes"], 60)))]
    verdicts = [future.result() for future in asked]
    assert [verdict.probabilities for verdict in verdicts] == [(0.0, 1.0), (1.0, 0.0), (), ()]
    assert [verdict.parts for verdict in verdicts] == [{"unreadable": 0.0}] * 2 + [{"unreadable": 1.0}, {}]
    assert 'the reply names none of no, yes: \'{"reason": "cut\'' in verdicts[2].message
    assert (
        "453 tokens, and its reply up to 60 (reward.judge.max_tokens); the model has a context" in verdicts[3].message
    )
    reader.answer_questions(score=lambda rows: [], write=write)
    assert len(seen) == 1  # nothing waits


def test_both_orders_of_a_comparison_are_written(judge: Path) -> None:
    """A judge that prefers the first place alone gives each answer a half."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    reader, questions = reader_of(judge, compare=True, template="{first}|{second}"), []

    def write(rows: Any, params: Any, *, grammar: str | None) -> list[RolloutSequence]:
        questions.extend(tokenizer.decode(row) for row in rows)
        return [said(tokenizer.encode('{"reason": "", "verdict": "A"}'))] * len(rows)

    config = JudgeConfig(path="m", verdict="json", compare=True, template="{first}|{second}")
    with judging_of(config, reader, 2) as judging:
        judging.add({0: record("one"), 1: record("two")})
        judging.answer_questions(lambda rows: [], write)
        outcomes = judging.collect_outcomes()
    assert questions == ["two|one", "one|two"]
    assert [outcomes[place].value for place in (0, 1)] == [0.5, 0.5]
    assert outcomes[0].parts["judge/disagreement"] == 1.0
    assert outcomes[0].parts["judge/first"] == 1.0


def test_reasoning_that_the_template_opens_is_closed_before_the_reply(judge: Path, tmp_path: Path) -> None:
    folder = char_judge(tmp_path / "thinks")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}:<think>\n"
    rows: list[list[int]] = []
    reader = RoleJudge(config_of(["no", "yes"]), Vocabulary(str(folder), load_config(folder), tokenizer=tokenizer))

    def write(given: Any, params: Any, *, grammar: str | None) -> list[RolloutSequence]:
        rows.extend(given)
        return [said(tokenizer.encode('{"reason": "", "verdict": "yes"}'))]

    reader.ask("Is it?")
    reader.answer_questions(lambda rows: [], write)
    assert [tokenizer.decode(row) for row in rows] == ["Is it?:<think>\n</think>\n\n"]  # Jinja drops a line break
    with pytest.raises(ConfigError, match=r"reward.judge.path: is a model whose chat template begins with <think>"):
        RoleJudge(JudgeConfig(path="m"), Vocabulary(str(folder), load_config(folder), tokenizer=tokenizer))


def test_a_tokenizer_that_cannot_write_the_reply_is_refused(judge: Path) -> None:
    """The vocabulary of the quickstart has digits alone; the other one has no letters with accents."""
    with pytest.raises(
        ConfigError, match=r'reward.judge.path: .* tokenizer cannot write {"reason": "", "verdict": "no"}'
    ):
        reader_of(MODEL)
    assert "\u00e9" not in CHARACTERS
    with pytest.raises(ConfigError, match=r'cannot write {"reason": "", "verdict": "caf.?"}'):
        reader_of(judge, labels=["bad", "caf\u00e9"])
    reader_of(judge, labels=["bad", 'so "so"'])


def test_a_missing_library_is_named_with_its_extra(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **how: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return imported(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"reward.judge.verdict: is json, but .*areno\[grammar\]"):
        reader_of(judge)


def test_a_vocabulary_ends_with_the_tokens_of_model_and_tokenizer(judge: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    own = Vocabulary("", model_config(), tokenizer=tokenizer)
    assert own.eos_token_ids == {*model_config().eos_token_ids, tokenizer.eos_token_id}
    assert Vocabulary("", model_config(), (7,), tokenizer=tokenizer).eos_token_ids == {*model_config().eos_token_ids, 7}
