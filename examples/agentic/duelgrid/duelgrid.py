"""DuelGrid: turn-based tactics of two on a grid. The rules, and grids to play on.

U (the user) and A (the model) move in turns; U begins. A turn is a list of actions, which cost energy:

    {"action": "MOVE", "direction": "up"}        1   to the next tile: up, down, left, right
    {"action": "ATTACK"}                         2   2 damage to the other, on a neighbouring tile
    {"action": "RANGED_ATTACK"}                  3   1 damage to the other, at most 4 tiles away in its row or column
    {"action": "PICKUP"}                         1   take what lies on the own tile: 3 health or 2 energy
    {"action": "SHIELD"}                         2   the next hit before the own next turn does no damage

Energy comes back at the start of each own turn, 4 up to at most 6; what is picked up may exceed that. A trap takes 2
health when it is stepped on. Walls and the other player block the way, walls block the sight. Who has no health left
has lost; after 20 turns of each it is a draw. An action that is not possible ends the turn; those before it count.
"""

import copy
import json
import random
from collections import deque
from dataclasses import dataclass, field

SIZE, MOST_TURNS = 7, 20
HEALTH, ENERGY_PER_TURN, MOST_ENERGY = 8, 4, 6
COSTS = {"MOVE": 1, "ATTACK": 2, "RANGED_ATTACK": 3, "PICKUP": 1, "SHIELD": 2}
DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
RANGE, DAMAGE, RANGED_DAMAGE, TRAP_DAMAGE = 4, 2, 1, 2
PICKUPS = {"H": ("health", 3), "E": ("energy", 2)}


class IllegalAction(Exception):
    """The text says why the rules do not allow it."""


@dataclass
class Player:
    x: int
    y: int
    health: int = HEALTH
    energy: int = 0
    shielded: bool = False

    @property
    def energy_to_begin(self):
        """What it has when its next turn begins."""
        return max(self.energy, min(MOST_ENERGY, self.energy + ENERGY_PER_TURN))


