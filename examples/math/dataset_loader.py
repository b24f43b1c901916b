"""Turns GSM8K rows {question, answer} into rows {prompt, solutions}.

    train_dataset.path=gsm8k/train.jsonl train_dataset.loader=examples/math/dataset_loader.py

`path` can be a local file or the hub dataset openai/gsm8k:main.
"""

from areno.data.sources import read_rows

INSTRUCTION = "Solve the problem step by step and put the final answer in \\boxed{}."


def load_dataset(path, split):
    return [
        {
            "prompt": f"{row['question'].strip()}\n\n{INSTRUCTION}",
            "solutions": row["answer"].split("####")[-1].strip(),
        }
        for row in read_rows(path, split)
    ]
