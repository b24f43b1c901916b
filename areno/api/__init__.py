"""The SDK. The registry of algorithms is imported from areno.api, and all other public names from `areno`."""

from areno.api.algorithms import Algorithm, algorithm_names, get_algorithm, register_algorithm

__all__ = ["Algorithm", "algorithm_names", "get_algorithm", "register_algorithm"]
