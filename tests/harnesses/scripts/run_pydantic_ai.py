import os
import sys

from file_tools import read_file, write_file
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, key, model = (os.environ[name] for name in ("URL", "KEY", "MODEL"))
if os.environ["DIALECT"] == "anthropic":
    chat = AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=key))
else:
    kind = OpenAIResponsesModel if os.environ["DIALECT"] == "responses" else OpenAIChatModel
    chat = kind(model, provider=OpenAIProvider(base_url=url + "/v1", api_key=key))
agent = Agent(chat, instructions="You work with files.", tools=[write_file, read_file])
print(agent.run_sync(sys.argv[1]).output)
