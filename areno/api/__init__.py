"""The SDK: what a script holds. The registry of algorithms is imported from here; the rest from `areno` itself."""

from areno.api.algorithms import Algorithm, algorithm_names, get_algorithm, register_algorithm

__all__ = ["Algorithm", "algorithm_names", "get_algorithm", "register_algorithm"]
