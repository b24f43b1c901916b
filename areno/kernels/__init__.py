"""The operations that decide the speed, a folder for each.

Callers import the package of a folder. It holds a torch reference (`reference.py`), which runs on the CPU and which
tests compare with, and Triton kernels (`triton*.py`). `backend.use_triton` chooses between the two. The reference of
`elementwise` is the plain layers in `areno.layers`.

Type checkers read Triton kernels as Python and report errors that are none, so these files switch some checks off.
"""
