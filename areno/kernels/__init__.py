"""The operations that take most of the time. Each has a package, whose docstring is the contract of its functions.

A package usually holds an implementation in plain torch (`reference.py`), which runs on the CPU and with which tests
compare, and Triton kernels (`triton*.py`) with the same signatures. Callers import the package, which chooses between
the two by the device of the tensors. `elementwise` has no `reference.py`, because `areno.layers` computes the same in
plain torch. Type checkers read Triton kernels as ordinary Python, so kernel files switch some checks off.
"""
