import os
import sys

from file_tools import read_file, write_file
from langgraph.prebuilt import create_react_agent

url, key, model = (os.environ[name] for name in ("URL", "KEY", "MODEL"))
if os.environ["DIALECT"] == "anthropic":
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key=key)
else:
    from langchain_openai import ChatOpenAI

    responses = os.environ["DIALECT"] == "responses"
    chat = ChatOpenAI(model=model, base_url=url + "/v1", api_key=key, use_responses_api=responses)
agent = create_react_agent(chat, [write_file, read_file], prompt="You work with files.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
