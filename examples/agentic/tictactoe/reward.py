"""1 for a game that is won, 0.5 for a draw, 0 for a loss, else -1: found by replaying the game.

legal_moves is the share of the model's answers that are a move which the rules allow. Any other ends the game.
"""

from tictactoe import ILLEGAL, TicTacToe

from areno.agents.environment import replay


async def reward_fn(record):
    game = TicTacToe(record)
    reward = await replay(game, record.messages)
    if not game.is_over:  # the last answer was cut off, and not played
        reward = ILLEGAL
    n_answers = sum(message["role"] == "assistant" for message in record.messages)
    return {"reward": reward, "legal_moves": 1.0 - (reward == ILLEGAL) / n_answers}
