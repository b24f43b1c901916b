"""Training on preference pairs against TRL: the same rows, start and optimizer give the same losses and weights.

TRL's online DPO samples its completions itself, so the class below gives it the completions of the rows. Its losses are
those that its training step returns, because its log rounds them.

Conventions that differ are aligned here. TRL's ORPO takes the likelihood term over prompt and answer, as a mean over
the tokens of the batch. areno takes it over the answer, as a mean over its tokens and then over pairs, which is eq. 6
of the paper. So the class below replaces TRL's likelihood term.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from areno.loss_fns import choose_pairs, dpo_loss_fn
from tests.helpers.encoded_rows import pair_item
from tests.helpers.trl_runs import MODEL, same_training, tokenizer_of, train_with_trl

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str((a + b - 10) * (11 if a % 3 == 0 else 1))}
    for a in range(17, 77, 10)
    for b in (5, 27)
]
DPO = [
    ({"beta": 0.3}, {"loss_type": ["sigmoid"]}),
    ({"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1}, {"loss_type": ["robust"], "label_smoothing": 0.1}),
    ({"beta": 1.0, "loss_type": "ipo"}, {"loss_type": ["ipo"]}),
    # cDPO is a weighted sum of TRL's sigmoid and robust losses, see test_dpo_trl.py.
    (
        {"beta": 0.3, "label_smoothing": 0.1},
        {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.1, "loss_weights": [1.8, -0.8]},
    ),
]


def assert_trained_alike(tmp_path, kind, config_of, how, **more):
    def trainer(model, rows, **settings):
        return kind(model, args=config_of(**settings), train_dataset=rows, processing_class=tokenizer_of(MODEL))

    found = train_with_trl(trainer, ROWS, tmp_path)
    items = [pair_item(tokenizer_of(MODEL), row, index) for index, row in enumerate(ROWS)]
    rows = [row for item in items for row in (item.chosen, item.rejected)]
    same_training(found, rows, partial(dpo_loss_fn, **how), rows_per_unit=2, **more)


@pytest.mark.parametrize(("how", "theirs"), DPO)
def test_dpo_and_its_variants_train_as_in_trl(tmp_path, how, theirs):
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")
    config_of = partial(trl.DPOConfig, beta=how["beta"], max_length=None, **theirs)
    assert_trained_alike(tmp_path, trl.DPOTrainer, config_of, how, reference=True)


def test_simpo_trains_as_in_trl(tmp_path):
    cpo = pytest.importorskip("trl.experimental.cpo", reason="this version of trl has no CPO trainer")
    how = {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.0}
    assert_trained_alike(tmp_path, cpo.CPOTrainer, partial(cpo.CPOConfig, cpo_alpha=0.0, **how), how)


def test_orpo_trains_as_in_trl(tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo", reason="this version of trl has no ORPO trainer")

    class OverAnswers(orpo.ORPOTrainer):
        def concatenated_forward(self, *args, **more):
            chosen, rejected, *others = super().concatenated_forward(*args, **more)
            return chosen, rejected, *others[:2], -chosen.mean()

    how = {"loss_type": "orpo", "beta": 0.3}
    assert_trained_alike(tmp_path, OverAnswers, partial(orpo.ORPOConfig, beta=0.3), how)


@pytest.mark.parametrize("answers", [("chosen", "rejected"), ("rejected", "chosen")])
def test_online_dpo_trains_as_in_trl(tmp_path, answers):
    """Two samples of each prompt, ranked by a reward: the better one is the first, or the second."""
    online = pytest.importorskip("trl.experimental.online_dpo", reason="this version of trl has no online DPO trainer")
    tokenizer = tokenizer_of(MODEL)
    of_prompt = {row["prompt"]: row for row in ROWS}
    rewards = {row["prompt"] + row["chosen"]: 2.0 for row in ROWS}
    losses: list[float] = []

    class OnGivenCompletions(online.OnlineDPOTrainer):
        def _generate(self, model: Any, prompts: Any, images: Any = None) -> Any:
            of_completions = [[of_prompt[prompt][name] for prompt in prompts] for name in answers]
            tokens = [[*tokenizer.encode(text), tokenizer.eos_token_id] for each in of_completions for text in each]
            starts = [tokenizer.encode(prompt) for prompt in prompts] * 2
            padded = [_padded(starts, left=True), _padded(tokens, left=False)]
            return padded[0][0], padded[0][1], padded[1][0], padded[1][1], None

        def training_step(self, *args: Any, **more: Any) -> Any:
            losses.append(super().training_step(*args, **more).item())
            return torch.tensor(losses[-1])

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        return [rewards.get(prompt + text, 1.0) for prompt, text in zip(prompts, completions, strict=True)]

    def trainer(model, rows, **settings):
        config = online.OnlineDPOConfig(beta=0.3, loss_type="sigmoid", max_new_tokens=8, **settings)
        return OnGivenCompletions(
            model, args=config, train_dataset=rows, processing_class=tokenizer, reward_funcs=reward
        )

    found = train_with_trl(trainer, [{"prompt": row["prompt"]} for row in ROWS], tmp_path)
    found.losses = losses
    items = [pair_item(tokenizer, row, index) for index, row in enumerate(ROWS)]
    samples = [getattr(item, name) for item in items for name in answers]
    scores = [rewards.get(row["prompt"] + row[name], 1.0) for row in ROWS for name in answers]
    pairs, tied = choose_pairs(scores, [index // 2 for index in range(len(samples))], 1)
    assert (len(pairs), tied) == (len(ROWS), 0)
    rows = [samples[index] for pair in pairs for index in pair]
    same_training(found, rows, partial(dpo_loss_fn, beta=0.3), rows_per_unit=2, reference=True)


def _padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded to a rectangle, and a mask of those that are not padding."""
    longest = max(map(len, rows))
    places = [(longest - len(row) if left else 0) for row in rows]
    tokens, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for index, (row, start) in enumerate(zip(rows, places, strict=True)):
        tokens[index, start : start + len(row)] = torch.tensor(row)
        mask[index, start : start + len(row)] = 1
    return tokens, mask
