"""Elementwise operations between the matrix products of a layer, each as one Triton kernel with its gradient.

The kernels compute in fp32 and round where the plain layers in `areno.layers` do, and tests compare both. Launches
depend on shapes alone, so a CUDA graph can capture them, and every sum has a fixed order. The modules import Triton at
their top. Import them only if `backend.can_use_triton` returns True.

`plus_one` multiplies a norm by 1 + weight instead of weight. `gelu` takes the tanh form of GELU instead of SiLU. The
first arguments of a backward function are the gradients of the results. It returns the gradients of the inputs.

Shape letters: N tokens, D hidden size, H query heads, K key heads, C head dimension, F = C / 2, I inner size; P
programs of a backward kernel.
"""
