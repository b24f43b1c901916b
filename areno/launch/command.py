"""Run the command of an algorithm: read its arguments, start its runs, and print errors.

compose.py makes a configuration from the arguments, help.py writes the help text, and this module starts the runs.

Exit codes: 0 done, 1 a run failed, 2 the command line or the configuration is wrong, 130 interrupted, 143 terminated
(SIGTERM, SIGUSR1). When a run of a sweep fails, the other runs still go ahead, and the exit code is 1 at the end. The
first combination of a sweep is checked before anything is written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from areno.api.algorithms import Algorithm, built_in_algorithms
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.errors import ArenoError, ConfigError, Key, Problem, as_file_error, keys_renamed
from areno.files import interrupts
from areno.files.interrupts import Terminated, raise_terminated, signal_handlers
from areno.files.paths import absolute_or_none
from areno.files.user_code import describe_error
from areno.launch import help, yaml_files
from areno.launch.hints import join_by_and, settings_of_other_tool
from areno.schema.build import with_defaults
from areno.schema.fields import MissingSetting
from areno.version import __version__

if TYPE_CHECKING:
    from areno.config.experiments import ExperimentConfig
    from areno.launch.compose import HydraSession, Job
    from areno.launch.sweep_results import Sweep
    from areno.tracking.run_folder import NewRunFolder


def run_recipe(module: str) -> NoReturn:
    """Run the algorithm of a recipe with the command-line arguments of this process, and end the process.

    `python -m` has loaded the module as `__main__`. The module is imported again under its own name, so that its
    classes and functions can be pickled for spawned processes.
    """
    sys.exit(run(import_module(module).ALGORITHM, f"python -m {module}", sys.argv[1:]))


def run_algorithm(algorithm: Algorithm) -> NoReturn:
    """Run an algorithm with the command-line arguments of this process, and end the process."""
    algorithm = replace(algorithm, file=Path(sys.argv[0]).absolute())
    sys.exit(run(algorithm, f"python {sys.argv[0]}", sys.argv[1:]))


def run(
    algorithm: Algorithm,
    command: str,
    arguments: Sequence[str],
    greet: bool = True,
    names: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Do what the arguments say: print help or a configuration, or start or resume runs. Returns the exit code.

    With `greet`, a line is printed at once if stderr is a terminal, because imports take seconds. In errors, `names`
    replaces settings by flags. SystemExit is raised after a single run has failed or if the options are wrong.
    """
    args = _parse(command, arguments)
    try:
        if greet and not (args.help or args.cfg or args.info):
            _print_start_line(command, args)
        with keys_renamed(names.get):
            return _dispatch(algorithm, command, args, names)
    except ArenoError as error:
        return _print_error(error)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        _print_debug_traceback(interrupt)
        print("terminated" if terminated else "interrupted", file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:
        # The reader of the output (`| head`) has ended. Python must not raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (file_error := as_file_error(error)) is None:
            raise
        _print_debug_traceback(error)
        return _print_error(file_error)


def _dispatch(algorithm: Algorithm, command: str, args: argparse.Namespace, names: Mapping[str, str]) -> int:
    named = {"--config-name": args.config_name, "--config-dir": args.config_dir, "--resume": args.resume}
    for option, value in named.items():
        if value is not None and not value.strip():
            raise ConfigError(Problem(option, "is empty; a name is expected"))
    config_dir = absolute_or_none(args.config_dir)
    if args.help:
        print(help.recipe_help(command, algorithm.config, algorithm.default, config_dir), end="")
        return 0
    from areno.launch.compose import HydraSession  # --help does without Hydra, whose import takes long

    interrupts.raise_on_interrupt()

    if args.from_step is not None and args.resume is None:
        raise ConfigError(Problem("--from-step", "needs the run that it is a step of; add --resume RUN"))
    name, branch = args.config_name or algorithm.default, contextlib.ExitStack()
    if args.resume is not None:
        if args.config_name or args.config_dir or args.multirun:
            raise ConfigError(Problem("--resume", "a run is resumed with its own settings; give only key=value"))
        from areno.run import resume

        name, config_dir = "config", resume.find_resumable_run(args.resume, algorithm.name)
        if args.from_step is not None and not (args.cfg or args.info):
            from areno.run.branching import branched_run

            made = branched_run(config_dir, args.from_step, algorithm, args.overrides)
            config_dir, args.overrides = branch.enter_context(made)
    options = {"config_dir": config_dir, "multirun": args.multirun, "job_name": algorithm.name, "names": names}
    session = HydraSession(algorithm.config, name, args.overrides, **options)
    # Clusters send SIGUSR1 some time before they end a job. Both signals end a run like Ctrl-C.
    unwinding = signal_handlers(raise_terminated, signal.SIGTERM, signal.SIGUSR1)
    with branch, unwinding, mention_recipes(algorithm.name, name, config_dir), session:
        if args.info:
            session.show_info(args.info)
        elif args.cfg in ("hydra", "all"):
            session.show_hydra(args.cfg, args.package, args.resolve)
        elif args.cfg:
            _print_config(algorithm, session, args.package, args.resolve)
        elif args.resume is not None:
            assert config_dir is not None
            _resume(algorithm, command, session, config_dir)
        else:
            return _train(algorithm, command, session)
    return 0


def options_of(command: str, arguments: Sequence[str], algorithm: Algorithm) -> tuple[str, Path | None, list[str]]:
    """Return (name of the task, folder of task files, settings as key=value) of a command line."""
    args = _parse(command, arguments)
    if args.multirun:
        raise ConfigError(Problem("-m", "starts a sweep, and {} is about one run; leave it out", command))
    return args.config_name or algorithm.default, absolute_or_none(args.config_dir), args.overrides


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    args, others = _parser(command).parse_known_intermixed_args(arguments)
    try:
        if others:
            raise ConfigError([_unknown_option_problem(word) for word in others])
        split_config_path(args)
    except ConfigError as error:
        raise SystemExit(_print_error(error)) from error
    return args


def _unknown_option_problem(word: str) -> Problem:
    option, _, _ = word.partition("=")
    settings = settings_of_other_tool(option.lstrip("-").replace("-", "_"))
    meant = f", here {' or '.join(f'{key}=...' for key in settings)}" if settings else ""
    return Problem(option, f"there is no such option; settings are given as key=value{meant}")


def split_config_path(args: argparse.Namespace) -> None:
    """Replace the option --config FILE by --config-dir and --config-name."""
    if args.config is None:
        return
    file = Path(args.config).expanduser()
    if args.config_name or args.config_dir:
        text = "stands for --config-dir {} --config-name {}; leave those two out"
        raise ConfigError(Problem("--config", text, file.parent, file.stem))
    if file.suffix != ".yaml":
        raise ConfigError(Problem("--config", "is {}; a file that ends in .yaml is expected", args.config))
    if not file.is_file():
        text = "is a folder; a file is expected" if file.is_dir() else "does not exist"
        raise ConfigError(Problem("--config", f"is {{}}, which {text}", args.config))
    args.config_dir, args.config_name = str(file.parent), file.stem


def _print_start_line(command: str, args: argparse.Namespace) -> None:
    """Print a line if stderr is a terminal, because imports take seconds before a run prints anything."""
    if sys.stderr.isatty() and "stats_logger.console=quiet" not in args.overrides:
        words = [command.removeprefix("python -m "), *(word for word in (args.config_name, args.resume) if word)]
        print(f"areno {__version__}: {' '.join(words)} starts ...", file=sys.stderr, flush=True)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command, add_help=False, allow_abbrev=False, usage="%(prog)s [options] [key=value ...]"
    )
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="version", version=f"areno {__version__}")
    parser.add_argument("--config")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--resume")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    mode.add_argument("--info", "-i", nargs="?", const="all", choices=topics)
    parser.add_argument("overrides", nargs="*")
    return parser


