"""Layers as single autograd functions with fused kernels. Its modules import Triton."""
