"""The benchmark's work by other libraries."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areno.bench.work import Workload
from areno.engine.engine import Engine
from areno.errors import EngineError
from areno.trainers.rows import token_rows
from benchmarks.__main__ import main
from benchmarks.contenders import TransformersContender, VllmContender
from tests.helpers.bench_runs import TINY, settings
from tests.helpers.tiny_engine import model_folder as tiny_folder
from tests.helpers.tiny_engine import spec


def test_transformers_does_the_same_work_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"step --shape {tiny_folder(tmp_path)} --no-recompute {TINY} --against transformers"
    assert main([*command.split(), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out["ratio"]["transformers"]) == {"rollout", "train", "step"}
    for phase, ratio in out["ratio"]["transformers"].items():
        assert ratio == pytest.approx(out["areno"][f"{phase}_tok_s"] / out["transformers"][f"{phase}_tok_s"])
    assert out["transformers"]["parts"] == 1


@pytest.fixture
def same_weights(tmp_path: Path) -> str:
    """A folder with random weights in it."""
    with Engine(spec(tiny_folder(tmp_path / "shape"))) as engine:
        engine.save(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def test_transformers_gives_the_log_probabilities_of_what_it_drew(same_weights: str) -> None:
    """Prompts of several lengths are padded on the left; the engine scores the very same rows."""
    work = Workload(prompt_lens=(3, 9, 5), new_lens=(6, 2, 4), n_samples=2, name="")
    theirs = TransformersContender(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, False)
    torch.manual_seed(0)
    rows = theirs.rollout(work, work.random_prompts(theirs.vocab_size, 0))
    assert list(map(len, token_rows(rows))) == work.row_lens
    assert not np.array_equal(*token_rows(rows[:2]))
    with Engine(spec(Path(same_weights), random_init=False)) as engine:
        scored = engine.logprobs("actor", token_rows(rows))
    for item, ours in zip(rows, scored, strict=True):
        n_prompt = int(np.count_nonzero(np.asarray(item.prompt_mask)))
        assert np.asarray(item.logprobs)[n_prompt:].tolist() == pytest.approx(ours[n_prompt:], abs=2e-4)


def test_transformers_trains_towards_rows_of_positive_advantage(same_weights: str) -> None:
    work = Workload(prompt_lens=(3, 7), new_lens=(6, 2), n_samples=2, name="")
    theirs = TransformersContender(settings("train --device cpu --tokens-per-mb 30"), same_weights, False)
    theirs._optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-3, fused=True)
    rows = work.random_rows(theirs.vocab_size, 0)

    @torch.no_grad()
    def worth() -> float:
        """The sum that a step raises: advantage times log-probability."""
        scored = [theirs._row_logprobs([item])[0].tolist() for item in rows]
        return sum(
            np.dot(np.asarray(item.advantages)[-len(new) :], new) for item, new in zip(rows, scored, strict=True)
        )

    before = worth()
    theirs.train(rows)
    assert worth() > before + 0.1


def test_transformers_does_in_parts_what_memory_has_no_room_for(
    same_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workload(prompt_lens=(3, 4, 5, 6, 7), new_lens=(2, 2, 2, 2, 2), n_samples=2, name="")
    theirs = TransformersContender(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, False)
    generate, tried = theirs._generate, []

    def generate_up_to_two(prompts: list[list[int]], n_new: int, n_samples: int) -> Any:
        tried.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("too much")
        return generate(prompts, n_new, n_samples)

    monkeypatch.setattr(theirs, "_generate", generate_up_to_two)
    theirs.prompts_at_once = 5
    prompts = work.random_prompts(theirs.vocab_size, 0)
    rows = theirs.rollout(work, prompts)
    assert tried == [5, 2, 2, 1]
    first = zip(token_rows(rows)[::2], prompts, strict=True)
    assert [tokens[: len(prompt)].tolist() for tokens, prompt in first] == prompts
    monkeypatch.setattr(theirs, "_generate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(EngineError, match="out of device memory with a single row"):
        theirs.rollout(work, prompts)


def test_vllm_is_asked_for_log_probabilities_and_all_lengths(
    same_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class LLM:
        def __init__(self, **options: Any):
            asked.append(options)

        def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
            asked.extend(params)
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            token_ids=[sample] * one.max_tokens,
                            logprobs=[{sample: SimpleNamespace(logprob=-float(t))} for t in range(one.max_tokens)],
                        )
                        for sample in range(one.n)
                    ]
                )
                for one in params
            ]

    module = ModuleType("vllm")
    module.__dict__.update(LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", module)
    work = Workload(prompt_lens=(3, 4), new_lens=(2, 5), n_samples=2, name="")
    theirs = VllmContender(settings(f"rollout --shape {same_weights} --device cpu"), same_weights, True)
    rows = theirs.rollout(work, work.random_prompts(theirs.vocab_size, 0))
    assert asked[0]["load_format"] == "dummy"
    assert [one.max_tokens for one in asked[1:]] == [2, 5]
    assert all(one.logprobs == 0 and one.ignore_eos for one in asked[1:])
    assert list(map(len, token_rows(rows))) == work.row_lens
    assert np.asarray(rows[3].logprobs)[-2:].tolist() == [-3.0, -4.0]
    assert math.isclose(theirs.start_s, 0.0, abs_tol=1.0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --against vllm", "--against: vllm does rollout only, not train"),
        ("rollout --against vllm", "--against: vllm takes the first GPU"),
        ("logprob --against transformers", "--against: is for rollout, train and step, not for logprob"),
        ("rollout --world-size 2 --against transformers", "--world-size: starts several processes of areno alone"),
        ("rollout --profile file", "--profile: traces a CUDA device, and --device is cpu"),
        ("train --tokenizer x", "unrecognized arguments: --tokenizer x"),
    ],
)
def test_a_bad_argument_is_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.phases.find_spec", lambda name: name)
    assert main([*command.split(), "--device", "cpu", "--shape", "tiny"]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.phases.find_spec", lambda name: None)
    assert main(["train", "--against", "transformers", "--device", "cpu", "--shape", "tiny"]) == 2
    assert "--against: transformers is not installed here" in capsys.readouterr().err
