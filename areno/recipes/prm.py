"""Process reward models: a score for each step of a solution (arXiv 2305.20050), learned from labelled steps.

    python -m areno.recipes.prm --config-name=quickstart_prm

    p    = softmax of the two scores of the head, wrong and right, at the last token of a step: probability of right
    loss = mean over steps of -y log p - (1 - y) log(1 - p)

y is the label of the step: 1 for right, 0 for wrong, or a number between them (arXiv 2312.08935). Each step is followed
by actor.step_separator, whose last token is the last token of the step. A checkpoint is a ...ForTokenClassification
model with two labels, which transformers loads, and which reward.path reads in GRPO, GSPO and PPO. If actor.path is a
language model, training starts from its transformer, with a head of zeros.
"""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name

from areno.api.algorithms import Algorithm
from areno.config.experiments import LossFn, ProcessRewardExperimentConfig
from areno.launch import run_recipe


class ProcessRewardConfig(ProcessRewardExperimentConfig):
    """Training of a process reward model, on solutions with labelled steps."""

    def loss_fn(self) -> LossFn:
        from areno.loss_fns import process_reward_loss_fn

        return process_reward_loss_fn


ALGORITHM = Algorithm(
    name="prm",
    config=ProcessRewardConfig,
    loop=partial(resolve_name, "areno.trainers.process_reward:ProcessRewardTrainer"),
    default="quickstart_prm",
)

if __name__ == "__main__":
    run_recipe("areno.recipes.prm")
