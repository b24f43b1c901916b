"""1 for the correct sum, 0 for anything else."""


def reward_fn(record):
    return 1.0 if record.completion.strip() == record.solutions else 0.0