@dataclass
class Game:
    """tiles: rows of "." free, "#" wall, "T" trap, "H" health, "E" energy. turn: whose it is. log: what happened."""

    tiles: list[str]
    players: dict[str, Player]
    turn: str = "U"
    n_turns: int = 0  # that are over
    log: list[str] = field(default_factory=list)

    @property
    def me(self):
        return self.players[self.turn]

    @property
    def other(self):
        return self.players["A" if self.turn == "U" else "U"]

    @property
    def winner(self):
        """U or A, "draw", or None while the game goes on."""
        dead = [name for name, player in self.players.items() if player.health <= 0]
        if dead:
            return "A" if dead == ["U"] else "U" if dead == ["A"] else "draw"
        return "draw" if self.n_turns >= 2 * MOST_TURNS else None

    def play(self, actions):
        """One turn of whose turn it is. Returns None, or why it ended early."""
        self.begin_turn()
        problem = None
        for action in actions:
            if self.winner is not None:
                break
            try:
                self.act(action)
            except IllegalAction as error:
                problem = str(error)
                self.log.append(f"{self.turn}: {problem}")
                break
        self.n_turns += 1
        self.turn = "A" if self.turn == "U" else "U"
        return problem

    def begin_turn(self):
        self.me.shielded = False
        self.me.energy = self.me.energy_to_begin

    def act(self, action):
        """One action. IllegalAction, and nothing changed, if it is not possible."""
        name = action.get("action") if isinstance(action, dict) else None
        if not isinstance(name, str) or name not in COSTS:
            raise IllegalAction(f"there is no action {name!r}")
        if self.me.energy < COSTS[name]:
            raise IllegalAction(f"{name} costs {COSTS[name]} energy, {self.me.energy} is left")
        happened = {
            "MOVE": lambda: self._move(action.get("direction")),
            "ATTACK": lambda: self._attack(self._distance() == 1, DAMAGE, "ATTACK needs the other on the next tile"),
            "RANGED_ATTACK": lambda: self._attack(
                self.in_sight(), RANGED_DAMAGE, f"RANGED_ATTACK needs a free line to the other of at most {RANGE} tiles"
            ),
            "PICKUP": self._pick_up,
            "SHIELD": self._shield,
        }[name]()
        self.me.energy -= COSTS[name]
        self.log.append(f"{self.turn}: {happened}")

    def tile(self, x, y):
        return self.tiles[y][x] if 0 <= x < SIZE and 0 <= y < SIZE else "#"

    def is_free(self, x, y):
        """Whether one can step there."""
        return self.tile(x, y) != "#" and all((x, y) != (each.x, each.y) for each in self.players.values())

    def in_sight(self):
        """Whether the other is in the own row or column, near enough, without a wall between."""
        me, other = self.me, self.other
        if (me.x != other.x and me.y != other.y) or self._distance() > RANGE:
            return False
        between = [
            (x, y)
            for x in range(min(me.x, other.x), max(me.x, other.x) + 1)
            for y in range(min(me.y, other.y), max(me.y, other.y) + 1)
        ]
        return all(self.tile(x, y) != "#" for x, y in between)

    def distances(self, to):
        """Tile -> number of steps to `to` around walls, not through players."""
        found, todo = {to: 0}, deque([to])
        while todo:
            x, y = todo.popleft()
            for dx, dy in DIRECTIONS.values():
                tile = (x + dx, y + dy)
                if tile not in found and self.tile(*tile) != "#":
                    found[tile] = found[x, y] + 1
                    if self.is_free(*tile):
                        todo.append(tile)
        return found

    def copy(self):
        return copy.deepcopy(self)

    def _distance(self):
        return abs(self.me.x - self.other.x) + abs(self.me.y - self.other.y)

    def _move(self, direction):
        if not isinstance(direction, str) or direction not in DIRECTIONS:
            raise IllegalAction(f"there is no direction {direction!r}")
        dx, dy = DIRECTIONS[direction]
        if not self.is_free(self.me.x + dx, self.me.y + dy):
            raise IllegalAction(f"the way {direction} is blocked")
        self.me.x, self.me.y = self.me.x + dx, self.me.y + dy
        if self.tile(self.me.x, self.me.y) == "T":
            self.me.health -= TRAP_DAMAGE
            return f"MOVE {direction} into a trap, {TRAP_DAMAGE} damage"
        return f"MOVE {direction}"

    def _attack(self, is_possible, damage, needed):
        if not is_possible:
            raise IllegalAction(needed)
        if self.other.shielded:
            self.other.shielded = False
            return "attack, held off by the shield"
        self.other.health -= damage
        return f"attack, {damage} damage"

    def _pick_up(self):
        what = self.tile(self.me.x, self.me.y)
        if what not in PICKUPS:
            raise IllegalAction("there is nothing to pick up here")
        kind, amount = PICKUPS[what]
        setattr(self.me, kind, getattr(self.me, kind) + amount)
        row = self.tiles[self.me.y]
        self.tiles[self.me.y] = row[: self.me.x] + "." + row[self.me.x + 1 :]
        return f"PICKUP of {amount} {kind}"

    def _shield(self):
        self.me.shielded = True
        return "SHIELD"


def game_of(row):
    """The game that a row of the dataset describes."""
    players = {name: Player(*row[name]) for name in ("U", "A")}
    return Game(list(row["tiles"]), players)


def arenas(count, seed):
    """Rows of a dataset: `count` grids with walls, traps and pickups, both players and a seed for the user's moves."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        tiles = [["."] * SIZE for _ in range(SIZE)]
        places = [(x, y) for x in range(SIZE) for y in range(SIZE)]
        draw.shuffle(places)
        for what in "#" * 5 + "T" * 4 + "H" * 2 + "E" * 2:
            x, y = places.pop()
            tiles[y][x] = what
        u, a = places.pop(), places.pop()
        row = {"tiles": ["".join(line) for line in tiles], "U": list(u), "A": list(a), "seed": draw.randrange(10**6)}
        distances = game_of(row).distances(u)
        n_free = sum(line.count(tile) for line in row["tiles"] for tile in ".THE")
        if len(distances) == n_free and distances[a] >= 3:  # every tile can be reached
            found.append(row)
    return found


def drawing(game):
    """The grid with the players on it."""
    lines = [list(line) for line in game.tiles]
    for name, player in game.players.items():
        lines[player.y][player.x] = name
    return "\n".join("".join(line) for line in lines)


def read_actions(text):
    """The actions in an answer: the JSON list that it ends with, or its field "actions". None if there is none."""
    start = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=-1)
    try:
        value = json.loads(text[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    actions = value.get("actions") if isinstance(value, dict) else value
    return actions if isinstance(actions, list) else None
