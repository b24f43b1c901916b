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
    **dict.fromkeys(("glm", "glm45", "glm47"), "glm4_moe"),
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
        help="Agent function, as file.py[:function] (default name: run_agent) or package.module.function, called as "
        "run_agent(ctx, batch) to return trajectories. A class has run(data, base_url=, api_key=, http_client=), "
        "which gets the dataset row with messages and returns the reward, or a dictionary of response id to reward. "
        "SCHEME:NAME is the agent of an environment, whose rows are the default of train_dataset.path. command runs "
        "the program of agent.command, and is the default with it. null: no agent, a sample is one completion",
        flag=Flag(
            "--agent-fn",
            help="Agent function or class, as file.py[:name]. Default: no agent, each sample is a single completion",
        ),
    )
    mode: Literal["subproc", "inline", "online"] = setting(
        "subproc",
        help="Where agents run. subproc: in processes of the run. inline: in a thread of the run, for a debugger or "
        "shared objects; the agent's crash or hang is then that of the run. online: outside. Programs start sessions "
        "at agent.host and agent.port, query the policy there and report rewards",
        only_with=_AGENT,
    )
    command: str | None = setting(
        None,
        help="Program that is the agent of each sample, with arguments, as for a shell without variables or pipes. "
        "In this text, in environment and in files, {prompt} is the prompt (without it, the program reads standard "
        "input), {url} the address of the session (OpenAI's clients need {url}/v1), {key} its API key, {model} a name "
        "of the model and {home} the home directory. A word that names a file stands for its absolute path. "
        "conf/agent has settings of known programs",
    )
    environment: dict[str, str] = setting(
        factory=dict, help="Environment variables of the program, in addition to a few common ones", only_with=_PROGRAM
    )
    files: dict[str, str] = setting(
        factory=dict,
        help="Files in the program's home directory, which each sample has of its own: path -> text",
        only_with=_PROGRAM,
    )
    box: bool = setting(
        True,
        help="Run the program in a box (Linux): no network but its session; its own files, those of system and "
        "program, and the paths in read; limited memory and processes. false: with all rights of the user",
        only_with=_PROGRAM,
    )
    read: list[str] = setting(
        factory=list,
        help="Further files and folders that a program in a box may read",
        only_with=(_PROGRAM, Needs("box", so="the program may read all")),
    )
    memory_mb: int = setting(
        4096,
        help="Memory of a program in a box with its processes, in MiB. Beyond it, the program is ended",
        gt=0,
        only_with=(_PROGRAM, Needs("box", so="the memory is not limited")),
    )
    timeout_s: float = setting(
        300.0,
        help="Time limit in seconds of a sample's agent and of each of its requests. With mode=online, of a request "
        "alone. With rollout.max_head_offpolicyness above 0, time of training does not count",
        gt=0,
        le=86400,
        only_with=_AGENT,
        flag="--agent-timeout-s",
    )
    workers: int | None = setting(
        None,
        help="Number of processes that run agents, each many at a time. null: the available CPU cores less one for "
        "the driver and one per device, at least 2 and at most 16",
        gt=0,
        le=512,
        only_with=_AGENT,
        on_resume=SPEED,
    )
    whole_batch: bool = setting(
        False,
        help="Call the agent function once for all samples of a batch, in one process, for agents that share "
        "something over them. If the call fails or takes longer than timeout_s, all of them are lost. Needs "
        "rollout.max_head_offpolicyness=0",
        only_with=_AGENT,
    )
    whole_group: bool = setting(
        False,
        help="Call the agent function once for all samples of a prompt, in one process. Each sample has its own "
        "session. If the call fails or takes longer than timeout_s, all of them are lost",
        only_with=_AGENT,
    )
    max_requests: int = setting(
        1000,
        help="Largest number of requests of one sample's agent. Later ones are refused",
        gt=0,
        le=1_000_000,
        only_with=(_AGENT, _SESSION),
    )
    max_total_completion_tokens: int | None = setting(
        None,
        help="Largest number of tokens sampled for one sample, over all turns. The turn that reaches it is finished, "
        "and later requests are refused. null: no such limit",
        gt=0,
        only_with=(_AGENT, _SESSION),
    )
    train_conversations: list[ConversationKind] = setting(
        factory=lambda: ["main", "subagent", "compaction"],
        help="Kinds of conversations that are trained, if the session has recorded its turns: main, subagent, "
        "compaction (a summary and what begins with it) and auxiliary (without tools beside others with tools, such "
        "as a request for a title)",
        only_with=_AGENT,
    )
    turn_credit: TurnCredit = setting(
        "outcome",
        help="Credit of a turn of the model. outcome: the reward of the sample. return: the rewards of this and "
        "later turns, normalised by actor.adv_norm over the turns of the samples. turn_baseline: as return, over the "
        "same turn of the group's samples. gae: GAE over turns, with the critic of PPO",
        only_with=_AGENT,
        read_by_rollout=False,
    )
    turn_discount: float = setting(
        1.0,
        help="Factor by which a reward counts in the turn before; its square in the turn before that, and so on",
        ge=0,
        le=1,
        only_with=(_AGENT, Needs("turn_credit", "return", "turn_baseline", "gae", so="no reward is propagated")),
        read_by_rollout=False,
    )
    train_tool_results: bool = setting(
        False, help="Also train on the tokens of tool results", only_with=_AGENT, flag="--train-tool-results"
    )
    tool_call_parser: (
        Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "glm4_moe", "harmony", "text"] | None
    ) = setting(
        None,
        help="Format of tool calls in the policy's answers. harmony is that of gpt-oss, glm4_moe that of GLM-4.5 to "
        "4.7. Names of vLLM, SGLang and AReaL are read, too, such as qwen for hermes. text: calls are ordinary text. "
        "null: the format that the chat template describes",
        aliases=_TOOL_CALL_PARSERS,
        only_with=_AGENT,
    )
    reasoning_parser: Literal["think", "none"] = setting(
        "think",
        help="Reasoning in the policy's answers. think: the text between <think> and </think> at the start (with "
        "harmony the channel analysis) becomes reasoning_content of a message. Other names are read, too, such as "
        "qwen3 and gpt-oss. none: it is a part of the content",
        aliases=_REASONING_PARSERS,
        only_with=_AGENT,
    )
    export_style: Literal["individual", "concat"] | None = setting(
        None,
        help="The training rows of a sample. null: turns whose prompts continue the same tokens are one row. "
        "individual: each turn is a row, with its prompt masked. concat: the conversation is one row, and a sample "
        "with a history that is not linear is lost",
        only_with=_AGENT,
    )

    host: str = setting(
        "127.0.0.1",
        help="Address at which sessions are served, without encryption. 0.0.0.0: all addresses of this machine",
        only_with=_ONLINE,
        on_resume=SPEED,
    )
    port: int = setting(
        0, help="Port at which sessions are served. 0: a free one", ge=0, le=65535, only_with=_ONLINE, on_resume=SPEED
    )
    session_timeout_seconds: float = setting(
        3600.0, help="A session without a request for longer is ended, and its sample is lost", gt=0, only_with=_ONLINE
    )
    set_reward_finish_timeout: float = setting(
        0.0,
        help="Seconds for which a session that has ended still takes rewards. A session that has a reward ends by "
        "itself after as long without a request. 0: it ends by the request end_session, with the rewards reported "
        "until then",
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
