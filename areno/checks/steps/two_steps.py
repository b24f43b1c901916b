"""The watched run of a subject: two steps of a few short rows, on the small model, and the probes of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.checks.inputs.findings import Finding, NotChecked
from areno.checks.inputs.varied_reward import stand_in_reward
from areno.checks.steps.probes import MovedPoint, Probes, make_probes, moved_points
from areno.checks.steps.watched_run import Tensors, WatchedRun, reward_parts, watched_run
from areno.config.agent import ONLINE
from areno.config.policy_experiments import CriticExperimentConfig, PairedPolicyExperimentConfig, PolicyExperimentConfig
from areno.config.sources import source_key
from areno.errors import ConfigError
from areno.types import SamplingParams

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_LR = 3e-3  # so that an update moves the log-probabilities by more than rounding does
_N_PROMPTS, _N_PAIRS = 2, 4
_N_DRAWN = 128  # completions whose tokens are compared with their distributions
_MOST_NEW, _LEAST_NEW = 12, 4
_MOST_OF_TURN = 48  # of an agent, whose model can call tools
_CANDIDATES = 400  # rows among which the shortest are taken


Draw = tuple[list[int], int, list[float]]
"""(tokens, where the completion begins, recorded log-probabilities of the completion)"""


@dataclass
class TwoSteps:
    run: WatchedRun
    probes: dict[str, Probes] = field(default_factory=dict)  # by role
    drawing: Any = None  # the settings of `drawn`
    drawn: list[Draw] = field(default_factory=list)
    frozen: dict[str, Tensors] = field(default_factory=dict)  # after the steps, the weights of roles that do not train
    points: list[MovedPoint] = field(default_factory=list)  # of KTO
    folder: Path = Path()


StepCheck = Callable[["Subject", TwoSteps], Iterator[Finding]]


def of_two_steps(check: StepCheck) -> Callable[[Subject], Iterator[Finding]]:
    """Make a check of a check that needs the watched run, which all of them share.

    If the run cannot be made, the first check says why, and the others say nothing.
    """

    @wraps(check)
    def run(subject: Subject) -> Iterator[Finding]:
        if (found := two_steps(subject)) is not None:
            yield from check(subject, found)

    return run


def two_steps(subject: Subject) -> TwoSteps | None:
    """Return the two steps of a subject, which are run once. None if they could not be run."""
    kept: list[TwoSteps | None] = vars(subject).setdefault("_two_steps", [])
    if not kept:
        kept.append(None)
        kept[0] = _watch(subject)
    return kept[0]


def _watch(subject: Subject) -> TwoSteps:
    config = subject.config
    is_policy = isinstance(config, PolicyExperimentConfig)
    if is_policy and (reason := _why_no_agents(subject, config)):
        raise NotChecked(reason)
    try:
        small = subject.small_config(small_changes(config, _MOST_OF_TURN if subject.has_own_model else _MOST_NEW))
    except ConfigError as error:
        raise refused_short_run("the two steps that all checks of 'gradient' and 'algorithm' share", error) from error
    subject.doing = "two steps of training on a small model"
    if is_policy and config.agent.fn is not None:
        subject.doing += ", whose samples agents ask for"
    folder = subject.folder / "two_steps"
    rows = short_rows(subject)
    reward = None
    if is_policy:
        has_equal = vars(small)["rollout"].dynamic_sampling
        reward = partial(stand_in_reward, parts=tuple(reward_parts(small)), has_equal=has_equal)
    with watched_run(subject.algorithm, small, folder, rows, reward) as run:
        if not run.of():
            lost = [sample.outcome.message for samples in run.samples.values() for sample in samples]
            raise NotChecked(f"no sample has a reward, so the run trains nothing: {next(filter(None, lost), '')}")
        roles = dict.fromkeys(update.role for update in run.updates)
        subject.doing = "the rows of the two steps once more, in other ways"
        params = SamplingParams.of(vars(small)["gconfig"]) if is_policy else SamplingParams()
        params = replace(params, ignore_eos=True, stop=None, stop_token_ids=None, min_new_tokens=0)
        drawn = _draw(run, params) if is_policy and config.agent.fn is None else []
        points = moved_points(run)
        probes = {role: make_probes(run, role) for role in roles}
        frozen = {role: run.saved(role) for role in run.frozen if run.holds(role)}
        subject.doing = ""
        return TwoSteps(run, probes, params, drawn, frozen, points, folder)


def _draw(run: WatchedRun, params: SamplingParams) -> list[Draw]:
    """Sample many completions with the weights after the last update of the actor."""
    samples = [sample for of_step in run.samples.values() for sample in of_step]
    prompts = list(dict.fromkeys(tuple(sample.item.tokens) for sample in samples))[:_N_PROMPTS]
    trainer, found = run.loop.setup.trainer, list[Draw]()
    n_samples = 1 if params.is_greedy else _N_DRAWN // len(prompts)
    with trainer.rollout_session(sampling_params=params, proxy=False):
        results = trainer.rollout_token_batch(prompts, n_samples, params, seed=run.config.seed)
    for prompt, result in zip(prompts, results, strict=True):
        for each in result.sequences:
            found.append(([*prompt, *map(int, each.resp_tokens)], len(prompt), [*map(float, each.resp_logprobs)]))
    return found


def _why_no_agents(subject: Subject, config: PolicyExperimentConfig) -> str:
    """Return why the agents of the run cannot run here, or "" if they can or there are none."""
    if config.agent.fn == ONLINE:
        return "agents outside of the run start its samples (agent.mode=online)"
    if subject.options.offline and config.agent.fn is not None:
        return "--offline: an agent may ask a server"
    return ""


def small_changes(config: Any, most_of_turn: int = _MOST_NEW) -> dict[str, Any]:
    """Return dotted key -> value of the settings that make a run of two short steps, and no others.

    `most_of_turn`: the largest number of tokens that an agent samples at once.
    """
    found: dict[str, Any] = {
        "total_train_steps": 2,
        "total_train_n_seqs": None,
        "total_train_epochs": 100,
        "train_dataset.batch_size": _N_PAIRS,
        "actor.gradient_accumulation_steps": None,
        "actor.gradient_checkpointing": False,
        **_optimizer("actor"),
    }
    if not isinstance(config, PolicyExperimentConfig):
        return found | given_rows("train_dataset")
    found["total_train_n_tokens"] = None
    sources = config.train_dataset.sources or {}
    for key in map(source_key, sources) if sources else ["train_dataset"]:
        found |= given_rows(key)
    n_samples = min(config.gconfig.n_samples, 4)
    if isinstance(config, PairedPolicyExperimentConfig):
        del found["actor.gradient_accumulation_steps"]
        n_samples = max(n_samples, 2 * config.pairs_per_prompt)
    found |= {
        "train_dataset.batch_size": _N_PROMPTS if n_samples > 1 else _N_PAIRS,
        **shorter_samples(config, n_samples, _MOST_NEW if config.agent.fn is None else most_of_turn),
        "actor.ppo_n_minibatches": 1,
        "reward": {"fn": "math", "workers": 1},  # a stand-in replaces it, and those of sources
        **{f"{source_key(name)}.reward": None for name in sources},
        "tune": {},
        **({"ref.offload": False} if config.ref is not None else {}),
    }
    if config.agent.fn is not None:
        found |= {
            "rollout.max_head_offpolicyness": 0,
            "rollout.prompts_ahead": None,
            "rollout.dynamic_sampling": False,
            "dynamic_bs": False,
        }
    if isinstance(config, CriticExperimentConfig):
        found |= {
            "critic.warmup_steps": 0,
            "critic.ppo_n_minibatches": 1,
            "critic.epochs": 1,
            "critic.freeze_attention": False,
            "critic.gradient_checkpointing": False,
            **_optimizer("critic"),
        }
    return found


def shorter_samples(config: PolicyExperimentConfig, n_samples: int, most_tokens: int) -> dict[str, Any]:
    """Return the settings of `n_samples` of a prompt that have at most `most_tokens`.

    What is a length within a completion gets shorter with it. A limit of several turns, such as
    agent.max_total_completion_tokens, stays, so that as many turns are within it.
    """
    n_tokens = config.gconfig.max_new_tokens
    most_tokens = min(most_tokens, n_tokens)

    def shorter(length: int) -> int:
        return -(-length * most_tokens // n_tokens)  # rounded up: 0 stays 0, and the order of two lengths stays

    found: dict[str, Any] = {
        "gconfig.n_samples": n_samples,
        "gconfig.max_new_tokens": shorter(n_tokens),
        "gconfig.min_new_tokens": min(_LEAST_NEW, shorter(config.gconfig.min_new_tokens)),
    }
    if config.actor.overlong_tokens is not None:
        found["actor.overlong_tokens"] = shorter(config.actor.overlong_tokens)
    for name, source in (config.train_dataset.sources or {}).items():
        if source.n_samples is not None:
            found[f"{source_key(name)}.n_samples"] = min(n_samples, source.n_samples)
        if source.max_new_tokens is not None:
            found[f"{source_key(name)}.max_new_tokens"] = shorter(source.max_new_tokens)
    return found


def refused_short_run(what: str, error: ConfigError) -> NotChecked:
    """Return the reason why something is not checked: with a check's own lengths and counts, the run is refused.

    The advice at the end of the problems is left out. It is about values that the user has not set.
    """
    found = ". ".join(str(problem).rpartition("; ")[0] or str(problem) for problem in error.problems)
    text = f"{what} cannot be run: with the few short samples of a check, areno refuses the settings ({found})"
    return NotChecked(f"{text}. That is a limit of areno check and not a fault of the run")


def given_rows(key: str) -> dict[str, Any]:
    """Return the settings of a dataset that say how its file is read. The rows are given as they were read."""
    return {f"{key}.dataset_kwargs": None, f"{key}.columns": {}}


def _optimizer(role: str) -> dict[str, Any]:
    how = {"lr": _LR, "lr_decay_steps": None, "warmup_steps_proportion": 0.0}
    return {f"{role}.optimizer.{name}": value for name, value in how.items()}


def short_rows(subject: Subject) -> Any:
    """Return the shortest of the first rows of the training data, or of each of its sources."""
    found = {}
    for dataset in subject.training_rows:
        rows = dataset.loader.rows
        first = [rows[index] for index in range(min(len(rows), _CANDIDATES))]
        found[dataset.source] = sorted(first, key=lambda row: len(str(row)))[: 4 * _N_PAIRS]
    return found[""] if list(found) == [""] else found
