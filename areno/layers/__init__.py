"""Layers of the transformer, sharded over tensor-parallel ranks, and the collectives that they use."""
