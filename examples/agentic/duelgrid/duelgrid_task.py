"""The environment in which a model plays A against a scripted user. It answers with JSON; there are no tools."""

from duelgrid import COSTS, MOST_TURNS, RANGE, SIZE, drawing, game_of, read_actions
from duelgrid_opponent import scripted_turn

from areno.agents.environment import Environment

PER_HEALTH, WIN, PROBLEM = 0.1, 1.0, -0.1

RULES = f"""You are A in DuelGrid, a duel in turns on a grid of {SIZE} by {SIZE} tiles. Win in {MOST_TURNS} turns.
# is a wall, T a trap (2 damage), H health, E energy. Actions and their energy:
{{"action": "MOVE", "direction": "up"}} (or down, left, right): {COSTS["MOVE"]}
{{"action": "ATTACK"}}: {COSTS["ATTACK"]}, 2 damage if U is on the next tile
{{"action": "RANGED_ATTACK"}}: {COSTS["RANGED_ATTACK"]}, 1 damage up to {RANGE} tiles away in your row or column
{{"action": "PICKUP"}}: {COSTS["PICKUP"]}, takes H or E on your tile
{{"action": "SHIELD"}}: {COSTS["SHIELD"]}, stops the next hit
Answer with a JSON list of the actions of your turn, such as [{{"action": "MOVE", "direction": "left"}}]."""


def situation(game):
    """What the model is told before its turn."""
    me, other = game.players["A"], game.players["U"]
    return f"{drawing(game)}\nA: health {me.health}, energy {me.energy_to_begin}. U: health {other.health}."


class DuelGrid(Environment):
    """item.record: a row of the dataset. U begins.

    The reward of a turn is 0.1 for each health that A wins or U loses, in it and in U's next turn, less 0.1 for each
    that goes the other way, and less 0.1 for a turn that was no JSON or ended at an action that is not possible. The
    winner's last turn has 1 more, the loser's 1 less.
    """

    def __init__(self, item):
        self.game, self.seed = game_of(item.record), item.record["seed"]

    def reset(self):
        self.game.play(scripted_turn(self.game, self.seed))
        return [{"role": "system", "content": RULES}, {"role": "user", "content": situation(self.game)}]

    def answer(self, text):
        game = self.game
        before, n_logged = self._lead(), len(game.log)
        actions = read_actions(text)
        problem = game.play(actions or [])
        if actions is None:
            problem = "the answer is no JSON list of actions"
        if game.winner is None:
            game.play(scripted_turn(game, self.seed))
        reward = PER_HEALTH * (self._lead() - before) + (PROBLEM if problem else 0.0)
        reward += {"A": WIN, "U": -WIN}.get(game.winner, 0.0)
        happened = "\n".join([*([f"Your turn ended: {problem}."] if problem else []), *game.log[n_logged:]])
        return [{"role": "user", "content": f"{happened}\n{situation(game)}"}], reward, game.winner is not None

    def _lead(self):
        return self.game.players["A"].health - self.game.players["U"].health
