"""Training on preference pairs against TRL: the same rows, start and optimizer give the same losses and weights.

Conventions that differ are aligned here. TRL's ORPO takes the likelihood term over prompt and answer, as a mean over
the tokens of the batch. areno takes it over the answer, as a mean over its tokens and then over pairs, which is eq. 6
of the paper. So the class below replaces TRL's likelihood term.
"""

from __future__ import annotations

from functools import partial

import pytest

from areno.loss_fns import dpo_loss_fn
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


@pytest.mark.parametrize(("how", "theirs"), DPO)
def test_dpo_and_its_variants_train_as_in_trl(tmp_path, how, theirs):
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")
    items = [pair_item(tokenizer_of(MODEL), row, index) for index, row in enumerate(ROWS)]

    def trainer(model, rows, **settings):
        config = trl.DPOConfig(beta=how["beta"], max_length=None, **theirs, **settings)
        return trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer_of(MODEL))

    found = train_with_trl(trainer, ROWS, tmp_path)
    rows = [row for item in items for row in (item.chosen, item.rejected)]
    same_training(found, rows, partial(dpo_loss_fn, **how), rows_per_unit=2, reference=True)


@pytest.mark.parametrize("how", [{"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.0}])
def test_simpo_trains_as_in_trl(tmp_path, how):
    cpo = pytest.importorskip("trl.experimental.cpo", reason="this version of trl has no CPO trainer")
    items = [pair_item(tokenizer_of(MODEL), row, index) for index, row in enumerate(ROWS)]

    def trainer(model, rows, **settings):
        config = cpo.CPOConfig(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0, **settings)
        return cpo.CPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer_of(MODEL))

    found = train_with_trl(trainer, ROWS, tmp_path)
    rows = [row for item in items for row in (item.chosen, item.rejected)]
    same_training(found, rows, partial(dpo_loss_fn, **how), rows_per_unit=2)


def test_orpo_trains_as_in_trl(tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo", reason="this version of trl has no ORPO trainer")

    class OverAnswers(orpo.ORPOTrainer):
        def concatenated_forward(self, *args, **more):
            chosen, rejected, *others = super().concatenated_forward(*args, **more)
            return chosen, rejected, *others[:2], -chosen.mean()

    items = [pair_item(tokenizer_of(MODEL), row, index) for index, row in enumerate(ROWS)]

    def trainer(model, rows, **settings):
        config = orpo.ORPOConfig(beta=0.3, **settings)
        return OverAnswers(model, args=config, train_dataset=rows, processing_class=tokenizer_of(MODEL))

    found = train_with_trl(trainer, ROWS, tmp_path)
    rows = [row for item in items for row in (item.chosen, item.rejected)]
    same_training(found, rows, partial(dpo_loss_fn, loss_type="orpo", beta=0.3), rows_per_unit=2)
