"""Results with the same bits: of rollout and training (exact.py), and of two runs (deterministic.py)."""
