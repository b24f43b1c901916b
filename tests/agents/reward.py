"""The reward of the agents here. Without `openai`, which takes the reward process most of a second to import."""


def reward_fn(record):
    assert len(record.tokens) == len(record.logprobs) == len(record.loss_mask)
    return float(len(set(record.tokens)) % 3)
