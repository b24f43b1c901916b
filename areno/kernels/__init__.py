"""The operations that decide the speed, each in a package of its own.

A package usually holds an implementation in plain torch (`reference.py`), which runs on the CPU and with which the
tests compare, and Triton kernels (`triton*.py`). Callers import the package, and `backend.use_triton` chooses between
the two by the device of the tensors. `elementwise` has no `reference.py`, because the layers in `areno.layers` compute
the same in plain torch.

Type checkers read Triton kernels as ordinary Python and report false errors, so the kernel files switch some checks
off.
"""
