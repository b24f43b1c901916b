"""Games: the real package textarena, and a made-up one whose games misbehave."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areno.environments.package import LazyRows
from areno.environments.packages import package_of
from areno.environments.rows_process import rows_process
from areno.environments.textarena import _Game, _play
from areno.errors import ConfigError
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play

real = pytest.mark.skipif(find_spec("textarena") is None, reason="needs the extra textarena")


def rows(name: str, split: str = "train", **options: Any) -> LazyRows:
    environment = package_of(f"textarena:{name}", "train_dataset.path")
    assert environment is not None
    environment.check()
    found = environment.rows(split, options)
    assert isinstance(found, LazyRows)
    return found


class Script:
    """A client whose answers are given."""

    def __init__(self, *answers: str):
        self._answers = iter(answers)
        self.asked: list[list[Any]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, model: str, messages: list[Any]) -> Any:
        self.asked.append(messages)
        text = next(self._answers)
        message = SimpleNamespace(content=text, model_dump=lambda **how: {"role": "assistant", "content": text})
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def asked_of(result: dict[str, Any]) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages, _ in result["turns"]]


def played_game(name: str, *answers: str, seed: int = 3, seat: int = 0, max_turns: int = 20) -> dict[str, Any]:
    return asyncio.run(_play(_Game(name, seed, {}), Script(*answers), seat, max_turns))


@real
@pytest.mark.slow
def test_a_game_of_one_player() -> None:
    number = _Game("GuessTheNumber-v0", 3, {})._game.game_number
    first = number % 20 + 1
    result = played_game("GuessTheNumber-v0", f"<think>[7]</think>Is it [{first}]?", f"[{number}]")
    assert {name: result[name] for name in ("reward", "finished", "invalid_move")} == {
        "reward": 1,
        "finished": 1.0,
        "invalid_move": 0.0,
    }
    (prompt,), (same, answer, hint) = asked_of(result)
    assert (prompt, answer) == (same, f"<think>[7]</think>Is it [{first}]?")
    assert prompt == rows("GuessTheNumber-v0")[0]["prompt"]
    assert hint in ("[GAME] The target number is higher.", "[GAME] The target number is lower.")


@real
@pytest.mark.slow
@pytest.mark.parametrize(("seat", "reward"), [(0, 1), (1, -1)])
def test_a_game_of_two_players_is_played_by_the_policy_alone(seat: int, reward: int) -> None:
    """The first player wins at 0, 1, 2. Each player sees its own conversation."""
    result = played_game("TicTacToe-v0", "[0]", "[3]", "[1]", "[4]", "[2]", seat=seat)
    assert (result["reward"], len(result["turns"])) == (reward, (3, 2)[seat])
    asked = asked_of(result)[-1]
    assert asked[0].startswith(f"[GAME] You are Player {seat} in Tic Tac Toe.")
    assert asked[1::2] == (["[0]", "[1]"], ["[3]"])[seat]
    assert f"[Player {1 - seat}] [{4 - seat * 3}]" in asked[-1]
    assert f"[Player {seat}]" not in asked[-1]


@real
@pytest.mark.slow
def test_a_player_without_a_turn_is_not_trained() -> None:
    result = played_game("TicTacToe-v0", "no", "no", seat=1)
    assert (result["reward"], result["invalid_move"], len(result["turns"])) == (-1, 1.0, 2)


@real
@pytest.mark.slow
def test_a_board_is_a_conversation_of_its_own_and_a_game_may_stay_unfinished() -> None:
    result = played_game("2048-v0-train", "[Up]", "[Left]", "[Up]", max_turns=3)
    assert [len(messages) for messages in asked_of(result)] == [1, 1, 1]
    assert (result["reward"], result["finished"]) == (0.0, 0.0)


@real
@pytest.mark.slow
def test_a_game_depends_on_its_seed_alone() -> None:
    """Also while others are played, and nothing else of the process does."""
    random.seed(5)
    np.random.seed(5)
    expected = random.getstate()[1], np.random.get_state()[1].tolist()
    alone = played_game("Blackjack-v0", *["[Hit]"] * 30)
    games = [_Game("Blackjack-v0", 3, {}) for _ in range(2)]
    texts: list[list[str]] = [[], []]
    for _ in range(len(alone["turns"])):
        for game, seen in zip(games, texts, strict=True):
            seen.append(game.observe()[1])
            game.step("[Hit]")
    assert texts[0] == texts[1]
    assert (random.getstate()[1], np.random.get_state()[1].tolist()) == expected
    found = rows("Blackjack-v0", size=6)
    assert [found[k]["seat"] for k in range(3)] == [0, 1, 0]
    seeds = [
        row["seed"] for split in ("train", "test") for row in map(rows("Blackjack-v0", split).__getitem__, range(9))
    ]
    assert len(set(seeds)) == 18


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("GuesTheNumber-v0", {}, r"GuesTheNumber-v0 does not exist; did you mean GuessTheNumber-v0"),
        ("Wordle-v0", {}, r"textarena:Wordle-v0 needs data of NLTK, which is not loaded here: python -m nltk"),
        ("Taboo-v0", {}, "textarena:Taboo-v0 has more than two players, and games of one or two are supported"),
        ("GuessWho-v0", {}, "textarena:GuessWho-v0 cannot be played here: ValueError: OpenRouter API key not found"),
        ("GuessTheNumber-v0", {"max_numbr": 3}, r"dataset_kwargs.max_numbr: is no option of .*did you mean max_number"),
        ("GuessTheNumber-v0", {"max_turns": 0}, r"dataset_kwargs.max_turns: is 0; a whole number of at least 1"),
    ],
)
def test_what_is_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    rows_process.cache_clear()
    with pytest.raises(ConfigError, match=message):
        rows(name, **options)


def train(folder: Path, name: str, *settings: str) -> Played:
    return play(
        "gspo",
        folder / "run",
        f"train_dataset.path=textarena:{name}",
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        "agent.workers=2",
        "gconfig.max_tokens=2000",
        "saver.freq_steps=null",
        *settings,
        task="environment",
    )


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "TicTacToe-v0"])
def test_training(tmp_path: Path, name: str) -> None:
    played = train(tmp_path, name)
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert played.series("rollout/reward/finished") == [1.0, 1.0]
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4


FAKE = """
import os, time


