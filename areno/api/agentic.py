"""The public names for code of agents and of their reward functions."""

from areno.agents.recorder import Recorder
from areno.agents.trajectories import AgentBatch, AgentItem, AgentTrajectory, AgentTrajectoryTurn, LossMaskPolicy
from areno.types import RewardRecord

__all__ = [
    "AgentBatch",
    "AgentItem",
    "AgentTrajectory",
    "AgentTrajectoryTurn",
    "LossMaskPolicy",
    "Recorder",
    "RewardRecord",
]
