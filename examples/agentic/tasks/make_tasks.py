"""Write a folder of twenty small tasks: a word into a file.

python examples/agentic/tasks/make_tasks.py FOLDER
"""

import sys
from pathlib import Path

WORDS = ("ant", "cat", "fox", "owl")
INSTRUCTIONS = (
    "Write {word} into the file answer.",
    "The file answer should say {word}.",
    "Please put the word {word} into answer.",
    "I need a file answer with the text {word} in it.",
    "Make a file. Its name is answer, and it holds {word}.",
)
# A test writes the reward. Here it is 1 for the right word and 0 for another one, or for no file.
TEST = """\
if [ "$(cat answer)" = "{word}" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


def main(folder):
    for word in WORDS:
        for number, instruction in enumerate(INSTRUCTIONS):
            task = Path(folder) / f"{word}{number}"
            (task / "tests").mkdir(parents=True, exist_ok=True)
            (task / "instruction.md").write_text(instruction.format(word=word) + "\n")
            (task / "tests/test.sh").write_text(TEST.format(word=word))


if __name__ == "__main__":
    main(sys.argv[1])
