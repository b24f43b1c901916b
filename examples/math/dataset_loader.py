"""GSM8K rows {question, answer} as prompts with a reference answer.

    train_dataset.path=gsm8k/train.jsonl train_dataset.loader=examples/math/dataset_loader.py

`path` may be a local file or the hub reference openai/gsm8k:main.
"""

from areno.api.data import read_rows

INSTRUCTION = "Solve the problem step by step and put the final answer in \\boxed{}."


def load_dataset(path, split):
    return [
        {
            "prompt": f"{row['question'].strip()}\n\n{INSTRUCTION}",
            "solutions": row["answer"].split("####")[-1].strip(),
        }
        for row in read_rows(path, split)
    ]
