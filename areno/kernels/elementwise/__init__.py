"""The elementwise operations between the matrix products of a layer, each as one Triton kernel, and their gradients.

They compute, and round, as the plain layers in `areno.layers` do; tests compare the two. All arithmetic is fp32.
Launches depend on the shapes alone, so they can be captured in a CUDA graph. Every sum has a fixed order.

These files import Triton at their top: import them only where `backend.use_triton` says yes.

Shape letters: N tokens, D hidden size, H query heads, K key heads, C head dimension, F = C / 2, I inner size.
"""
