import os
import sys

from file_tools import read_file, write_file
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(os.environ["MODEL"], api_base=os.environ["URL"] + "/v1", api_key=os.environ["KEY"])
print(ToolCallingAgent(tools=[tool(write_file), tool(read_file)], model=model).run(sys.argv[1]))
