"""How the user U plays: it hits when it can, else it goes for a pickup near by or for the other."""

import random

from duelgrid import COSTS, DIRECTIONS, IllegalAction


def next_action(game, draw):
    """A legal action for whose turn it is, or None to end the turn."""
    me = game.me
    wanted = []
    if abs(me.x - game.other.x) + abs(me.y - game.other.y) == 1:
        wanted.append({"action": "ATTACK"})
    if game.in_sight():
        wanted.append({"action": "RANGED_ATTACK"})
    if game.tile(me.x, me.y) in "HE":
        wanted.append({"action": "PICKUP"})
    goals = [(game.other.x, game.other.y)]
    goals += [(x, y) for y, line in enumerate(game.tiles) for x, tile in enumerate(line) if tile in "HE"]
    steps = []
    for goal in goals:
        distances = game.distances(goal)
        here = distances.get((me.x, me.y), 99)
        for name, (dx, dy) in DIRECTIONS.items():
            tile = (me.x + dx, me.y + dy)
            if distances.get(tile, 99) < here and game.is_free(*tile) and game.tile(*tile) != "T":
                steps.append((here, name))
    if steps:
        nearest = min(steps)[0]
        names = [name for distance, name in steps if distance == nearest]
        wanted.append({"action": "MOVE", "direction": draw.choice(names)})
    return next((action for action in wanted if COSTS[action["action"]] <= me.energy), None)


def scripted_turn(game, seed):
    """The actions of a whole turn. The same game and seed give the same actions."""
    draw = random.Random(f"{seed} {game.n_turns}")
    trial, actions = game.copy(), []
    trial.begin_turn()
    while trial.winner is None and (action := next_action(trial, draw)) is not None:
        try:
            trial.act(action)
        except IllegalAction:
            break
        actions.append(action)
    return actions
