import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from file_tools import read_file, write_file
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["URL"] + "/v1", api_key=os.environ["KEY"])
kind = OpenAIResponsesModel if os.environ["DIALECT"] == "responses" else OpenAIChatCompletionsModel
agent = Agent(
    "assistant",
    instructions="You work with files.",
    model=kind(os.environ["MODEL"], client),
    tools=[function_tool(write_file), function_tool(read_file)],
)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
