"""What /metrics shows, in the text form of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Counts of observations by upper bound."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The samples of the metric `name`."""
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """The counters of one server, since it was started. Tokens are counted when their request is done."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.in_flight = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.aborted = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """The page. gauges: (name, help, value) of what others count."""
        lines = []

        def metric(name: str, kind: str, about: str, samples: Iterable[str]) -> None:
            lines.extend([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples])

        told = [f'areno_requests_total{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self.requests.items())]
        metric("areno_requests_total", "counter", "HTTP requests that were answered.", told)
        counters = {
            "areno_prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "areno_prompt_tokens_cached_total": ("Of these, found in the cache.", self.cached_tokens),
            "areno_prompt_tokens_computed_total": ("Of these, prefilled.", self.prompt_tokens - self.cached_tokens),
            "areno_completion_tokens_total": ("Tokens that were sampled.", self.completion_tokens),
            "areno_requests_aborted_total": ("Requests whose client went away or ran out of time.", self.aborted),
        }
        for name, (about, value) in counters.items():
            metric(name, "counter", about, [f"{name} {value}"])
        for name, about, value in [("areno_requests_in_flight", "Requests being answered.", self.in_flight), *gauges]:
            metric(name, "gauge", about, [f"{name} {value:g}"])
        seconds = {
            "areno_time_to_first_token_seconds": ("Of streamed requests.", self.first_token),
            "areno_request_seconds": ("From a request to the end of its answer.", self.whole),
        }
        for name, (about, histogram) in seconds.items():
            metric(name, "histogram", about, histogram.lines(name))
        return "\n".join(lines) + "\n"
