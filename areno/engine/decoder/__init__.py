"""Rollout: continuous batching over a paged KV cache."""
