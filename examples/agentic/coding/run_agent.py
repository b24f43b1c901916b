"""The agent function: one repair for each sample, in at most 16 turns."""

from coding_task import RepairTask

from areno.agents.environment import agent_of

run_agent = agent_of(RepairTask, max_turns=16)
