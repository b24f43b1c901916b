"""Faults in what a loop gives a loss, in optimizers, between updates and in checkpoints: each is found by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areno.checks.steps import two_steps
from areno.engine.decoder import decoder
from areno.engine.train import micro_batches, muon, optimizer, optimizer_updates
from areno.engine.worker import Worker
from areno.run.progress import RunProgress
from areno.trainers.kto import KTOTrainer
from tests.helpers.checked import failed, findings
from tests.helpers.family_cases import random_model

pytestmark = pytest.mark.slow

KTO, GSPO, SFT = ["kto quickstart_kto"], ["gspo quickstart"], ["sft quickstart_base"]
MUON, EIGHT_BITS = ([*GSPO, f"actor.optimizer.type={kind}"] for kind in ("muon", "adam_8bit"))
Patch = Callable[[pytest.MonkeyPatch], None]


def red(command: list[str]) -> dict[str, str]:
    found = findings(*command, only="gradient,algorithm")
    assert not failed(found), failed(found)
    return {each.name: each.line for each in reversed(found) if each.verdict == "red"}


def point_of_own_answers(patch: pytest.MonkeyPatch) -> None:
    right = KTOTrainer._mismatched_rows

    def wrong(self: KTOTrainer, items: Any) -> Any:
        return [item.rows[0] for item in items], right(self, items)[1]

    patch.setattr(KTOTrainer, "_mismatched_rows", wrong)


def negative_point(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: KTOTrainer, items: Any, scores: Any) -> float:
        rows, keys = self._mismatched_rows(items)
        ours = self._completion_logprobs("actor", rows)
        return float((ours - [scores.mismatched[key] for key in keys]).mean())

    patch.setattr(KTOTrainer, "reference_point", wrong)


def point_per_token(patch: pytest.MonkeyPatch) -> None:
    right = KTOTrainer.reference_point
    patch.setattr(KTOTrainer, "reference_point", lambda self, *given: right(self, *given) / 3)


def muon_in_four_steps(patch: pytest.MonkeyPatch) -> None:
    right = muon.orthogonalise
    patch.setattr(muon, "orthogonalise", lambda x, steps: right(x, steps - 2))


def muon_without_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(muon, "matrix_scale", lambda shape, settings: math.sqrt(max(1, shape[0] / shape[1])))


def second_moment_left_out(patch: pytest.MonkeyPatch) -> None:
    right = optimizer_updates.adam_8bit

    def wrong(grad: Any, master: Any, param: Any, moments: Any, scales: Any, how: Any) -> None:
        right(grad, master, param, moments, scales, replace(how, correction_2=1.0))

    patch.setattr(optimizer_updates, "adam_8bit", wrong)


def decays(wanted: Callable[[bool], bool]) -> Patch:
    """Let the optimizer decay what `wanted` says of each segment, which is given whether it should decay."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = optimizer.Optimizer.step

        def wrong(self: Any, norm: float) -> None:
            apply = self._update.apply
            decay = 1.0 - self.lr * self.config.weight_decay

            def of_chunk(window: Any, chunk: Any, how: Any) -> None:
                apply(window, chunk, replace(how, decay=decay if wanted(chunk.segment.decayed) else 1.0))

            self._update.apply = of_chunk
            try:
                right(self, norm)
            finally:
                del self._update.apply

        patch.setattr(optimizer.Optimizer, "step", wrong)

    return plant


def next_step_nudges_weights(patch: pytest.MonkeyPatch) -> None:
    right = RunProgress.next_step
    kept: list[Any] = []
    train = Worker.train

    def remember(self: Worker, *given: Any) -> Any:
        kept.append(self)
        return train(self, *given)

    def wrong(self: RunProgress) -> Any:
        if kept:
            kept[-1].roles["actor"].backend.flat.params.mul_(1.001)
        return right(self)

    patch.setattr(Worker, "train", remember)
    patch.setattr(RunProgress, "next_step", wrong)


