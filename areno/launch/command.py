"""The command of an algorithm: it reads the arguments, does what they ask for and makes messages and exit codes of it.

`compose` makes a configuration of the arguments, `help` prints what they can be; the runs are started here.

Exit codes: 0 done, 1 the run failed, 2 the command line or the configuration is wrong, 130 interrupted, 143 terminated
(SIGTERM, SIGUSR1). When a run of a sweep fails, the other runs still go ahead, and the exit code is 1 at the end. The
first combination of a sweep is checked before anything is written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from areno import __version__
from areno.api.algorithms import Algorithm
from areno.config.build import build, with_defaults
from areno.config.fields import Missing
from areno.errors import ArenoError, ConfigError, Key, Problem
from areno.files.stopping import Terminated, terminate
from areno.files.user_code import describe_error
from areno.launch import help, library
from areno.launch.elsewhere import RECIPES, hint, listed
from areno.tracking.run_log import RunLog

if TYPE_CHECKING:
    from areno.config.experiments import ExperimentConfig
    from areno.launch.compose import HydraSession, Job
    from areno.tracking.new_run import NewFolder


class JobFailed(Exception):
    """One run of a sweep failed. Hydra's launcher goes on with the next run, and a sweeper sees no objective."""


def run_recipe(module: str) -> NoReturn:
    """Run the ALGORITHM of the recipe `module` with the arguments of this process, and end the process.

    `python -m` has loaded the module as `__main__`. It is imported again under its own name, so that what it defines
    can be pickled for spawned processes.
    """
    sys.exit(run(import_module(module).ALGORITHM, f"python -m {module}", sys.argv[1:]))


def run_algorithm(algorithm: Algorithm) -> NoReturn:
    """Run the algorithm of a file that is itself the script, with the arguments of this process; ends the process."""
    sys.exit(run(algorithm, f"python {sys.argv[0]}", sys.argv[1:]))


def run(algorithm: Algorithm, command: str, arguments: Sequence[str]) -> int:
    """Do what the arguments ask for, and return the exit code. A run that fails raises SystemExit.

    command: how the user started it, for the help text.
    """
    args = _parser(command).parse_intermixed_args(arguments)
    try:
        for option, value in {"--config-name": args.config_name, "--config-dir": args.config_dir}.items():
            if value is not None and not value.strip():
                raise ConfigError(Problem(option, "is empty; a name is expected"))
        config_dir = Path(os.path.expanduser(args.config_dir)).absolute() if args.config_dir else None
        if args.help:
            print(help.text(command, algorithm.config, algorithm.default, config_dir), end="")
            return 0
        from areno.launch import resume  # --help does without it and Hydra, whose import takes long
        from areno.launch.compose import HydraSession

        name = args.config_name or algorithm.default
        if args.resume is not None:
            if args.config_name or args.config_dir or args.multirun:
                raise ConfigError(Problem("--resume", "a run goes on with its own settings; give only key=value"))
            name, config_dir = "config", resume.named_run(args.resume, algorithm.name)
        options = {"config_dir": config_dir, "multirun": args.multirun, "job_name": algorithm.name}
        session = HydraSession(algorithm.config, name, args.overrides, **options)
        with _signals_interrupt(), _told_recipes(algorithm.name, name, config_dir), session:
            if args.info:
                session.show_info(args.info)
            elif args.cfg in ("hydra", "all"):
                session.show_hydra(args.cfg, args.package, args.resolve)
            elif args.cfg:
                _show(algorithm, session, args.package, args.resolve)
            elif args.resume is not None:
                assert config_dir is not None
                _go_on(algorithm, command, session, config_dir)
            else:
                return _train(algorithm, command, session)
        return 0
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


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command, add_help=False, allow_abbrev=False, usage="%(prog)s [options] [key=value ...]"
    )
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="version", version=f"areno {__version__}")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--resume")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    mode.add_argument("--info", "-i", nargs="?", const="all", choices=topics)
    parser.add_argument("overrides", nargs="*")
    return parser


def _show(algorithm: Algorithm, session: HydraSession, package: str | None, resolve: bool) -> None:
    """Print the configuration as YAML, with ??? where a required value is missing; other problems are errors."""
    from areno.launch.compose import to_yaml

    composition = session.compose()
    shown = with_defaults(algorithm.config, composition.data) if resolve else composition.raw
    for name in package.split(".") if package and package != "_global_" else ():
        if not isinstance(shown, dict) or name not in shown:
            raise ConfigError(f"--package: there is no {package!r} in the configuration")
        shown = shown[name]
    print(to_yaml(shown) if isinstance(shown, dict) else shown, end="" if isinstance(shown, dict) else "\n")
    try:
        build(algorithm.config, composition.data, composition.problems, hint)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if not isinstance(problem, Missing)]
        if wrong:
            raise ConfigError(wrong) from None


