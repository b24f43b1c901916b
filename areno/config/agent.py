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
ONLINE = "online"
"""Value of agent.fn if external programs are the agents (agent.mode=online)."""
COMPLETION = "completion"
"""Value of agent.fn if each sample is a single completion, in a run that also has sources with agents."""
ConversationKind = Literal["main", "subagent", "compaction", "auxiliary"]
TurnCredit = Literal["outcome", "return", "turn_baseline", "gae"]
_AGENT = Needs("fn", so="there is no agent", in_build=True)
_SESSION = Needs("whole_batch", False, so="its samples have no sessions that count")
_PROGRAM = Needs("command", so="no program is started", in_build=True)
_ONLINE = Needs("mode", ONLINE, so="no external program is served", in_build=True)
# Names in AReaL, SGLang and vLLM -> ours.
_TOOL_CALL_PARSERS = {
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "lfm2": "pythonic",
    **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
}
_REASONING_PARSERS: dict[str, str] = dict.fromkeys(
    (
        *("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek-v3", "deepseek_v3", "glm45"),
        *("gpt-oss", "openai_gptoss"),
    ),
    "think",
)


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
        help="Agent function, as file.py[:function] (default name: run_agent) or package.module.function. It is called "
        "as run_agent(ctx, batch) and returns trajectories. A class has a method run(data, base_url=, api_key=, "
        "http_client=), which gets the row of the dataset with messages, and returns the reward or a dictionary with "
        "the reward of each response by its id. SCHEME:NAME is the agent of an environment, whose rows are the default "
        "of train_dataset.path. command runs the program of agent.command, and is the default with it. null: no "
        "agent, so each sample is a single completion",
        flag=Flag(
            "--agent-fn",
            help="Agent function or class, as file.py[:name]. Default: no agent, each sample is a single completion",
        ),
    )
    mode: Literal["subproc", "inline", "online"] = setting(
        "subproc",
        help="Where agents run. subproc: in processes of the run. inline: in a thread of the run itself, for a "
        "debugger or for objects that are shared. A crash or a hang of the agent is then one of the run. online: "
        "outside of the run. External programs start sessions at agent.host and agent.port, in which they query the "
        "policy and report rewards",
        only_with=_AGENT,
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
        "rollout.max_head_offpolicyness above 0, the time in which models are trained does not count. With "
        "mode=online, it is the limit of a request alone",
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
    whole_group: bool = setting(
        False,
        help="Call the agent function once for all samples of a prompt, in one process, in place of once for each "
        "sample. Each sample has a session of its own. If the call fails or takes longer than timeout_s, all of its "
        "samples are lost",
        only_with=_AGENT,
    )
    max_requests: int = setting(
        1000,
        help="Largest number of requests that the agent of one sample may send. All later ones are refused",
        gt=0,
        le=1_000_000,
        only_with=(_AGENT, _SESSION),
    )
    max_total_completion_tokens: int | None = setting(
        None,
        help="Largest number of tokens that the policy may sample for one sample, over all turns. A turn that reaches "
        "it is finished, and all later requests are refused. null: no limit beside those of requests and conversations",
        gt=0,
        only_with=(_AGENT, _SESSION),
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
        read_by_rollout=False,
    )
    turn_discount: float = setting(
        1.0,
        help="Discount factor for multi-turn reward propagation: a reward counts by this factor in the turn before, by "
        "its square in the turn before that, and so on",
        ge=0,
        le=1,
        only_with=(_AGENT, Needs("turn_credit", "return", "turn_baseline", "gae", so="no reward is propagated")),
        read_by_rollout=False,
    )
    train_tool_results: bool = setting(
        False, help="Also train on the tokens of tool results", only_with=_AGENT, flag="--train-tool-results"
    )
    tool_call_parser: Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "harmony", "text"] | None = setting(
        None,
        help="Format of tool calls in the answers of the policy. harmony is that of gpt-oss. Names of vLLM, SGLang and "
        "AReaL for these formats are read, too, such as qwen for hermes. text: calls are ordinary text. null: the "
        "format that the chat template describes",
        aliases=_TOOL_CALL_PARSERS,
        only_with=_AGENT,
    )
    reasoning_parser: Literal["think", "none"] = setting(
        "think",
        help="Reasoning in the answers of the policy. think: the text between <think> and </think> at the start, and "
        "with harmony the channel analysis, is the field reasoning_content of a message. Other names are read, too, "
        "such as qwen3 and gpt-oss. none: it is a part of the content",
        aliases=_REASONING_PARSERS,
        only_with=_AGENT,
    )
    export_style: Literal["individual", "concat"] | None = setting(
        None,
        help="The training rows of a sample. null: turns whose prompts continue the same tokens are one row. "
        "individual: each turn is a row, in which its prompt is masked. concat: the whole conversation is one row, and "
        "a sample whose history is not linear is lost",
        only_with=_AGENT,
    )

    host: str = setting(
        "127.0.0.1",
        help="Address at which sessions are served. 0.0.0.0: all addresses of this machine. The connection is not "
        "encrypted",
        only_with=_ONLINE,
        on_resume=SPEED,
    )
    port: int = setting(
        0,
        help="Port at which sessions are served. 0: a free one",
        ge=0,
        le=65535,
        only_with=_ONLINE,
        on_resume=SPEED,
    )
    session_timeout_seconds: float = setting(
        3600.0,
        help="A session without a request for longer than this is ended, and its sample is lost",
        gt=0,
        only_with=_ONLINE,
    )
    set_reward_finish_timeout: float = setting(
        0.0,
        help="Seconds for which further rewards are awaited. A session that has ended takes rewards for as long. If a "
        "session has a reward, and no request comes for as long, it ends by itself. 0: a session ends by the request "
        "end_session, with the rewards reported until then",
        ge=0,
        only_with=_ONLINE,
    )

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Let a command or an external program be the agent: it sets fn."""
        found = COMMAND if values.get("command") is not None else ONLINE if values.get("mode") == ONLINE else None
        return {**values, **({} if found is None or values.get("fn") is not None else {"fn": found})}

    @require("mode", "is online, but the agent is {self.fn}; leave fn and command out, or set another mode")
    def online_has_no_agent(self) -> bool:
        return self.mode != ONLINE or self.fn == ONLINE

    @require("fn", "is online; set mode=online, and leave this out")
    def fn_is_no_mode(self) -> bool:
        return self.fn != ONLINE or self.mode == ONLINE

    @require("workers", "is {self.workers}, but with mode={self.mode} no processes run agents; leave it out")
    def processes_run_agents(self) -> bool:
        return self.workers is None or self.mode == "subproc"

    @require("fn", "is {self.fn}, but command is null; set command, or leave this out")
    def fn_has_its_command(self) -> bool:
        return self.fn != COMMAND or self.command is not None

    @require("command", "is {self.command!r}, but fn is {self.fn}; leave one of both out")
    def command_is_the_agent(self) -> bool:
        return self.command is None or self.fn == COMMAND

    @require("command", "is {self.command!r}, which is no command: a quotation mark is not closed")
    def command_has_words(self) -> bool:
        return self.command is None or _is_command(self.command)

    @require("whole_batch", "is true, but {self.fn} runs one sample at a time; set it to false")
    def whole_batches_are_of_functions(self) -> bool:
        return not self.whole_batch or not (self.fn in (COMMAND, ONLINE) or self.is_environment)

    @require("whole_group", "is true, but {self.fn} runs one sample at a time; set it to false")
    def whole_groups_are_of_functions(self) -> bool:
        environment = package_of(self.fn)
        takes_one = self.fn in (COMMAND, COMPLETION, ONLINE) or (
            environment is not None and not environment.takes_groups
        )
        return not self.whole_group or not takes_one

    @require("whole_group", "is true, but whole_batch is true as well; leave one of both out")
    def calls_get_a_group_or_a_batch(self) -> bool:
        return not self.whole_group or not self.whole_batch

    @require("files", "has a path that leaves the home directory of the program; give paths inside of it")
    def files_are_in_home(self) -> bool:
        return not any(path.startswith(("/", "~")) or ".." in path.split("/") for path in self.files)

    @require("train_tool_results", "is true, but with export_style=individual each later turn would train them again")
    def tool_results_are_trained_once(self) -> bool:
        return not self.train_tool_results or self.export_style != "individual"

    @property
    def whole(self) -> str | None:
        """The setting with which a call of the agent function gets several samples, if it is true."""
        return "whole_batch" if self.whole_batch else "whole_group" if self.whole_group else None

    @property
    def is_environment(self) -> bool:
        """Whether the agent is that of an environment, SCHEME:NAME."""
        return package_of(self.fn) is not None
