"""1 for a story that mentions a dog, 0 for any other."""

import re


def reward_fn(record):
    return float(re.search(r"\b(dogs?|pupp(y|ies))\b", record.completion, re.IGNORECASE) is not None)
