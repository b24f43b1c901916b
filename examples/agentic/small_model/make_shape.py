"""Write the tokenizer and config.json of a small model for agents: a Qwen3 that knows the words of its demonstrations.

    python examples/agentic/small_model/make_shape.py FOLDER [DEMONSTRATIONS [KEY=VALUE ...]]

DEMONSTRATIONS is a file as demonstrations.py beside this one, which is the default.
hidden_size=128 or another KEY=VALUE changes the shape.

The SFT recipe then trains the weights, in a few minutes on two cores:

    python -m areno.recipes.sft --config-name=agents_base actor.path=FOLDER
"""

import runpy
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>"]
CALL = ["<tool_call>", "</tool_call>"]
# A token is a piece of a call, a word, or a single character.
PIECES = Regex(r"""\{"name": "|", "arguments": \{"|": "?|"?\}\}|[A-Za-z_]+|[\s\S]""")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TEMPLATE = """\
{%- if tools -%}
  {{- '<|im_start|>system\\nTools:' -}}
  {%- for tool in tools -%}
    {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
    {{- '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def main(folder, demonstrations="", *shape):
    file = demonstrations or str(Path(__file__).with_name("demonstrations.py"))
    load_dataset = runpy.run_path(file)["load_dataset"]
    pieces = pre_tokenizers.Split(PIECES, "isolated")
    texts = ["system user assistant tool Tools", *map(chr, range(32, 127)), "\n"]
    for row in load_dataset("train", count=4000):
        texts += [message["content"] for message in row["messages"]]
        texts += [
            f"{tool['function']['name']} {' '.join(tool['function']['parameters']['properties'])}"
            for tool in row["tools"]
        ]
    words = {piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)}
    tokens = [*SPECIAL, *CALL, *sorted(words)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.Fuse()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CALL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        model_max_length=512,
    ).save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokens),
        **{**SHAPE, **{key: int(value) for key, value in (each.split("=") for each in shape)}},
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
