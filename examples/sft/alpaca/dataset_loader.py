"""Turns rows {instruction, input, output} of Alpaca into rows {prompt, response}.

    areno train --algo sft --dataset-path yahma/alpaca-cleaned --dataset-loader-fn examples/sft/alpaca/dataset_loader.py

The input is text that the instruction is about, and may be empty. areno also reads such rows without a loader.
"""

from areno.data.sources import read_rows


def load_dataset(path, split):
    return [
        {
            "prompt": "\n".join(filter(None, (row["instruction"], row.get("input")))),
            "response": row["output"],
        }
        for row in read_rows(path, split)
    ]
