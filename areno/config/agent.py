"""Settings of agents. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.resuming import SPEED
from areno.environments.packages import package_of
from areno.schema.fields import Flag, Needs, Section, require, setting

COMMAND = "command"
"""Value of agent.fn if the agent is the program of agent.command."""
ConversationKind = Literal["main", "subagent", "compaction", "auxiliary"]
TurnCredit = Literal["outcome", "return", "turn_baseline", "gae"]
_AGENT = Needs("fn", so="there is no agent", in_build=True)
_PROGRAM = Needs("command", so="no program is started", in_build=True)


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


@dataclass(kw_only=True)
class AgentConfig(Section):
    """An agent: user code that samples by requests to the policy's OpenAI-compatible endpoint."""

    heading = "Rollout"
    fn: str | None = setting(
        None,
        help="Agent function, as file.py[:function] (default name: run_agent). It is called as run_agent(ctx, batch) "
        "and returns trajectories. SCHEME:NAME is the agent of an environment, whose rows are the default of "
        "train_dataset.path. command runs the program of agent.command, and is the default with it. null: no "
        "agent, so each sample is a single completion",
        flag=Flag(
            "--agent-fn",
            help="Agent function, as file.py[:function]. Default: no agent, each sample is a single completion",
        ),
    )
    command: str | None = setting(
        None,
        help="Program that is the agent of each sample, with arguments, as for a shell without variables or pipes. In "
        "this text, in environment and in files, {prompt} stands for the prompt, {url} for the address of the sample's "
        "session (OpenAI's clients need {url}/v1), {key} for its API key, {model} for a name of the model and {home} "
        "for the home directory. A word that names a file stands for its absolute path. Without {prompt}, the program "
        "reads the prompt from its standard input. The "
        "files in conf/agent have the settings of known programs",
    )
    environment: dict[str, str] = setting(
        factory=dict, help="Environment variables of the program, in addition to a few common ones", only_with=_PROGRAM
    )
    files: dict[str, str] = setting(
        factory=dict,
        help="Files in the program's home directory: path -> text. Each sample has a home directory of its own",
        only_with=_PROGRAM,
    )
    box: bool = setting(
        True,
        help="Run the program in a box (Linux). It then reaches its session and no other network. It sees its own "
        "files, those of the system and of the program, and the paths in read. Memory and processes are limited. "
        "false: it runs with all rights of the user",
        only_with=_PROGRAM,
    )
    read: list[str] = setting(
        factory=list,
        help="Further files and folders that a program in a box may read",
        only_with=(_PROGRAM, Needs("box", so="the program may read all")),
    )
    memory_mb: int = setting(
        4096,
        help="Memory of a program in a box with all its processes, in MiB. Beyond it, the program is ended",
        gt=0,
        only_with=(_PROGRAM, Needs("box", so="the memory is not limited")),
    )
    timeout_s: float = setting(
        300.0,
        help="Time limit in seconds, both for the whole agent of one sample and for each of its requests. With "
        "rollout.max_head_offpolicyness above 0, the time in which models are trained does not count",
        gt=0,
        le=86400,
        only_with=_AGENT,
        flag="--agent-timeout-s",
    )
    workers: int | None = setting(
        None,
        help="Number of processes that run agents. Each process runs many agents at the same time. null: the number of "
        "available CPU cores, minus one for the driver and one for each device, but at least 2 and at most 16",
        gt=0,
        le=512,
        only_with=_AGENT,
        on_resume=SPEED,
    )
    whole_batch: bool = setting(
        False,
        help="Call the agent function once for all samples of a batch, in one process, in place of once for each "
        "sample. For agents that share something over the samples of a batch. If the call fails or takes longer than "
        "timeout_s, all of its samples are lost. Needs rollout.max_head_offpolicyness=0",
        only_with=_AGENT,
    )
    max_requests: int = setting(
        1000,
        help="Largest number of requests that the agent of one sample may send. All later ones are refused",
        gt=0,
        le=1_000_000,
        only_with=_AGENT,
    )
    train_conversations: list[ConversationKind] = setting(
        factory=lambda: ["main", "subagent", "compaction"],
        help="Kinds of conversations that are trained, if the session of the sample has recorded its turns: main, "
        "subagent, compaction (a summary and what begins with it) and auxiliary (without tools beside others with "
        "tools, such as a request for a title)",
        only_with=_AGENT,
    )
    turn_credit: TurnCredit = setting(
        "outcome",
        help="Credit of a turn of the model. outcome: the reward of the sample, for all turns. return: the rewards of "
        "the turn and of later ones, normalised by actor.adv_norm over the turns of the samples. turn_baseline: as "
        "return, but over the same turn of the samples of the group. gae: GAE over turns, with the critic of PPO",
        only_with=_AGENT,
    )
    turn_discount: float = setting(
        1.0,
        help="Discount factor for multi-turn reward propagation: a reward counts by this factor in the turn before, by "
        "its square in the turn before that, and so on",
        ge=0,
        le=1,
        only_with=(_AGENT, Needs("turn_credit", "return", "turn_baseline", "gae", so="no reward is propagated")),
    )
    train_tool_results: bool = setting(
        False, help="Also train on the tokens of tool results", only_with=_AGENT, flag="--train-tool-results"
    )
    export_style: Literal["individual", "concat"] | None = setting(
        None,
        help="The training rows of a sample. null: turns whose prompts continue the same tokens are one row. "
        "individual: each turn is a row, in which its prompt is masked. concat: the whole conversation is one row, and "
        "a sample whose history is not linear is lost",
        only_with=_AGENT,
    )

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Let a command be the agent: it sets fn."""
        has_program = values.get("command") is not None and values.get("fn") is None
        return {**values, **({"fn": COMMAND} if has_program else {})}

    @require("fn", "is {self.fn}, but command is null; set command, or leave this out")
    def fn_has_its_command(self) -> bool:
        return self.fn != COMMAND or self.command is not None

    @require("command", "is {self.command!r}, but fn is {self.fn}; leave one of both out")
    def command_is_the_agent(self) -> bool:
        return self.command is None or self.fn == COMMAND

    @require("command", "is {self.command!r}, which is no command: a quotation mark is not closed")
    def command_has_words(self) -> bool:
        return self.command is None or _is_command(self.command)

    @require("whole_batch", "is true, but the program of command gets one sample; leave it out")
    def program_gets_one_sample(self) -> bool:
        return not self.whole_batch or self.fn != COMMAND

    @require("files", "has a path that leaves the home directory of the program; give paths inside of it")
    def files_are_in_home(self) -> bool:
        return not any(path.startswith(("/", "~")) or ".." in path.split("/") for path in self.files)

    @property
    def is_environment(self) -> bool:
        """Whether the agent is that of an environment, SCHEME:NAME."""
        return package_of(self.fn) is not None
