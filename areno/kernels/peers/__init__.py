"""Small tensors of the GPUs of one machine, which reach each other's memory: their sum, or all of them side by side.

The memory, and whether it works at all, is the business of `memory.py`. There is no torch form: where these kernels
cannot run, collectives of torch.distributed do the same.
"""