def _print_config(algorithm: Algorithm, session: HydraSession, package: str | None, resolve: bool) -> None:
    """Print the configuration as YAML, or the part at the dotted key `package`, with ??? for missing values."""
    from areno.launch.compose import to_yaml

    composition = session.compose()
    shown = with_defaults(algorithm.config, composition.data) if resolve else composition.raw
    for name in package.split(".") if package and package != "_global_" else ():
        if not isinstance(shown, dict) or name not in shown:
            raise ConfigError(f"--package: there is no {package!r} in the configuration")
        shown = shown[name]
    print(to_yaml(shown) if isinstance(shown, dict) else shown, end="" if isinstance(shown, dict) else "\n")
    try:
        composition.build(algorithm.config)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if not isinstance(problem, MissingSetting)]
        if wrong:
            raise ConfigError(wrong) from None


def _train(algorithm: Algorithm, command: str, session: HydraSession) -> int:
    from areno.run import resume
    from areno.tracking import run_folder

    composition = session.compose()
    config = composition.build(algorithm.config)
    if composition.output_dir is None:
        raise ConfigError("hydra.run.dir: does not resolve to a folder; experiment_name cannot be swept over, for one")
    output_dir, is_new = composition.output_dir, composition.output_dir in session.named_by_time
    if is_new and config.recover.mode == "resume":
        text = "is resume, but {} is null, so a new run would begin; name the run to resume, or use --resume"
        raise ConfigError(Problem("recover.mode", text, Key("trial_name")))
    if not is_new and resume.resumes_existing(
        config, output_dir, session.sweep_overrides if session.multirun else None
    ):
        folder = resume.as_new_folder(output_dir)
    else:
        if is_new:
            resume.print_unfinished(command, output_dir.parent)
        while (folder := run_folder.make_run_folder(output_dir, new=output_dir in session.named_by_time)) is None:
            output_dir = session.new_run_dir(output_dir)
    if not session.multirun:
        session.run(lambda job: _run(algorithm, command, job, folder))
        return 0

    from areno.launch.side_by_side import JobFailed
    from areno.launch.sweep_results import Sweep

    sweep = Sweep(output_dir, *config.objective())
    try:
        with contextlib.suppress(JobFailed):  # Hydra raises the first failure again when all runs have ended
            if session.n_jobs == 1:
                session.run(lambda job: _run_in_sweep(algorithm, command, job, folder, sweep))
            else:
                _run_in_parallel(algorithm, command, session, folder, sweep, config)
    except KeyboardInterrupt:
        resume.print_sweep_command(output_dir)
        raise
    print(f"\n{sweep.text()}")
    if failed := any(outcome.objective is None for outcome in sweep.outcomes):
        resume.print_sweep_command(output_dir)
    return int(failed)