class Wrapper: ...


class SinglePlayerState:
    num_players = 1
    role_mapping = {0: "Player"}


class Game:
    def __init__(self):
        self.state = SinglePlayerState()

    def reset(self, num_players, seed):
        assert num_players == 1
        self.seed, self.turns = seed, 0

    def get_observation(self):
        is_bad = self.turns > 0 and self.seed % 4 == 0
        return 0, f"\\n[GAME] {self.seed}{'x' * 10_000_000 * (is_bad and self.kind == 'long')}"

    def step(self, action):
        self.turns += 1
        if self.seed % 4 == 0:
            if self.kind == "hangs":
                time.sleep(600)
            if self.kind == "dies":
                os._exit(3)
            if self.kind == "raises":
                raise OSError("no board")
        return self.turns > 1, {}

    def close(self):
        return {0: float("nan") if self.kind == "nan" and self.seed % 4 == 0 else float(self.seed)}, {0: {}}


def make(name):
    game = Game()
    game.kind = name
    return game
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package textarena, of which every second game of a run misbehaves."""
    folder = tmp_path / "packages"
    for path, text in {
        "textarena/__init__.py": FAKE,
        "textarena/envs/__init__.py": "",
        "textarena/envs/registration.py": "ENV_REGISTRY = dict.fromkeys(['hangs', 'dies', 'raises', 'nan', 'long'])\n",
        "nltk/__init__.py": "def download(*names): ...\n",
        "textarena-0.7.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: textarena\nVersion: 0.7.4\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("textarena", "nltk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    rows_process.cache_clear()
    yield
    rows_process.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hangs", "dies", "raises", "nan", "long"])
def test_games_that_misbehave(fake: None, tmp_path: Path, kind: str) -> None:
    """Their samples are counted as errors, and the run goes on with the others."""
    played = train(tmp_path, kind, "agent.timeout_s=8", "train_dataset.shuffle=false")
    statuses = ("errors", "timeouts", "filtered")
    failed = np.sum([played.series(f"rollout/agent_{status}") for status in statuses], axis=0).tolist()
    trained = [sum(sample["reward"] is not None for sample in played.samples(step)) for step in (1, 2)]
    assert [bad + good for bad, good in zip(failed, trained, strict=True)] == [16.0, 16.0]
    # A game that hangs or dies takes its process with it, and may take others that ran there.
    assert failed == [8.0, 8.0] or (kind in ("hangs", "dies") and all(8.0 <= bad < 16.0 for bad in failed))
