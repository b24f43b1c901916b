"""GRPO with shuffled advantages: a control, which must not learn.

    python examples/algorithms/shuffled_grpo.py --config-name=countdown_cpu actor.path=FOLDER

Each advantage of a step goes to a row that is drawn at random. So the advantages have the same distribution as those of
GRPO, but they say nothing about the answers. A solve rate that rises all the same has another cause than the reward.
"""

import areno
from areno.api import Algorithm, register_algorithm
from areno.launch import run_algorithm
from areno.recipes.grpo import GRPOConfig


def advantages(rows, groups, actor):
    """The advantages of GRPO, in another order.

    rows: the TrainSequences of the step. groups: the group number of each row. actor: the settings of the actor.
    Returns a list with one array, (trained tokens,), for each row.
    """
    import numpy as np

    from areno.trainers.rows import outcome_advantages

    found = outcome_advantages(rows, groups, actor)
    values = np.array([row[0] if row.size else 0.0 for row in found])
    # The tokens seed the order: equal runs shuffle equally, and each step shuffles anew.
    draw = np.random.default_rng([token for row in rows[:4] for token in row.tokens])
    return [np.full(row.size, value) for row, value in zip(found, draw.permutation(values), strict=True)]


ALGORITHM = Algorithm(
    name="shuffled_grpo",
    config=GRPOConfig,
    loop=lambda: areno.PolicyOnlyTrainer,
    advantage_fn=advantages,
)
register_algorithm(ALGORITHM)

if __name__ == "__main__":
    run_algorithm(ALGORITHM)
