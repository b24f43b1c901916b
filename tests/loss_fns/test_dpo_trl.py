"""DPO against TRL's: the same token rows, policy and reference give the same loss, gradient and statistics.

TRL's sigmoid loss knows no label smoothing. Its `robust` loss is a combination of the two terms that conservative DPO
is another combination of, so the sum of TRL's losses, weighted to match, is the conservative one:

    (1 - s) A + s B  =  2 (1 - s) A  -  (1 - 2 s) ((1 - s) A - s B) / (1 - 2 s),   A, B = -log sigmoid(+-beta m)
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from areno.api.trainer import Trainer
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.files.paths import find_file
from areno.loss_fns import dpo_loss_fn
from areno.plan.plan import TrainerPlan
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.encoded_rows import pair_item
from tests.helpers.policy_runs import other_actor
from tests.helpers.tiny_engine import engine_spec

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": "27+35=", "chosen": "62", "rejected": "52"},
    {"prompt": "99+99=", "chosen": "198", "rejected": "188"},
    {"prompt": "8+5=", "chosen": "13", "rejected": "3"},
    {"prompt": "64+19=", "chosen": "83", "rejected": "7+7+7+7=777"},
    {"prompt": "5+6=", "chosen": "11=11", "rejected": ""},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A policy, and a reference that disagrees with it."""
    reference = other_actor(tmp_path_factory.mktemp("models") / "reference")
    return find_file("examples/quickstart/model"), reference


@pytest.fixture(scope="module")
def tokenizer(folders):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folders[0])


@pytest.fixture(scope="module")
def ours(folders):
    """Our Trainer; its steps are too small to change the policy."""
    optimizer = OptimizerConfig(lr=1e-30, weight_decay=0.0)
    spec = engine_spec(folders[0], optimizer=optimizer, gradient_checkpointing=False)
    with Trainer.from_plan(TrainerPlan(spec=spec, tokenizer=None)) as trainer:
        trainer.init()
        trainer.ensure_roles({"ref": RoleSpec(path=str(folders[1]), head="lm", key="ref.path")})
        yield trainer


@pytest.fixture
def theirs(folders, tokenizer, tmp_path):
    """loss settings -> (loss, gradient norm, metrics, token rows) of TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    # Not above: the default run does without these tests, and would wait a second for it in each of its processes.
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)

    def run(**settings):
        config = trl.DPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(ROWS),
            max_length=None,
            report_to="none",
            **settings,
        )
        trainer = trl.DPOTrainer(
            policy, ref_model=reference, args=config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer
        )
        rows = [trainer.train_dataset[i] for i in range(len(ROWS))]
        policy.train()
        policy.zero_grad()
        loss = trainer.compute_loss(policy, trainer.data_collator(rows))
        loss.backward()
        norm = torch.stack([p.grad.double().square().sum() for p in policy.parameters()]).sum().sqrt()
        return loss.item(), norm.item(), {name: v[-1] for name, v in trainer._metrics["train"].items()}, rows

    return run


SMOOTHED = {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.1, "loss_weights": [1.8, -0.8]}
CASES = [
    ({"beta": 0.1}, {"loss_type": ["sigmoid"]}),
    ({"beta": 2.0}, {"loss_type": ["sigmoid"]}),
    ({"beta": 0.5, "label_smoothing": 0.1}, SMOOTHED),
    ({"beta": 0.1, "loss_type": "ipo"}, {"loss_type": ["ipo"]}),
    ({"beta": 1.0, "loss_type": "ipo"}, {"loss_type": ["ipo"]}),
]


@pytest.mark.parametrize(("how", "their_settings"), CASES)
def test_the_loss_is_that_of_trl(ours, theirs, tokenizer, how, their_settings):
    loss, grad_norm, metrics, their_rows = theirs(beta=how["beta"], **their_settings)
    rows = []
    for index, row in enumerate(ROWS):
        item = pair_item(tokenizer, row, index)
        for sequence, answer in ((item.chosen, "chosen_ids"), (item.rejected, "rejected_ids")):
            prompt_ids, answer_ids = their_rows[index]["prompt_ids"], their_rows[index][answer]
            assert list(sequence.tokens) == prompt_ids + answer_ids
            assert list(sequence.prompt_mask) == [True] * len(prompt_ids) + [False] * len(answer_ids)
            rows.append(TrainSequence(prompt_mask=sequence.prompt_mask, tokens=sequence.tokens))
    for row, logprobs in zip(rows, ours.score_logprobs("ref", [row.tokens for row in rows], 1.0), strict=True):
        row.ref_logprobs = logprobs

    for mb_spec in (MicroBatchSpec(mini_bs=2), MicroBatchSpec(mini_bs=16), MicroBatchSpec(max_tokens_per_mb=40)):
        stats = ours.engine.train(rows, partial(dpo_loss_fn, **how), UpdateSpec(mb_spec, rows_per_unit=2))
        assert stats["loss"] == pytest.approx(loss, abs=1e-5, rel=1e-5)
        assert stats["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
        assert stats["logps_chosen"] == pytest.approx(metrics["logps/chosen"], abs=1e-4)
        assert stats["logps_rejected"] == pytest.approx(metrics["logps/rejected"], abs=1e-4)
        if how.get("loss_type") != "ipo":  # TRL's rewards are of sums there, where its loss is of means
            assert stats["rewards_chosen"] == pytest.approx(metrics["rewards/chosen"], abs=1e-4)
            assert stats["rewards_rejected"] == pytest.approx(metrics["rewards/rejected"], abs=1e-4)
            assert stats["margin"] == pytest.approx(metrics["rewards/margins"], abs=1e-4)
            assert stats["accuracy"] == pytest.approx(metrics["rewards/accuracies"])
