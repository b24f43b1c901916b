"""The operations that decide the speed, one folder for each.

Callers import the package of a folder. It holds a torch reference (`reference.py`), which runs on the CPU and with
which tests compare, and Triton kernels (`triton*.py`). `backend.use_triton` chooses between the two. The reference for
`elementwise` is the plain layers in `areno.layers`.

Type checkers read Triton kernels as Python and report false errors, so these files switch some checks off.
"""
