"""The operations that decide the speed, a folder for each.

A folder's package is what callers import. It holds a torch reference (`reference.py`), which runs on the CPU and is
what the tests compare with, and Triton kernels (`triton*.py`). `backend.use_triton` chooses between them. The reference
of `elementwise` is the plain layers in `areno.layers`.

The language of Triton kernels only looks like Python, so their files switch off some checks of types.
"""
