"""Print what OpenEnv finds out about a server: python run_openenv.py URL KEY MODEL."""

import dataclasses
import json
import sys

from openenv.core.harness.capture.validate_llm import validate_llm

url, key, model = sys.argv[1:]
print(json.dumps(dataclasses.asdict(validate_llm(url, model, api_key=key))))
