"""Games of the package textarena. A game of one player is a task; one of two players is played by the policy alone.

Most games draw from Python's global random numbers. Each game has its own state of these, so that it depends on its
seed alone, although an agent process plays many games at the same time.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

from areno.environments.package import SIZES, TEST, EnvironmentPackage, LazyRows, RunAgent
from areno.environments.rows_process import rows_process
from areno.errors import ConfigError, DataError
from areno.files.user_code import describe_error
from areno.reward_fns.answers import after_reasoning

_OWN = {"seed": 0, "max_turns": 50}
_SEEDS = 2**31  # numpy takes seeds up to twice that
_DATA = "words averaged_perceptron_tagger_eng"
_NO_NEWS = "It is your turn."


class TextArena(EnvironmentPackage):
    """`textarena:NAME`, a game."""

    scheme = distribution = extra = "textarena"
    versions = ">=0.7.4,<0.8"
    has_agent = True

    def check(self) -> None:
        self.check_installed()
        self.check_name(self._call(_names))
        self._check_game({})

    def rows(self, split: str, options: Mapping[str, Any]) -> LazyRows:
        """Return a row for each game, with its first observation as the prompt.

        The options are size, seed, max_turns (of both players) and the settings of the game.
        """
        self.check_installed()
        self.check_split(split)
        own = {"size": SIZES[split], **_OWN}
        self.check_options(options, [*own, *self._call(_settings_of, self.name)])
        self.check_counts({**own, **options}, size=1, seed=0, max_turns=1)
        settings = {name: value for name, value in options.items() if name not in own}
        self._check_game(settings)
        return _GameRows(self.name, split, {**own, **options}, settings)

    def agent(self) -> RunAgent:
        """Return an agent that plays the game of a row. Its reward is that of the game."""
        self.check_installed()

        async def run_agent(ctx: Any, batch: Any) -> dict[str, Any]:
            from openai import AsyncOpenAI

            [item] = batch
            row = item.record
            if row.get("game") != self.name:
                raise DataError("its row is not of {}", self.spec)
            game = _Game(self.name, row["seed"], row["game_settings"])
            # timeout=None: the server limits the time of each request.
            async with AsyncOpenAI(
                base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0, timeout=None
            ) as client:
                return await _play(game, client, row["seat"], row["max_turns"])

        return run_agent

    def _check_game(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError if the game cannot be played."""
        if problem := self._call(_problem_of, self.name, settings):
            raise self.problem("{}", problem)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the process that makes rows: a game may hang, and draws from the random numbers of all."""
        try:
            return rows_process(self.scheme).call(function, *args)
        except DataError as error:
            raise self.problem("cannot be played here: {}", error) from error


def _names() -> list[str]:
    from textarena.envs.registration import ENV_REGISTRY

    return sorted(ENV_REGISTRY)


def _settings_of(name: str) -> list[str]:
    game, package = _make(name, {}), import_module("textarena")
    while isinstance(game, package.Wrapper):
        game = game.env
    return list(inspect.signature(type(game)).parameters)


def _problem_of(name: str, settings: Mapping[str, Any]) -> str:
    """Return why a game cannot be played, or ""."""
    try:
        _first_prompt(name, 0, settings)
    except ConfigError as error:
        return str(error)
    except LookupError:  # of NLTK
        text = (
            "needs data of NLTK, which is not loaded here: python -m nltk.downloader words averaged_perceptron_tagger"
        )
        return f"{text}_eng"
    except (Exception, SystemExit) as error:  # a game may raise anything
        return f"cannot be played here: {describe_error(error)}"
    return ""


def _make(name: str, settings: Mapping[str, Any]) -> Any:
    with _without_downloads():
        return import_module("textarena").make(name, **settings)


class _Game:
    """A game, and the random numbers that belong to it."""

    def __init__(self, name: str, seed: int, settings: Mapping[str, Any]):
        import numpy as np

        self._random: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()
        for n_players in (1, 2):
            self._game = self._call(_make, name, settings)
            try:
                self._call(self._game.reset, num_players=n_players, seed=seed)
            except (AssertionError, ValueError):  # the game has another number of players
                continue
            if self.n_players == n_players:
                return
        raise ConfigError("has more than two players, and games of one or two are supported")

    @property
    def n_players(self) -> int:
        """Players of the game. Some games that need several do not check how many there are."""
        state, package = self._game.state, import_module("textarena")  # by name: this module has the same one
        return state.num_players if isinstance(state, package.SinglePlayerState) else max(2, state.num_players)

    def observe(self) -> tuple[int, Any]:
        return self._call(self._game.get_observation)

    def step(self, action: str) -> bool:
        return bool(self._call(self._game.step, action=action)[0])

    def result(self, seat: int) -> dict[str, float]:
        """Return the reward of a player, 0 if the game is not over, and whether its last move was invalid."""
        rewards, infos = self._call(self._game.close)
        reward, info = (rewards or {}).get(seat, 0.0), infos.get(seat, {})
        return {"reward": reward, "finished": float(bool(rewards)), "invalid_move": float(info.get("invalid_move", 0))}

    def name_of(self, seat: int) -> str:
        return self._game.state.role_mapping.get(seat, f"Player {seat}")

    def _call(self, method: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call code of the game with its own random numbers."""
        import numpy as np

        others = random.getstate(), np.random.get_state()
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        try:
            return method(*args, **given)
        finally:
            self._random, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


