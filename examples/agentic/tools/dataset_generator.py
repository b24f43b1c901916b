"""Write orders to move, one JSON object in each line.

python examples/agentic/tools/dataset_generator.py --output moves.jsonl --count 256 --seed 2026
"""

import argparse
import json

from moves import orders

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="the file to write")
    parser.add_argument("--count", type=int, default=256, help="how many orders (256)")
    parser.add_argument("--seed", type=int, default=2026, help="the same seed gives the same orders (2026)")
    arguments = parser.parse_args()
    with open(arguments.output, "w", encoding="utf-8") as file:
        for row in orders(arguments.count, arguments.seed):
            file.write(json.dumps(row) + "\n")
    print(f"{arguments.count} orders in {arguments.output}")
