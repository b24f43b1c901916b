"""areno serve: serve a model folder through the OpenAI protocol."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.files.interrupts import signal_handlers

if TYPE_CHECKING:
    from areno.server.sampling import ServerLimits

logger = logging.getLogger("areno")

_NAMES = {
    "actor.path": "FOLDER",
    "actor.dtype": "--dtype",
    "tokenizer_path": "FOLDER",
    "engine.tp_size": "--tp-size",
    "engine.world_size": "--world-size",
    "engine.device": "--device",
    "rollout.mem_fraction": "--mem-fraction",
    "rollout.max_kv_tokens": "--max-kv-tokens",
    "rollout.max_concurrent_rollouts": "--max-running",
    "gconfig.max_tokens": "--max-model-len",
    "gconfig.max_new_tokens": "--max-model-len",
    "train_dataset.max_length": "--max-model-len",
}
_MAX_REMEMBERED_TOKENS = 8_000_000  # tokens of conversations
_MORE_S = 10.0  # for the end of the server, after the last answers
_POLL_S = 1.0  # between checks that the workers live


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = (
        "Serves a Hugging Face folder, such as a checkpoint of a run, at http://HOST:PORT/v1: chat/completions, "
        "completions and models. /health and /metrics (Prometheus) are beside it. Ends on Ctrl-C or SIGTERM, when the "
        "answers in progress are done."
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="checkpoint, run (its last checkpoint), any model folder, or hub id")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all, which needs --api-key")
    add("--port", type=_number(int, 0, 65535), default=8000, help="port; 0 takes any that is free")
    add(
        "--api-key",
        default=os.environ.get("ARENO_API_KEY"),
        help="key that requests must bring; by default "
        "$ARENO_API_KEY. Without one, the server is open to programs on this machine",
    )
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; by default the folder's path and its last part",
    )
    add("--max-model-len", type=_number(int, 2), help="longest prompt plus answer in tokens; by default the model's")
    add("--max-running", type=_number(int, 1), default=256, help="answers that are sampled at the same time")
    add("--max-waiting", type=_number(int, 0), default=1024, help="answers that may wait; further requests get 429")
    add("--max-body-mb", type=_number(float, 0.001), default=16.0, help="largest request in MB")
    add("--max-messages", type=_number(int, 1), default=10_000, help="maximum number of messages in a chat")
    add("--timeout-s", type=_number(float, 0.001), default=3600.0, help="time limit for one request")
    add(
        "--shutdown-s",
        type=_number(float, 0),
        default=30.0,
        help="seconds that answers in progress may take after SIGTERM",
    )
    add("--tp-size", type=_number(int, 1), default=1, help="devices that share one copy of the model")
    add("--world-size", type=_number(int, 1), help="devices in all; by default every visible one")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="kind of device")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="of the weights")
    add("--mem-fraction", type=_number(float, 0.01, 0.99), default=0.85, help="share of the free memory for the cache")
    add("--max-kv-tokens", type=_number(int, 1), help="size of the cache in tokens")
    add("--max-prefill-tokens", type=_number(int, 1), default=8192, help="prompt tokens of one forward pass")
    add("--eager-decode", action="store_true", help="decode without CUDA graphs")
    add("--disable-thinking", action="store_true", help="pass enable_thinking=false to the chat template")
    add(
        "--allow-control-tokens",
        action="store_true",
        help="read control tokens (turn markers, bos, eos, pad) in the "
        "text of system, user and tool messages as such; by default they are ordinary text",
    )
    add("--random-weights", action="store_true", help="serve random weights, for benchmarks; needs no weight files")


def _number(kind: type, least: float, most: float = float("inf")) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bound = f"at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"is {text}; a number {bound} is expected")
        return value

    read.__name__ = kind.__name__  # argparse prints it, as in `invalid int value`
    return read


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes, and return the exit code.

    Args:
        arguments: The command line.

    Raises:
        ArenoError: The model cannot be served.
    """
    from areno.errors import ConfigError, Problem, keys_renamed
    from areno.tracking.run_log import RunLog

    local = arguments.host in ("127.0.0.1", "localhost", "::1")
    if not arguments.api_key and not local:
        text = f"is missing, and --host {arguments.host} can be reached from other machines; give one"
        raise ConfigError([Problem("--api-key", f"{text}, such as {secrets.token_urlsafe(24)}")])
    with RunLog(own_process=True), _signals() as shutdown, keys_renamed(_NAMES.get):
        return _serve(arguments, shutdown)