def checkpoint_of_the_start(patch: pytest.MonkeyPatch) -> None:
    right, start = Worker.save, dict[int, Any]()
    train = Worker.train

    def remember(self: Worker, role: str, *given: Any) -> Any:
        params = self.roles[role].backend.flat.params
        start.setdefault(id(params), params.clone())
        return train(self, role, *given)

    def wrong(self: Worker, folder: Any, role: str = "actor", *given: Any, **how: Any) -> Any:
        params = self.roles[role].backend.flat.params
        if "checkpoints" not in str(folder):
            return right(self, folder, role, *given, **how)
        now = params.clone()
        params.copy_(start[id(params)])
        try:
            return right(self, folder, role, *given, **how)
        finally:
            params.copy_(now)

    patch.setattr(Worker, "train", remember)
    patch.setattr(Worker, "save", wrong)


def samples_share_a_seed(patch: pytest.MonkeyPatch) -> None:
    right = decoder.sample_keys

    def wrong(seed: Any, samples: Any) -> Any:
        keys = list(right(seed, samples))
        return [keys[0] for _ in keys]

    patch.setattr(decoder, "sample_keys", wrong)


def first_mini_batch_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = micro_batches.optimizer_steps

    def wrong(*given: Any) -> Any:
        steps = list(right(*given))
        return [steps[0] for _ in steps]

    patch.setattr(micro_batches, "optimizer_steps", wrong)


def last_row_replaced_by_the_first(patch: pytest.MonkeyPatch) -> None:
    right = micro_batches.optimizer_steps
    patch.setattr(micro_batches, "optimizer_steps", lambda *given: [[*s[:-1], s[0]] for s in right(*given)])


@pytest.mark.parametrize("command", [KTO, MUON, EIGHT_BITS, [*MUON, "actor.use_lora=true"]], ids=" ".join)
def test_nothing_is_red_without_a_fault(command: list[str]) -> None:
    assert red(command) == {}


@pytest.mark.parametrize("command", [MUON, [*GSPO, "actor.routing_replay=true"]], ids=" ".join)
def test_nothing_is_red_with_experts_whose_gate_and_up_alternate(command: list[str], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("examples/quickstart/model")
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    random_model("gpt-oss-experts", tmp_path, **ids, pad_token_id=tokenizer.pad_token_id)
    tokenizer.save_pretrained(tmp_path)
    assert red([*command, f"actor.path={tmp_path}"]) == {}


@pytest.mark.parametrize(
    ("command", "plant", "name", "said"),
    [
        ([*GSPO, "gconfig.temperature=4"], samples_share_a_seed, "samples-differ", "the same random numbers"),
        (GSPO, first_mini_batch_is_trained_twice, "mini-batches", "once too often"),
        (SFT, last_row_replaced_by_the_first, "gradient-nonzero", "is left out"),
        (KTO, point_of_own_answers, "reference-point", "the rows' own answers"),
        (KTO, negative_point, "reference-point", "it may be negative"),
        (KTO, point_per_token, "reference-point", "by the formula"),
        (MUON, muon_in_four_steps, "optimizer-update", "by the formula of muon"),
        (MUON, muon_without_scale, "optimizer-update", "by the formula of muon"),
        (EIGHT_BITS, second_moment_left_out, "optimizer-update", "by the formula of adam_8bit"),
        (SFT, decays(lambda should: True), "optimizer-update", "norms and biases of the actor decay by 0.00999"),
        (SFT, decays(lambda should: False), "optimizer-update", "matrices of the actor decay by"),
        (GSPO, next_step_nudges_weights, "weights-between-updates", "between updates 1 and 2"),
        (GSPO, checkpoint_of_the_start, "saved-checkpoint", "before the training"),
    ],
)
def test_a_planted_fault_is_found(
    command: list[str], plant: Patch, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(two_steps, "_draw", lambda *given: [])  # for sampled-tokens alone
    found = red(command)
    assert said in found.get(name, ""), found
