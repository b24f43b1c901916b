"""Layers that see equally far, and the blocks that a sequence holds for them."""
