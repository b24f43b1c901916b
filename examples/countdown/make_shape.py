"""Write the tokenizer and config.json of the models of this example: a Qwen3 shape with character tokens.

    python examples/countdown/make_shape.py FOLDER [SIZE]

SIZE is `gpu` (25 million parameters, the default) or `cpu` (0.3 million). A student of distillation, `student` or
`student_cpu`, has a third of these parameters. The SFT recipe trains the weights:

    python -m areno.recipes.sft --config-name=countdown_base actor.path=FOLDER
"""

import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

TOKENS = ["<pad>", "<eos>", "<unk>", "\n", " ", *"0123456789", *"+-*/=,"]
SHAPES = {
    "gpu": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "cpu": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "student": {
        "hidden_size": 320,
        "intermediate_size": 832,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "student_cpu": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


def main(folder, size="gpu"):
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=2048
    ).save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(TOKENS),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **SHAPES[size],
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
