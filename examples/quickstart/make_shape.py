"""Write the tokenizer and config.json of the quickstart's model: a Qwen3 of 306,480 parameters with character tokens.

    python examples/quickstart/make_shape.py FOLDER

The SFT recipe then trains the weights, in a few minutes on two cores:

    python -m areno.recipes.sft --config-name=quickstart_base actor.path=FOLDER
"""

import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

TOKENS = ["<pad>", "<eos>", "<unk>", "?", *"0123456789", "+", "="]


def main(folder):
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    ).save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(TOKENS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
