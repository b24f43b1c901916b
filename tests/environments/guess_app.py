"""A server of OpenEnv with room for 256 sessions, whose steps take 20 ms. Long answers have high rewards."""

import socket
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    n_guesses = 0

    def reset(self, seed=None, **more):
        return Hint(hint="Guess a digit.")

    def step(self, action):
        time.sleep(0.02)
        self.n_guesses += 1
        return Hint(hint="no", reward=len(action.text) / 100, done=self.n_guesses == 3)


app = create_app(Guessing, Guess, Hint, max_concurrent_envs=256)


def serve():
    """Print the address, and serve until the process ends."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