def _resume(algorithm: Algorithm, command: str, session: HydraSession, folder: Path) -> None:
    """Resume the run in `folder`. The session composes the run's configuration from config.yaml in this folder."""
    from areno.launch.compose import Job, mention_version
    from areno.run import resume

    with mention_version(folder):
        composition = session.compose()
        composition.build(algorithm.config)
    job = Job(composition, folder, session.overrides, None, session.names)
    _run(algorithm, command, job, resume.as_new_folder(folder), explicit=True)


def _run_in_sweep(algorithm: Algorithm, command: str, job: Job, folder: NewRunFolder, sweep: Sweep) -> float:
    from areno.launch.side_by_side import JobFailed

    assert job.number is not None
    print(f"\n[{job.number}] {' '.join(job.overrides)}", flush=True)
    objective, reason = _run_job(algorithm, command, job, folder)
    sweep.add(job.number, job.overrides, objective, job.run_dir, reason)
    if objective is None:
        raise JobFailed(f"run {job.number} failed")
    return objective


def _run_in_parallel(
    algorithm: Algorithm,
    command: str,
    session: HydraSession,
    folder: NewRunFolder,
    sweep: Sweep,
    config: ExperimentConfig,
) -> None:
    """Run the jobs of a sweep in separate processes, `session.n_jobs` at a time."""
    from areno.launch.compose import N_JOBS

    if config.scheduler.type == "ray":
        text = "is {}, but runs on a Ray cluster go one after another; leave it out or set {}=local"
        raise ConfigError(Problem(N_JOBS, text, session.n_jobs, Key("scheduler.type")))
    from areno.launch.side_by_side import JobOutputDisplay, ParallelJobs, job_env_vars
    from areno.tracking.display.display import chosen_console

    live = chosen_console(config.stats_logger.console) == "live"
    with (
        JobOutputDisplay(live, sweep.objective) as lines,
        ParallelJobs(job_env_vars(session.n_jobs, config.engine), lines.show_line) as runs,
    ):

        def start(job: Job) -> Future[float]:
            assert job.number is not None
            number = job.number

            def ended(objective: float | None, reason: str) -> None:
                sweep.add(number, job.overrides, objective, job.run_dir, reason)
                lines.end(number, objective, reason)

            own = [line for line in job.overrides if line not in session.overrides]
            work = functools.partial(_run_job, algorithm, command, job, folder)
            return runs.start(number, work, lambda: lines.begin(number, own), ended)

        session.run(start)


def _run_job(algorithm: Algorithm, command: str, job: Job, folder: NewRunFolder) -> tuple[float | None, str]:
    """Run a job. Return (objective, ""), or (None, reason) in place of SystemExit, which would end the whole sweep."""
    try:
        return _run(algorithm, command, job, folder), ""
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        cause = error.__cause__
        return None, str(cause) if cause is None or isinstance(cause, ArenoError) else describe_error(cause)


