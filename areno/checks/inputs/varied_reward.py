"""A reward that differs for nearly any two completions, so that a short run on a random model has gradients."""

import zlib


def reward_fn(record):
    return zlib.crc32(record.completion.encode()) / 2**32
