"""Agents in the form of AReaL's workflows. The names of packages of AReaL are left out, since they are not here."""

from openai import AsyncOpenAI


def score(text):
    return float(len(text) % 3)


class MathAgent:
    def __init__(self, **kwargs):
        self.kwargs = kwargs.copy()
        self.kwargs.pop("max_tokens", None)

    async def run(self, data: dict, **extra_kwargs):
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url")
        api_key = extra_kwargs.get("api_key", "DUMMY")
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        comp = await client.chat.completions.create(messages=data["messages"], model="default", **self.kwargs)
        return score(comp.choices[0].message.content or "")


class MultiTurnMathAgent:
    def __init__(self, max_turns: int = 2, **kwargs):
        self.max_turns = max_turns
        self.kwargs = kwargs.copy()

    async def run(self, data: dict, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key", "DUMMY"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        messages = data["messages"].copy()
        rewards = {}
        for _ in range(self.max_turns):
            response = await client.chat.completions.create(
                messages=messages, model="default", max_tokens=6, **self.kwargs
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            rewards[response.id] = score(message.content or "") + 0.25 * data["solutions"]
            messages.append({"role": "user", "content": "Please try again."})
        return rewards


class Plain:
    """Not async, and without further arguments but the address."""

    def run(self, data, base_url):
        import json
        import urllib.request

        body = json.dumps({"model": "default", "messages": data["messages"], "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return len(json.load(response)["choices"][0]["message"]["content"] or "") > 2


class NoRun:
    pass


class NeedsMore:
    def __init__(self, model):
        self.model = model

    async def run(self, data, **more):
        return 0.0


class OtherRun:
    async def run(self):
        return 0.0