def _run(algorithm: Algorithm, command: str, job: Job, folder: NewRunFolder, explicit: bool = False) -> float:
    """Run one job and return its objective.

    If the job fails, print its error and raise SystemExit, which Hydra does not print again. For a job of a sweep,
    `folder` is the sweep's folder. `explicit` means that the user named the run with --resume.
    """
    from areno.run import resume
    from areno.tracking.run_log import RunLog

    try:
        config = job.composition.build(algorithm.config)
        if job.number is not None:
            _separate_outputs(config, job.number)
        with contextlib.ExitStack() as logs:
            earlier = resume.run_to_resume(config, job.run_dir)
            if earlier is not None:
                _restore_tuned_settings(config, job)
                changed = resume.accept_changes(earlier, config, algorithm.name, job.overrides, explicit)
                if (result := resume.print_result(earlier, config, changed, command)) is not None:
                    return result
                folder = resume.as_new_folder(job.run_dir)
            else:
                folder = folder.for_run(job.run_dir)
                _choose_tuned_settings(config, job, folder, logs)
                folder.write_description(config, job.overrides, algorithm.name, algorithm.file)
            try:
                logs.enter_context(RunLog(own_process=True))
                result = float(algorithm.run(config, job.run_dir))
            except BaseException as error:
                logs.close()
                folder.discard()
                if job.number is None and not isinstance(error, ConfigError):  # which would come again
                    resume.print_resume_command(command, job.run_dir)
                if isinstance(error, SystemExit):  # of the user's own code, or of a library's: it may say nothing
                    raise ArenoError(f"the run was ended by {describe_error(error)}") from error
                raise
        if job.number is None and config.stats_logger.console != "quiet":
            resume.print_next_commands(command, job.run_dir)
        return result
    except ArenoError as error:
        raise SystemExit(_print_error(error, job.names)) from error
    except Exception as error:
        if file_error := as_file_error(error):
            _print_debug_traceback(error)
            raise SystemExit(_print_error(file_error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error


def _choose_tuned_settings(
    config: ExperimentConfig, job: Job, folder: NewRunFolder, logs: contextlib.ExitStack
) -> None:
    """If `tune.enabled` is set, choose settings of a new run by trials, and write them into its folder.

    The caller closes `logs`, which receives the log of the trials.
    """
    if not (isinstance(config, PolicyExperimentConfig) and config.tune.enabled):
        return
    try:
        from areno.run import tuning
        from areno.tracking.run_log import RunLog

        logs.enter_context(RunLog(own_process=True))
        tuning.write_tuned_settings(job.run_dir, tuning.tune(config, job.composition.given, job.task))
    except BaseException:
        folder.discard()
        raise


def _restore_tuned_settings(config: ExperimentConfig, job: Job) -> None:
    from areno.tracking.run_folder import TUNED

    if (job.run_dir / TUNED).exists():
        from areno.run import tuning

        tuning.restore_tuned_settings(config, job.run_dir, job.composition.given)


def _separate_outputs(config: ExperimentConfig, number: int) -> None:
    """Append the number of a run in a sweep to its output paths and its hub repository."""
    for section in (config.saver, config.stats_logger.tensorboard):
        if section.path is not None:
            section.path = str(Path(section.path) / str(number))
    if config.saver.push_to_hub is not None:
        config.saver.push_to_hub += f"-{number}"


def _print_error(error: ArenoError, names: Mapping[str, str] = MappingProxyType({})) -> int:
    """Print the error with settings renamed by `names`, and return the exit code. ARENO_DEBUG=1 adds the traceback."""
    _print_debug_traceback(error)
    print(f"error: {error.renamed(names.get)}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _print_debug_traceback(error: BaseException) -> None:
    if os.environ.get("ARENO_DEBUG") == "1":
        traceback.print_exception(error)


@contextlib.contextmanager
def mention_recipes(recipe: str, config_name: str, config_dir: Path | None) -> Iterator[None]:
    """If the task file is meant for other recipes, add a note about this to a ConfigError in the `with` block."""
    try:
        yield
    except ConfigError as error:
        file = (yaml_files.task_files(config_dir) | yaml_files.experiment_files()).get(
            config_name.removesuffix(".yaml")
        )
        meant = yaml_files.recipes_of(file) if file else []
        if (
            recipe in built_in_algorithms() and meant and recipe not in meant
        ):  # another algorithm may use the tasks of these
            problem = Problem("--config-name", f"{config_name} is for {join_by_and(meant)}, not for {recipe}")
            raise ConfigError([problem, *error.problems]) from error
        raise
