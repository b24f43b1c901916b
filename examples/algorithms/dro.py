"""DRO: Direct Reward Optimisation (arXiv 2405.19107), an algorithm that areno does not have, in a file of one's own.

    python examples/algorithms/dro.py total_train_steps=50

Under the policy that maximises reward - tau * KL(policy || reference), R - tau * h is the same for every answer to a
prompt, h = log(policy / reference) of the answer. DRO calls it V and gets there by least squares, with nothing to clip:

    loss = mean over rows of 1/2 (R - V - tau * h)^2

The paper learns V. Here it is the mean of R - tau * h over the prompt's samples; Kimi k1.5 (2501.12599 sec. 2.3.2) has
the mean of R, with the policy before the update as its reference.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from areno.api import Algorithm, register_algorithm, run_algorithm
from areno.config.experiments import PolicyExperimentConfig
from areno.config.fields import check, knob, settings
from areno.config.model_roles import PolicyConfig, RefConfig
from areno.errors import Problem

# Ratios, their clip, a KL beside its own: what other policies can be told and this one has no use for.
NO_USE = ("eps_clip", "eps_clip_higher", "c_clip", "use_decoupled_loss", "m2_threshold", "recompute_logprob")
NO_USE += ("kl_ctl", "kl_estimator", "use_kl_in_reward")


@dataclass(kw_only=True)
class DROActorConfig(PolicyConfig):
    """The actor of DRO."""

    tau: float = knob(0.2, help="a reward of 1 is worth moving log(policy / ref) of an answer by 1 / tau", gt=0)
    adv_norm: None = knob(None, help="DRO has an advantage of its own")

    @check
    def nothing_is_set_in_vain(self) -> Iterator[Problem]:
        for name in NO_USE:
            if getattr(self, name) != settings(PolicyConfig)[name].default():
                yield Problem(name, "has no use in DRO; leave it out")


@dataclass(kw_only=True)
class DROConfig(PolicyExperimentConfig):
    """Direct Reward Optimisation: least squares in place of a clipped ratio."""

    actor: DROActorConfig = knob(help="the policy")
    ref: RefConfig = knob(factory=RefConfig, help="frozen reference, which the policy stays near to")


def advantages(rows, groups, actor):
    """R - V of each row, on each of its trained tokens. h is that of the policy which drew the samples."""
    import numpy as np

    from areno.api.rows import trained

    log_ratios = [new - ref for new, ref in zip(trained(rows, "logprobs"), trained(rows, "ref_logprobs"), strict=True)]
    soft = defaultdict(list)
    for row, group, h in zip(rows, groups, log_ratios, strict=True):
        soft[group].append(row.reward - actor.tau * h.sum())
    return [np.full(h.size, row.reward - np.mean(soft[g])) for row, g, h in zip(rows, groups, log_ratios, strict=True)]


def dro_loss_fn(pack, logprobs, *, tau):
    """pack: see areno.loss_fns.DataPack. logprobs: (N,). A row that trains no token has h = 0 and R - V = 0 here."""
    h_R = pack.sum_rows(pack.trained(logprobs - pack.need("ref_logprobs")))
    residual_R = pack.mean_rows(pack.trained(pack.need("advantages"))) - tau * h_R
    return pack.row_mean(residual_R.square() / 2), {"ref_kl": pack.row_mean(h_R.detach())}


def loss_fn(config):
    return partial(dro_loss_fn, tau=config.actor.tau)


ALGORITHM = Algorithm(
    name="dro", config=DROConfig, loop="policy_only", loss_fn=loss_fn, advantage_fn=advantages, roles=("ref",)
)
register_algorithm(ALGORITHM)

if __name__ == "__main__":
    run_algorithm(ALGORITHM)
