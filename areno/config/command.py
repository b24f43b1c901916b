"""The command line of a recipe: arguments, run folders, messages and exit codes.

Exit codes: 0 done, 1 the run failed, 2 the command line or the configuration is wrong, 130 interrupted, 143 terminated
(SIGTERM). In a sweep a run that fails ends alone, the others go on, and the exit code is 1 in the end. The first
combination of a sweep is checked before anything is written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import areno
from areno.config.fields import Section
from areno.errors import ArenoError, ConfigError

if TYPE_CHECKING:
    from areno.config.compose import Job, Session


@dataclass(frozen=True)
class Recipe:
    """What a command line runs. command: how it is started, for the help text. default: the --config-name."""

    command: str
    name: str
    config: type[Section]
    main: Callable[[Section, Path], float]
    default: str

    @classmethod
    def of(cls, algorithm: Any, command: str) -> Recipe:
        """An Algorithm of areno.api as a command."""
        return cls(command, algorithm.name, algorithm.config, algorithm.run, algorithm.default)


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever takes care of Ctrl-C takes care of it too."""


class JobFailed(Exception):
    """A run of a sweep did not reach its end. Hydra's launcher goes on with the next, a sweeper sees no objective."""


def run_recipe(module: str) -> NoReturn:
    """Run the recipe `module`, one with an ALGORITHM, with the arguments of this process.

    `python -m` has loaded it as `__main__`; it is imported again under its own name, so that what it defines can be
    pickled for spawned processes.
    """
    sys.exit(run(Recipe.of(import_module(module).ALGORITHM, f"python -m {module}"), sys.argv[1:]))


def run(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Do what the arguments ask for; the exit code. A failing run leaves by SystemExit, as `main` may itself."""
    args = _parser(recipe).parse_intermixed_args(arguments)
    config_dir = Path(args.config_dir).expanduser().absolute() if args.config_dir else None
    try:
        if args.help:
            # Hydra is not needed for this, and its import takes most of the time.
            from areno.config import help

            print(help.text(recipe.command, recipe.config, recipe.default, config_dir), end="")
            return 0
        from areno.config.compose import Session

        name = args.config_name or recipe.default
        options = {"config_dir": config_dir, "multirun": args.multirun, "job_name": recipe.name}
        with _sigterm_interrupts(), Session(recipe.config, name, args.overrides, **options) as session:
            if args.info:
                session.show_info(args.info)
                return 0
            if args.cfg in ("hydra", "all"):
                session.show_hydra(args.cfg, args.package, args.resolve)
                return 0
            if args.cfg:
                return _show(recipe, session, args.package, args.resolve)
            return _train(recipe, session)
    except ArenoError as error:
        return _report(error)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        _trace(interrupt)
        print("terminated" if terminated else "interrupted", file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(recipe: Recipe) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=recipe.command,
        add_help=False,
        allow_abbrev=False,
        usage="%(prog)s [options] [key=value ...]",
    )
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="version", version=f"areno {areno.__version__}")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    mode.add_argument("--info", "-i", nargs="?", const="all", choices=topics)
    parser.add_argument("overrides", nargs="*")
    return parser


def _show(recipe: Recipe, session: Session, package: str | None, resolve: bool) -> int:
    """Print the configuration as YAML, with ??? where a required value is missing; other problems are errors."""
    from areno.config.build import MISSING, build, complete
    from areno.config.compose import to_yaml

    composition = session.compose()
    shown = complete(recipe.config, composition.data) if resolve else composition.raw
    for name in package.split(".") if package and package != "_global_" else ():
        if not isinstance(shown, dict) or name not in shown:
            raise ConfigError(f"--package: there is no {package!r} in the configuration")
        shown = shown[name]
    print(to_yaml(shown) if isinstance(shown, dict) else shown, end="" if isinstance(shown, dict) else "\n")
    try:
        build(recipe.config, composition.data, composition.problems)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if not problem.message.startswith(MISSING)]
        if wrong:
            raise ConfigError(wrong) from None
    return 0


def _train(recipe: Recipe, session: Session) -> int:
    from areno.config import run_folder
    from areno.config.build import build

    composition = session.compose()
    build(recipe.config, composition.data, composition.problems)
    if composition.output_dir is None:
        raise ConfigError("hydra.run.dir: does not resolve to a folder; experiment_name cannot be swept over, for one")
    session.multirun = composition.multirun
    output_dir = composition.output_dir
    while not run_folder.make(output_dir, new=session.is_named_by_time(output_dir)):
        output_dir = session.rename(output_dir)
    if not session.multirun:
        session.run(lambda job: _run_alone(recipe, job))
        return 0

    outcomes: list[tuple[Job, float | str]] = []
    with contextlib.suppress(JobFailed):  # Hydra raises the first of them again when all have ended
        session.run(lambda job: _run_in_sweep(recipe, job, outcomes))
    print(f"\n{len(outcomes)} runs in {output_dir}")
    for job, outcome in outcomes:
        result = f"{outcome:.6g}" if isinstance(outcome, float) else outcome
        print(f"  {job.number}  {' '.join(job.overrides)}  {result}")
    return int(any(isinstance(outcome, str) for _, outcome in outcomes))


def _run_alone(recipe: Recipe, job: Job) -> float:
    """The one run of a plain start. Failures become SystemExit, which Hydra passes on without a word of its own."""
    try:
        return _run(recipe, job)
    except ArenoError as error:
        raise SystemExit(_report(error)) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _run_in_sweep(recipe: Recipe, job: Job, outcomes: list[tuple[Job, float | str]]) -> float:
    """One run of a sweep. SystemExit would end the whole sweep in Hydra's launcher; JobFailed ends this run alone."""
    print(f"\n[{job.number}] {' '.join(job.overrides)}", flush=True)
    try:
        objective = _run(recipe, job)
    except ArenoError as error:
        _report(error)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    else:
        outcomes.append((job, objective))
        return objective
    outcomes.append((job, "failed"))
    raise JobFailed(f"run {job.number} failed")


def _run(recipe: Recipe, job: Job) -> float:
    from areno.config import run_folder
    from areno.config.build import build

    config = build(recipe.config, job.composition.data, job.composition.problems)
    run_folder.make(job.run_dir)
    run_folder.describe(job.run_dir, config, job.overrides)
    try:
        return float(recipe.main(config, job.run_dir))
    except BaseException:
        run_folder.discard(job.run_dir)
        raise


def _report(error: ArenoError) -> int:
    """Print the message, with the traceback if ARENO_DEBUG=1; the exit code."""
    _trace(error)
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _trace(error: BaseException) -> None:
    if os.environ.get("ARENO_DEBUG") == "1":
        traceback.print_exception(error)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Unwind on SIGTERM as on Ctrl-C, so that workers and reward processes end and nothing half-written stays."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
