"""GRPO whose rollout alone is in FP8: a control, which shows what two policies cost.

    python examples/algorithms/fp8_rollout.py --config-name=countdown actor.path=FOLDER actor.fp8_config.mode=e4m3

Training and scoring compute in `actor.dtype`. areno never does this by itself: with `actor.fp8_config`, rollout and
training compute the same function.
"""

import sys

import areno.engine.processes.workers
import areno.engine.roles
import areno.engine.train.backend
from areno.engine.worker import Worker
from areno.launch import run_recipe
from areno.models.quantization import quantize_linears, quantized_linears

quantized = {}  # linear layer -> its weight in FP8


def quantize(model, fp8, **options):
    quantize_linears(model, fp8, **options)
    quantized.update((layer, layer.quantized) for layer in quantized_linears(model))
    use_fp8(model, False)


def quantize_again(model):
    for layer, weight in quantized.items():
        weight.set(layer.weight)


def use_fp8(model, on):
    for layer, weight in quantized.items():
        layer.quantized = weight if on else None
    for module in model.modules():
        if hasattr(module, "fp8_kv"):
            module.fp8_kv = on


class RolloutInFP8(Worker):
    def begin_rollout(self, spec):
        use_fp8(self.actor, True)
        return super().begin_rollout(spec)

    def end_rollout(self, drop=False):
        super().end_rollout(drop)
        use_fp8(self.actor, False)


if __name__ == "__main__":
    areno.engine.roles.quantize_linears = quantize
    areno.engine.train.backend.quantize_again = quantize_again
    areno.engine.processes.workers.Worker = RolloutInFP8
    sys.argv.append("engine.workers=inline")  # other processes would not know of these three
    run_recipe("areno.recipes.grpo")
