"""Play a task of verifiers, and print its trace: python run_verifiers.py eval|train URL KEY MODEL TOKENIZER.

This module is also the taskset. The agent is verifiers' own program `bash`, in a process of this machine.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["Greetings"]


class GreetingTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def says_hello(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content == "The shell says hello.")


class Greetings(vf.Taskset[GreetingTask]):
    def load(self):
        yield GreetingTask(vf.TaskData(prompt="Let the shell say hello."), self.config.task)


async def play(kind: str, url: str, model: str, tokenizer: str) -> vf.Trace:
    endpoint = {"base_url": url + "/v1", "api_key_var": "SERVER_KEY"}
    if kind == "train":
        client = vf.TrainClientConfig(**endpoint, renderer={"name": "qwen3"}, renderer_model_name=tokenizer)
    else:
        client = vf.EvalClientConfig(**endpoint)
    sampling = vf.SamplingConfig(temperature=0.7, max_tokens=500)
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": "run_verifiers"}, "agent": agent}))
    async with env.serving():
        [slot] = env.slots(next(iter(env.taskset)))
        episode = await env.run_slot(slot, vf.ModelContext(model=model, client=client, sampling=sampling))
    return episode.traces[0]


if __name__ == "__main__":
    kind, url, os.environ["SERVER_KEY"], model, tokenizer = sys.argv[1:]
    trace = asyncio.run(play(kind, url, model, tokenizer))
    shown = {
        "reward": trace.reward,
        "errors": [error.message for error in trace.errors],
        "roles": [node.message.role for node in trace.nodes],
        "branches": [[one.token_ids, one.sampled_mask, one.logprobs] for one in trace.branches],
    }
    print(json.dumps(shown))
