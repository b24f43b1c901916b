"""Write positions of tic-tac-toe in which X moves, one JSON object in each line.

    python examples/agentic/tictactoe/dataset_generator.py --output tictactoe.jsonl --count 256 --seed 2026

Each position is reached by random moves. Half of the games are against a perfect opponent.
"""

import argparse
import json

from tictactoe import positions

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="the file to write")
    parser.add_argument("--count", type=int, default=256, help="how many positions (256)")
    parser.add_argument("--seed", type=int, default=2026, help="the same seed gives the same positions (2026)")
    arguments = parser.parse_args()
    with open(arguments.output, "w", encoding="utf-8") as file:
        for row in positions(arguments.count, arguments.seed):
            file.write(json.dumps(row) + "\n")
    print(f"{arguments.count} positions in {arguments.output}")