def _train(algorithm: Algorithm, command: str, session: HydraSession) -> int:
    from areno.launch import resume
    from areno.tracking import new_run

    composition = session.compose()
    config = build(algorithm.config, composition.data, composition.problems, hint)
    if composition.output_dir is None:
        raise ConfigError("hydra.run.dir: does not resolve to a folder; experiment_name cannot be swept over, for one")
    output_dir, is_new = composition.output_dir, composition.output_dir in session.named_by_time
    if is_new and config.recover.mode == "resume":
        text = "is resume, but {} is null, so a new run would begin; name the run to go on with, or use --resume"
        raise ConfigError(Problem("recover.mode", text, Key("trial_name")))
    if not is_new and resume.can_go_on(config, output_dir, session.sweep if session.multirun else None):
        folder = resume.existing(output_dir)
    else:
        if is_new:
            resume.tell_unfinished(command, output_dir.parent)
        while (folder := new_run.make(output_dir, new=output_dir in session.named_by_time)) is None:
            output_dir = session.rename(output_dir)
    if not session.multirun:
        session.run(lambda job: _run(algorithm, command, job, folder))
        return 0

    outcomes: list[tuple[Job, float | str]] = []
    with contextlib.suppress(JobFailed):  # Hydra raises the first of them again when all have ended
        session.run(lambda job: _run_in_sweep(algorithm, command, job, folder, outcomes))
    print(f"\n{len(outcomes)} runs in {output_dir}")
    for job, outcome in outcomes:
        result = f"{outcome:.6g}" if isinstance(outcome, float) else outcome
        print(f"  {job.number}  {' '.join(job.overrides)}  {result}")
    return int(any(isinstance(outcome, str) for _, outcome in outcomes))


def _go_on(algorithm: Algorithm, command: str, session: HydraSession, folder: Path) -> None:
    """Go on with the run in a folder, which the session takes the settings of."""
    from areno.launch import resume
    from areno.launch.compose import Job

    composition = session.compose()
    build(algorithm.config, composition.data, composition.problems, hint)
    _run(algorithm, command, Job(composition, folder, session.overrides, None), resume.existing(folder), explicit=True)


def _run_in_sweep(
    algorithm: Algorithm, command: str, job: Job, folder: NewFolder, outcomes: list[tuple[Job, float | str]]
) -> float:
    """Run one job of a sweep. A failure becomes JobFailed: SystemExit would end the whole sweep in Hydra's launcher."""
    print(f"\n[{job.number}] {' '.join(job.overrides)}", flush=True)
    try:
        objective = _run(algorithm, command, job, folder)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        outcomes.append((job, "failed"))
        raise JobFailed(f"run {job.number} failed") from None
    outcomes.append((job, objective))
    return objective


def _run(algorithm: Algorithm, command: str, job: Job, folder: NewFolder, explicit: bool = False) -> float:
    """Run one job. A failure is reported and becomes SystemExit, which Hydra passes on without a message of its own.

    folder: of the run or of its sweep. explicit: the user has named it, to go on there.
    """
    from areno.launch import resume

    try:
        config = build(algorithm.config, job.composition.data, job.composition.problems, hint)
        if job.number is not None:
            _separate(config, job.number)
        earlier = resume.earlier_run(config, job.run_dir)
        if earlier is not None:
            changed = resume.take_up(earlier, config, algorithm.name, job.overrides, explicit)
            if (result := resume.told_result(earlier, changed, command)) is not None:
                return result
            folder = resume.existing(job.run_dir)
        else:
            folder = folder.of_run(job.run_dir)
            folder.describe(config, job.overrides, algorithm.name)
        try:
            with RunLog(own_process=True):
                return float(algorithm.run(config, job.run_dir))
        except BaseException as error:
            folder.discard()
            resume.tell_how(command, job.run_dir, sweep=job.number is not None)
            if isinstance(error, SystemExit):  # of the user's own code, or of a library's: it may say nothing
                raise ArenoError(f"the run was ended by {describe_error(error)}") from error
            raise
    except ArenoError as error:
        raise SystemExit(_report(error)) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _separate(config: ExperimentConfig, number: int) -> None:
    """Give a run of a sweep a place of its own in each folder or hub account that the settings name for all runs."""
    for section in (config.saver, config.stats_logger.tensorboard):
        if section.path is not None:
            section.path = str(Path(section.path) / str(number))
    if config.saver.push_to_hub is not None:
        config.saver.push_to_hub += f"-{number}"


def _report(error: ArenoError) -> int:
    """Print the message, with the traceback if ARENO_DEBUG=1; the exit code."""
    _trace(error)
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _trace(error: BaseException) -> None:
    if os.environ.get("ARENO_DEBUG") == "1":
        traceback.print_exception(error)


@contextlib.contextmanager
def _told_recipes(recipe: str, config_name: str, config_dir: Path | None) -> Iterator[None]:
    """Around what composes a configuration: its errors say if the task is not for the recipe."""
    try:
        yield
    except ConfigError as error:
        file = (library.tasks(config_dir) | library.experiments()).get(config_name.removesuffix(".yaml"))
        meant = library.recipes(file) if file else []
        if recipe in RECIPES and meant and recipe not in meant:  # another algorithm may use the tasks of these
            problem = Problem("--config-name", f"{config_name} is for {listed(meant)}, not for {recipe}")
            raise ConfigError([problem, *error.problems]) from error
        raise


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Unwind on SIGTERM and SIGUSR1 as on Ctrl-C: workers and reward processes end, nothing half-written stays.

    Clusters send SIGUSR1 some time before they end a job.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
        yield
        return
    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
