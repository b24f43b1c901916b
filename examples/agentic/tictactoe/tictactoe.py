"""Tic-tac-toe: rules, opponents, and the environment in which a model plays X.

Squares are numbered 1 to 9, left to right and top to bottom. A board is a text of nine characters: X, O, or a dot.
"""

import functools
import random

from areno.agents.environment import Environment

EMPTY_BOARD = "." * 9
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.5, 0.0, -1.0

PLACE = {
    "type": "function",
    "function": {
        "name": "place",
        "description": "Put your X on an empty square.",
        "parameters": {
            "type": "object",
            "properties": {"square": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["square"],
            "additionalProperties": False,
        },
    },
}


def free_squares(board):
    """The numbers of the empty squares."""
    return [i + 1 for i, mark in enumerate(board) if mark == "."]


def put(board, square, mark):
    """The board with a mark on a square, which must be empty."""
    if square not in free_squares(board):
        raise ValueError(f"square {square} is not free")
    return board[: square - 1] + mark + board[square:]


def winner(board):
    """X or O if it has three in a line, "draw" if the board is full, None if the game goes on."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None if "." in board else "draw"


@functools.cache
def value(board, mark):
    """What X gets from here if both play perfectly and `mark` moves: 1, 0 or -1."""
    over = winner(board)
    if over is not None:
        return {"X": 1, "O": -1, "draw": 0}[over]
    values = [value(put(board, square, mark), "O" if mark == "X" else "X") for square in free_squares(board)]
    return max(values) if mark == "X" else min(values)


def best_squares(board, mark):
    """The moves that keep the value of the board."""
    other = "O" if mark == "X" else "X"
    return [square for square in free_squares(board) if value(put(board, square, mark), other) == value(board, mark)]


def reply(board, opponent, seed):
    """Where O plays: a "perfect" opponent or a "random" one. The same board and seed give the same move."""
    squares = best_squares(board, "O") if opponent == "perfect" else free_squares(board)
    return random.Random(f"{seed} {board}").choice(squares)


def positions(count, seed):
    """Rows of a dataset: `count` positions in which X moves, reached by random moves, with opponent and seed."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        board = EMPTY_BOARD
        for mark in "XO" * draw.randrange(4):
            if winner(board) is None:
                board = put(board, draw.choice(free_squares(board)), mark)
        if winner(board) is None:
            opponent = "perfect" if len(found) % 2 else "random"
            found.append({"board": board, "opponent": opponent, "seed": draw.randrange(10**6)})
    return found


def drawing(board):
    """The board as the model sees it: a free square shows its number."""
    shown = [mark if mark != "." else str(i + 1) for i, mark in enumerate(board)]
    return "\n".join(" ".join(shown[row : row + 3]) for row in (0, 3, 6))


def prompt(board):
    return f"You play X in tic-tac-toe. Call place with the number of a free square.\n{drawing(board)}"


class TicTacToe(Environment):
    """A game from a position in which X moves. An illegal move ends it, and so does an answer without a move.

    item.record: a row of the dataset, with board, opponent and seed.
    """

    tools = (PLACE,)

    def __init__(self, item):
        row = item.record
        self.board, self.opponent, self.seed = row["board"], row["opponent"], row["seed"]
        self.is_over = False

    def reset(self):
        return [{"role": "user", "content": prompt(self.board)}]

    def step(self, tool_calls):
        call, *others = tool_calls
        messages = [other.result("One move at a time; this one does not count.") for other in others]
        square = call.arguments.get("square")
        if isinstance(square, bool) or square not in free_squares(self.board):
            self.is_over = True
            return [call.result("This square is not free. You lose."), *messages], ILLEGAL, True
        self.board = put(self.board, int(square), "X")
        if winner(self.board) is None:
            self.board = put(self.board, reply(self.board, self.opponent, self.seed), "O")
        over = winner(self.board)
        self.is_over = over is not None
        ending = {"X": "\nYou win.", "O": "\nYou lose.", "draw": "\nA draw.", None: ""}[over]
        reward = {"X": WIN, "O": LOSS, "draw": DRAW, None: 0.0}[over]
        return [call.result(drawing(self.board) + ending), *messages], reward, self.is_over

    def answer(self, text):
        self.is_over = True
        return [], ILLEGAL, True
