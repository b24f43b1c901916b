"""Openings of children's stories, made from lists of words. The model continues them.

Each prompt begins with `<s>`, the token at the beginning of every training text of the model. A plain prompt is encoded
exactly as it is written, so the token must be part of it.
"""

NAMES = {
    "girl": ["Lily", "Anna", "Mia", "Sara", "Lucy", "Amy", "Sue", "Jane"],
    "boy": ["Tom", "Ben", "Max", "Tim", "Sam", "Jack", "Bob", "John"],
}
OPENINGS = [
    "Once upon a time, there was a little {kind} named {name}.",
    "One day, a {kind} named {name} went to the park.",
    "There was a {kind} called {name} who liked to play outside.",
    "{name} was a happy {kind}.",
]


def load_dataset(split):
    """Every opening with every name: 64 prompts."""
    return [
        {"prompt": "<s>" + opening.format(kind=kind, name=name)}
        for opening in OPENINGS
        for kind, names in NAMES.items()
        for name in names
    ]
