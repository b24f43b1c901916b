"""The rewards of a duel's turns added up, found by replaying it."""

from duelgrid_task import DuelGrid

from areno.agents.environment import reward_of

reward_fn = reward_of(DuelGrid)
