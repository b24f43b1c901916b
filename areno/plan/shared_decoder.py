"""The numbers of samples that training and evaluation decode at the same time, with the same decoder."""

from __future__ import annotations

from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.run import Layout
from areno.engine.spec import SharedDecoder
from areno.models.config import TransformerConfig

_MOST_EVALUATED = 512  # samples for each copy of the model: their logits still take little memory


def shared_decoder(
    config: PolicyExperimentConfig, model: TransformerConfig, layout: Layout, n_prompts: int | None = None
) -> SharedDecoder | None:
    """Return how many samples training and evaluation decode at the same time.

    An evaluation decodes more samples than a training step has, because its tokens depend on their number
    only by rounding, and not at all with engine.exact.

    Args:
        config: Settings of the run.
        model: Shape of the actor.
        layout: Division of the devices into copies of the model.
        n_prompts: Largest number of prompts that an evaluation samples at the same time. None derives an upper limit
            from the settings.

    Returns:
        The numbers. None if an evaluation decodes no more samples than training, because
        rollout.max_concurrent_rollouts is set, a step has as many, agents continue during evaluations, or the samples
        have recurrent states, which take memory for each sample that may run.
    """
    are_live = config.agent.fn is not None and config.rollout.max_head_offpolicyness > 0
    if config.rollout.max_concurrent_rollouts is not None or model.delta is not None or are_live:
        return None
    usual, most = config.rows_per_step, _MOST_EVALUATED * layout.dp_size
    if n_prompts is None:
        sets = config.valid_dataset.by_name().values() if config.valid_dataset is not None else ()
        n_prompts = max((min(each.batch_size or most, each.max_rows or most) for each in sets), default=0)
    most = min(most, n_prompts * (config.eval_gconfig or config.gconfig).n_samples)
    return SharedDecoder(usual=usual, most=most) if most > usual else None
