"""An agent in one file: it lets the model run commands in a shell until the model answers without one.

    python loop.py PROMPT

The address and the key of the model are in OPENAI_BASE_URL and OPENAI_API_KEY. Only Python's library is needed.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

MAX_TURNS, MAX_OUTPUT, COMMAND_S = 10, 2000, 60
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "tools": [BASH]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(call):
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=COMMAND_S)
    except (ValueError, KeyError, TypeError, OSError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    return (done.stdout + done.stderr)[-MAX_OUTPUT:]


def main(prompt):
    messages = [{"role": "user", "content": prompt}]
    for _ in range(MAX_TURNS):
        try:
            message = ask(messages)
        except urllib.error.HTTPError as error:  # for example, the conversation fills the context
            sys.exit(error.read().decode())
        messages.append(message)
        if not message.get("tool_calls"):
            return print(message.get("content") or "")
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call)})


if __name__ == "__main__":
    main(sys.argv[1])
