"""1 if the submitted project passes the hidden tests, else 0: found by doing the model's calls once more."""

from coding_task import RepairTask

from areno.agents.environment import reward_of

reward_fn = reward_of(RepairTask)