def _model(named: str) -> str:
    """Return the model folder: the newest checkpoint if a run is named."""
    from areno.errors import ArenoError
    from areno.tracking.reader import RunReader, is_run

    folder = Path(named).expanduser()
    if not is_run(folder):
        return named
    latest = RunReader(folder).latest_checkpoint()
    if latest is None:
        raise ArenoError("{} has no checkpoint yet; name a model folder", folder)
    return str(latest)


@dataclass
class _Shutdown:
    """State of the shutdown. limit_s: seconds that the shutdown may take; None before the server serves."""

    asked: threading.Event = field(default_factory=threading.Event)
    limit_s: float | None = None


def _limits(arguments: argparse.Namespace) -> ServerLimits:
    """Return the limits of the server, from the flags."""
    from areno.server.sampling import ServerLimits

    return ServerLimits(
        max_body=int(arguments.max_body_mb * 2**20),
        max_samples=arguments.max_running + arguments.max_waiting,
        timeout_s=arguments.timeout_s,
        shutdown_s=arguments.shutdown_s,
        max_messages=arguments.max_messages,
        max_remembered=_MAX_REMEMBERED_TOKENS,
    )


def _serve(arguments: argparse.Namespace, shutdown: _Shutdown) -> int:
    from areno.config.models import ModelConfig
    from areno.config.run import DecoderConfig, EngineConfig
    from areno.engine.engine import Engine
    from areno.engine.spec import RolloutSpec
    from areno.plan.devices import find_devices
    from areno.plan.lora import own_tokenizer, with_model
    from areno.plan.plan import open_actor
    from areno.server.app import build_server
    from areno.server.threads import ServerThread
    from areno.types import SamplingParams

    engine_config = EngineConfig.of(arguments, dummy_load=arguments.random_weights)
    path = _model(arguments.folder)
    actor = with_model(ModelConfig(path=path, dtype=arguments.dtype), path)
    devices = partial(find_devices, engine_config)
    allowed = arguments.allow_control_tokens
    plan = open_actor(actor, engine_config, devices, tokenizer_path=own_tokenizer(path), control_tokens=allowed)
    decoder = DecoderConfig.of(arguments)
    limits = _limits(arguments)
    with Engine(plan.spec.frozen(), plan.workers) as engine:
        context = min(arguments.max_model_len or engine.info.context_len, engine.info.context_len)
        room = engine.begin_rollout(RolloutSpec(max_running=arguments.max_running, max_len=context, decoder=decoder))
        names = arguments.served_model_name or [arguments.folder, Path(plan.spec.actor.path).name]
        server = build_server(
            engine,
            replace(room, context_len=context),
            plan.tokenizer,
            models=list(dict.fromkeys(names)),
            keys=[arguments.api_key] if arguments.api_key else [],
            limits=limits,
            seed=secrets.randbits(63),
            defaults=SamplingParams(max_new_tokens=context, max_context_len=context),
            thinking=False if arguments.disable_thinking else None,
        )
        thread = ServerThread(server.application, arguments.host, arguments.port, limits.shutdown_s)
        gc.freeze()  # a collection over all imported modules would stop the server for 300 ms
        url = thread.start()
        try:
            logger.info("serving %s at %s/v1 (context %d tokens)", ", ".join(server.models), url, context)
            shutdown.limit_s = limits.shutdown_s + _MORE_S
            while not shutdown.asked.wait(_POLL_S):
                engine.poll(0.0)  # raises if a worker has died
            logger.info("closing: %d samples in progress", server.sampler.n_samples)
        finally:
            thread.stop()
    return 0


@contextmanager
def _signals() -> Iterator[_Shutdown]:
    """End the server on SIGINT or SIGTERM. Before it serves, or on a second signal, it ends at once.

    The process ends after the time limit of the last answers and _MORE_S, even if a thread hangs.
    """
    shutdown, timers = _Shutdown(), list[threading.Timer]()

    def end() -> None:
        logger.error("the server did not end in time, and is ended")
        os._exit(1)

    def stop(number: int, frame: object) -> None:
        is_first = not shutdown.asked.is_set()
        timers.append(threading.Timer(shutdown.limit_s if is_first and shutdown.limit_s is not None else _MORE_S, end))
        timers[-1].daemon = True
        timers[-1].start()
        shutdown.asked.set()
        if not is_first or shutdown.limit_s is None:
            raise KeyboardInterrupt

    try:
        with signal_handlers(stop, signal.SIGINT, signal.SIGTERM):
            yield shutdown
    finally:
        for timer in timers:
            timer.cancel()
