"""Write repair tasks, one JSON object in each line.

python examples/agentic/coding/dataset_generator.py --output coding.jsonl --count 64
"""

import argparse
import json

from coding_bugs import repairs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="the file to write")
    parser.add_argument("--count", type=int, default=64, help="how many tasks (64)")
    parser.add_argument("--seed", type=int, default=2026, help="the same seed gives the same tasks (2026)")
    arguments = parser.parse_args()
    with open(arguments.output, "w", encoding="utf-8") as file:
        for row in repairs(arguments.count, arguments.seed):
            file.write(json.dumps(row) + "\n")
    print(f"{arguments.count} tasks in {arguments.output}")
