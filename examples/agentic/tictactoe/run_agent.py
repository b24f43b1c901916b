"""The agent function: one game for each sample. A game has at most five moves of X."""

from tictactoe import TicTacToe

from areno.agents.environment import agent_of

run_agent = agent_of(TicTacToe, max_turns=5)
