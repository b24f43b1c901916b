import os
import sys

from crewai import LLM, Agent
from crewai.tools import tool
from file_tools import read_file, write_file

llm = LLM("openai/" + os.environ["MODEL"], base_url=os.environ["URL"] + "/v1", api_key=os.environ["KEY"])
tools = [tool("write_file")(write_file), tool("read_file")(read_file)]
agent = Agent(role="assistant", goal="Do what is asked.", backstory="You work with files.", llm=llm, tools=tools)
print(agent.kickoff(sys.argv[1]).raw)
