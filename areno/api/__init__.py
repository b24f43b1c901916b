"""The algorithm registry of the SDK. Import its names from areno.api, and all other public names from `areno`."""

from areno.api.algorithms import Algorithm, algorithm_names, get_algorithm, register_algorithm

__all__ = ["Algorithm", "algorithm_names", "get_algorithm", "register_algorithm"]
