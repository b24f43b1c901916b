"""DRO: Direct Reward Optimisation (arXiv 2405.19107). An example of an algorithm that areno does not have.

    python examples/algorithms/dro.py total_train_steps=50

Let h = log(policy / reference) of a completion, and R its reward. Under the policy that maximises
reward - tau * KL(policy || reference), R - tau * h is the same for all completions of a prompt. DRO calls it V. It fits
the policy by least squares, so there is no ratio and no clip:

    loss = mean over rows of 1/2 (R - V - tau * h)^2

The paper learns V. This file uses the mean of R - tau * h over the samples of the prompt. Kimi k1.5 (2501.12599 sec.
2.3.2) uses the mean of R, and its reference is the policy before the update.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import areno
from areno.api import Algorithm, register_algorithm
from areno.config.models import PolicyConfig, RefConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.launch import run_algorithm
from areno.schema.fields import setting


@dataclass(kw_only=True)
class DROActorConfig(PolicyConfig):
    """The actor of DRO."""

    tau: float = setting(0.2, help="KL strength. A reward of 1 moves log(policy / ref) by 1 / tau", gt=0)
    adv_norm: None = setting(None, help="Not used: DRO computes its own advantages")


@dataclass(kw_only=True)
class DROConfig(PolicyExperimentConfig):
    """Direct Reward Optimisation: least squares in place of a clipped ratio."""

    actor: DROActorConfig = setting(help="The policy")
    ref: RefConfig = setting(factory=RefConfig, help="Frozen reference policy")


def advantages(rows, groups, actor):
    """R - V of the row, for each of its trained tokens. h is computed with the policy that sampled the rows.

    rows: the TrainSequences of the step. groups: the group number of each row. actor: the DROActorConfig.
    Returns a list with one array, (trained tokens,), for each row.
    """
    import numpy as np

    from areno.trainers.rows import trained

    log_ratios = [new - ref for new, ref in zip(trained(rows, "logprobs"), trained(rows, "ref_logprobs"), strict=True)]
    soft = defaultdict(list)
    for row, group, h in zip(rows, groups, log_ratios, strict=True):
        soft[group].append(row.reward - actor.tau * h.sum())
    return [np.full(h.size, row.reward - np.mean(soft[g])) for row, g, h in zip(rows, groups, log_ratios, strict=True)]


def dro_loss_fn(pack, logprobs, *, tau):
    """pack: see areno.loss_fns.DataPack. logprobs: (N,). A row without trained tokens has h = 0 and R - V = 0."""
    h_R = pack.sum_rows(pack.trained(logprobs - pack.need("ref_logprobs")))
    residual_R = pack.mean_rows(pack.trained(pack.need("advantages"))) - tau * h_R
    return pack.row_mean(residual_R.square() / 2), {"ref_kl": pack.row_mean(h_R.detach())}


def loss_fn(config):
    return partial(dro_loss_fn, tau=config.actor.tau)


ALGORITHM = Algorithm(
    name="dro",
    config=DROConfig,
    loop=lambda: areno.PolicyOnlyTrainer,
    loss_fn=loss_fn,
    advantage_fn=advantages,
    roles=("ref",),
)
register_algorithm(ALGORITHM)

if __name__ == "__main__":
    run_algorithm(ALGORITHM)
