"""The agent function: one duel for each sample."""

from duelgrid import MOST_TURNS
from duelgrid_task import DuelGrid

from areno.agents.environment import agent_of

run_agent = agent_of(DuelGrid, max_turns=MOST_TURNS)