@contextmanager
def _without_downloads() -> Iterator[None]:
    """Keep NLTK from downloading what games ask for when they are imported. Data that is there is used."""
    import nltk

    download, nltk.download = nltk.download, lambda *args, **given: True
    try:
        yield
    finally:
        nltk.download = download


class _Player:
    """What a player has seen and said, as a conversation."""

    def __init__(self, name: str):
        self.messages: list[Any] = []
        self._name, self._seen, self._action = name, "", ""

    def show(self, observation: Any) -> None:
        """Add an observation: the events since the last one, all events so far, or the state of the board."""
        if isinstance(observation, list):
            new = "".join(f"\n{text}" for _, text, _ in observation)
        elif observation.startswith(self._seen):
            new, self._seen = observation[len(self._seen) :], observation
        else:
            new, self._seen = observation, observation
            self.messages = []  # the board says all that counts
        for echo in (f"\n[{self._name}] {self._action}", f"\n[{self._name}] [{self._action}]", f"\n{self._action}"):
            if self._action and new.startswith(echo):
                new = new[len(echo) :]
                break
        self.messages.append({"role": "user", "content": new.strip() or _NO_NEWS})

    def say(self, message: Any) -> str:
        """Add an answer of the model, and return it as an action."""
        self.messages.append(message.model_dump(exclude_none=True))
        self._action = after_reasoning(message.content or "").strip()
        return self._action


async def _play(game: _Game, client: Any, seat: int, max_turns: int) -> dict[str, Any]:
    """Play a game to its end. The turns of one player are trained.

    It is the player with number `seat`, or the other one if the game ends before that player's first turn.
    """
    players = [_Player(game.name_of(number)) for number in range(game.n_players)]
    turns: list[list[Any]] = [[] for _ in players]
    for _ in range(max_turns):
        number, observation = game.observe()
        player = players[number]
        player.show(observation)
        asked = list(player.messages)
        response = await client.chat.completions.create(model="policy", messages=asked)
        turns[number].append((asked, response))
        if game.step(player.say(response.choices[0].message)):
            break
    trained = seat % len(players)
    if not turns[trained]:
        trained = 1 - trained
    return {**game.result(trained), "turns": turns[trained]}


class _GameRows(LazyRows):
    def __init__(self, name: str, split: str, own: Mapping[str, Any], settings: Mapping[str, Any]):
        self._name, self._split, self._own, self._settings = name, split, own, settings

    @property
    def fingerprint(self) -> str:
        return repr((self._name, self._split, self._own, self._settings, version("textarena")))

    def __len__(self) -> int:
        return self._own["size"]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        seed = (2 * (self._own["seed"] * 1_000_003 + index) + (self._split == TEST)) % _SEEDS
        prompt, seed = self._first_prompt(seed)
        return {
            "prompt": prompt,
            "game": self._name,
            "game_settings": self._settings,
            "seed": seed,
            "seat": index % 2,
            "max_turns": self._own["max_turns"],
        }

    def _first_prompt(self, seed: int) -> tuple[str, int]:
        """Return the prompt of a game with its seed, or one with another seed: some games hang with some seeds."""
        for tried in (seed, seed + _SEEDS):
            with contextlib.suppress(DataError):
                return rows_process(TextArena.scheme).call(_first_prompt, self._name, tried, self._settings), tried
        raise DataError("{}:{} cannot make a game with the seed {}", TextArena.scheme, self._name, seed)


def _first_prompt(name: str, seed: int, settings: Mapping[str, Any]) -> str:
    player = _Player("")
    player.show(_Game(name, seed, settings).observe()[1])
    return player.messages[0]["content"]
