"""Public names that agents and their reward functions import."""

from areno.agents.trajectories import AgentBatch, AgentItem, AgentTrajectory, AgentTrajectoryTurn, LossMaskPolicy
from areno.types import RewardRecord

__all__ = [
    "AgentBatch",
    "AgentItem",
    "AgentTrajectory",
    "AgentTrajectoryTurn",
    "LossMaskPolicy",
    "RewardRecord",
]
