"""The league of algorithms: the results of its runs as small files, and the tables and the picture that they give."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from areno.errors import ArenoError
from areno.files.durable import atomic_write_text

CONTROLS = ("grpo_again", "random_reward")
BASELINE = "grpo"
CLAIM_SEEDS = 5  # of both algorithms, before one is said to be better
_MEAN_OF = 5  # steps
_DIVERGES = 4  # times the typical standard deviation
_MANY = 8  # algorithms, for a median of their variances


@dataclass(frozen=True)
class LeagueRun:
    """A run of the league. `age` is the staleness of its samples, and 0 in the other stages."""

    stage: str
    name: str
    seed: int
    rate: str = ""
    age: int = 0

    @property
    def file(self) -> str:
        """The path of its result in the folder of results. The learning rate tells runs of the first stage apart."""
        more = f"-lr{self.rate}" if self.stage == "rates" else f"-age{self.age}" if self.age else ""
        return f"{self.stage}/{self.name}{more}-s{self.seed}.json"


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        evaluation: Metrics of the evaluation after training, by their names without eval/.
        before: The same before training, {} if it was not measured.
        tokens: Thousands of tokens that the run had sampled at the end of each step.
        seconds: Seconds of training at the end of each step.
        rewards, lengths, entropy: Means of each step.
        base: Digest of the base model.
        at_once: Number of runs that shared the devices.
        settings: The settings that decide what the run learns.
    """

    run: LeagueRun
    size: str
    evaluation: dict[str, float]
    before: dict[str, float]
    tokens: list[float]
    seconds: list[float]
    rewards: list[float]
    lengths: list[float]
    entropy: list[float]
    base: str
    device: str
    at_once: int
    wall_seconds: float
    settings: list[str]

    @property
    def solve_rate(self) -> float:
        return self.evaluation["accuracy"]

    @property
    def pass_at_most(self) -> float:
        """pass@k of the largest k that was measured."""
        return self.evaluation[_most_passes(self.evaluation)]

    def write(self, folder: Path) -> None:
        path = folder / self.run.file
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(asdict(self), separators=(",", ":")) + "\n")

    def at_rate(self, rate: float) -> tuple[float, float] | None:
        """Return (thousand tokens, seconds) after which the mean reward of five steps was `rate`. None if never."""
        for end in range(_MEAN_OF, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[end - _MEAN_OF : end]) >= rate:
                return self.tokens[end - 1], self.seconds[end - 1]
        return None


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results in a folder, by the file of each."""
    found = {}
    for path in sorted(folder.glob("*/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            result = Result(**{**content, "run": LeagueRun(**content["run"])})
            _check_result(result, path.relative_to(folder).as_posix())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArenoError("{} is no result of the league: {}; remove it", path, error) from error
        found[result.run.file] = result
    return found


def _check_result(result: Result, file: str) -> None:
    """Raise an error if a result lacks what the tables read, or is in the file of another run."""
    if result.run.file != file:
        raise ValueError(f"it says that it is {result.run.file}")
    numbers = [result.run.seed, result.run.age, result.at_once, result.wall_seconds, float(result.run.rate)]
    numbers += [result.solve_rate, result.pass_at_most, *result.evaluation.values(), *result.before.values()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is not finite")
    math.fsum([*result.tokens, *result.seconds, *result.rewards, *result.lengths, *result.entropy])


def _most_passes(evaluation: Iterable[str]) -> str:
    return max((name for name in evaluation if name.startswith("pass@")), key=lambda name: int(name[5:]))


Groups = Mapping[str, Sequence[Result]]
"""Name of an algorithm -> its results, one for each seed."""


def by_name(results: Iterable[Result], stage: str, age: int = 0) -> dict[str, list[Result]]:
    """Return the results of a stage by algorithm, the best mean solve rate first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if (result.run.stage, result.run.age) == (stage, age):
            found.setdefault(result.run.name, []).append(result)
    return dict(sorted(found.items(), key=lambda item: -mean_rate(item[1])))


def mean_rate(results: Sequence[Result]) -> float:
    return statistics.fmean(result.solve_rate for result in results)


def t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, to 0.004."""
    exact = (12.706, 4.303, 3.182, 2.776)
    if freedom <= len(exact):
        return exact[freedom - 1]
    z = 1.959964
    terms = [(z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def difference_text(values: Sequence[float]) -> str:
    """Return the mean of differences of pairs, and half of its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    half = t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.3f} ± {half:.3f}"


def _typical_deviation(groups: Groups) -> tuple[float, int]:
    """Return the typical standard deviation of solve rates within algorithms, and its degrees of freedom.

    With many algorithms it follows from the median of the variances, so that a few whose seeds diverge do not raise it.
    (nan, 0) if no algorithm has two seeds.
    """
    rates = [[one.solve_rate for one in results] for results in groups.values() if len(results) > 1]
    freedom = sum(len(values) - 1 for values in rates)
    if not rates:
        return math.nan, 0
    if len(rates) < _MANY:
        squares = sum(statistics.variance(values) * (len(values) - 1) for values in rates)
        return math.sqrt(squares / freedom), freedom
    # The median of chi squared, divided by its degrees of freedom, is about (1 - 2 / (9 n)) ** 3.
    variances = [statistics.variance(values) / (1 - 2 / (9 * (len(values) - 1))) ** 3 for values in rates]
    return math.sqrt(statistics.median(variances)), freedom


def resolution(groups: Groups) -> float:
    """Return the smallest difference of two mean solve rates that is not a tie.

    It is half of the 95 % interval of a difference, with the typical standard deviation within algorithms, and the
    smallest number of seeds of all. nan if no algorithm has two seeds.
    """
    deviation, freedom = _typical_deviation(groups)
    fewest = min(len(results) for results in groups.values())
    return t_975(freedom) * deviation * math.sqrt(2 / fewest) if freedom else math.nan


def diverging(groups: Groups) -> set[str]:
    """Return the algorithms whose seeds differ by far more than is typical, so that their mean says little."""
    typical, _ = _typical_deviation(groups)
    rates = {name: [one.solve_rate for one in results] for name, results in groups.items() if len(results) > 1}
    return {name for name, values in rates.items() if statistics.stdev(values) > _DIVERGES * typical > 0}


def places(groups: Groups, smallest: float) -> dict[str, str]:
    """Return the place of each algorithm, such as "2" or, in a tie, "2=".

    `groups` begins with the best. An algorithm ties with the first of its place if it is worse by less than `smallest`.
    If this is nan, no place is known. Algorithms whose seeds diverge have no place.
    """
    if math.isnan(smallest):
        return dict.fromkeys(groups, "?")
    found: dict[str, int] = {}
    first, place = math.inf, 0
    outside = diverging(groups)
    placed = {name: results for name, results in groups.items() if name not in outside}
    for number, (name, results) in enumerate(placed.items(), 1):
        rate = mean_rate(results)
        if rate < first and first - rate >= smallest:
            first, place = rate, number
        found[name] = place
    shared = [place for place in found.values() if list(found.values()).count(place) > 1]
    told = {name: f"{place}{'=' if place in shared else ''}" for name, place in found.items()}
    return {name: told.get(name, "diverges") for name in groups}


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(results: Iterable[Result], reached: float) -> str:
    """Return all tables in Markdown. `reached` is the mean reward for which tokens and seconds are counted."""
    results = list(results)
    parts = []
    if rates := by_name(results, "rates"):
        parts.append(f"Solve rates of validation for each learning rate\n\n{rate_table(rates)}")
    for stage in ("countdown", "arithmetic"):
        if groups := by_name(results, stage):
            parts.append(f"{stage}: {_conditions(groups)}\n\n{stage_table(groups, reached)}")
    if claimed := claims(by_name(results, "countdown")):
        parts.append(f"Differences from {BASELINE}, for algorithms with {CLAIM_SEEDS} seeds or more\n\n{claimed}")
    if stale := staleness_table(results):
        parts.append(f"Solve rates by staleness, with the number of seeds\n\n{stale}")
    return "\n\n".join(parts)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _conditions(groups: Groups) -> str:
    results = [one for of_name in groups.values() for one in of_name]
    devices = ", ".join(sorted({one.device for one in results}))
    at_once = " to ".join(str(n) for n in sorted({extreme(one.at_once for one in results) for extreme in (min, max)}))
    before = [one.before["accuracy"] for one in results if one.before]
    base = f"; base model {statistics.fmean(before):.3f}" if before else ""
    smallest = resolution(groups)
    unknown = "no places, because the spread of two seeds or more decides what is a tie"
    resolved = f"; {unknown if math.isnan(smallest) else f'differences below {smallest:.3f} are ties'}"
    return f"{len(results)} runs of {len(groups)} algorithms on {devices}, {at_once} at once{base}{resolved}"


def rate_table(groups: Groups) -> str:
    rates = sorted({one.run.rate for results in groups.values() for one in results}, key=float)
    found = {name: {one.run.rate: one.solve_rate for one in results} for name, results in groups.items()}
    return _table(
        ["algorithm", *rates],
        [[f"`{name}`", *(f"{of[rate]:.3f}" if rate in of else "-" for rate in rates)] for name, of in found.items()],
    )


def best_rate(results: Iterable[Result]) -> str:
    """Return the learning rate with the highest solve rate."""
    return max(results, key=lambda one: one.solve_rate).run.rate


def stage_table(groups: Groups, reached: float) -> str:
    place = places(groups, resolution(groups))
    passes = _most_passes(next(iter(groups.values()))[0].evaluation)
    titles = ["place", "algorithm", "seeds", "learning rate", "solve rate", passes]
    titles += [f"million tokens to {reached:g}", f"seconds to {reached:g}", "tokens of an answer", "entropy"]
    rows = [
        [
            place[name],
            f"`{name}`",
            str(len(results)),
            ", ".join(dict.fromkeys(one.run.rate for one in results)),
            _mean_text([one.solve_rate for one in results]),
            _mean_text([one.pass_at_most for one in results]),
            _reached_text(results, reached, lambda found: f"{found[0] / 1e3:.2f}"),
            _reached_text(results, reached, lambda found: f"{found[1]:.0f}"),
            f"{statistics.fmean(_last(one.lengths) for one in results):.0f}",
            f"{statistics.fmean(_last(one.entropy) for one in results):.3f}",
        ]
        for name, results in groups.items()
    ]
    return _table(titles, rows)


def _last(values: Sequence[float]) -> float:
    return statistics.fmean(values[-_MEAN_OF:]) if values else math.nan


def _mean_text(values: Sequence[float]) -> str:
    """Return the mean, and the standard deviation of several values."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _reached_text(results: Sequence[Result], rate: float, text: Callable[[tuple[float, float]], str]) -> str:
    """Return what each seed needed to reach a rate. "-" stands for a seed that never did."""
    if results[0].run.name == "random_reward":
        return "-"
    found = [one.at_rate(rate) for one in results]
    return ", ".join(text(each) if each else "-" for each in found) if any(found) else "never"


def claims(groups: Groups) -> str:
    """Return a table of differences from the baseline, each between runs of the same seed. "" without any."""
    baseline = {one.run.seed: one for one in groups.get(BASELINE, ())}
    rows = []
    for name, results in groups.items():
        pairs = [(one, baseline[one.run.seed]) for one in results if one.run.seed in baseline]
        if name not in (BASELINE, *CONTROLS) and len(pairs) >= CLAIM_SEEDS:
            rates = [one.solve_rate - other.solve_rate for one, other in pairs]
            passes = [one.pass_at_most - other.pass_at_most for one, other in pairs]
            rows.append([f"`{name}`", str(len(pairs)), difference_text(rates), difference_text(passes)])
    if not rows:
        return ""
    return _table(["algorithm", "seeds", "solve rate", _most_passes(groups[BASELINE][0].evaluation)], rows)


def staleness_table(results: Sequence[Result]) -> str:
    ages = sorted({one.run.age for one in results if one.run.stage == "staleness"})
    fresh = by_name(results, "countdown")
    stale = {age: by_name(results, "staleness", age) for age in ages}
    names = [name for name in fresh if any(name in of for of in stale.values())]

    def cell(groups: Groups, name: str) -> str:
        rates = [one.solve_rate for one in groups.get(name, ())]
        return f"{_mean_text(rates)} ({len(rates)})" if rates else "-"

    rows = [[f"`{name}`", cell(fresh, name), *(cell(stale[age], name) for age in ages)] for name in names]
    titles = ["algorithm", *(f"staleness {age}" for age in (0, *ages))]
    return _table(titles, rows) if rows else ""


# The picture ----------------------------------------------------------------------------------------------------------

_LEFT, _TOP, _WIDTH, _LINE = 170, 50, 520, 20


def picture(results: Iterable[Result]) -> str:
    """Return an SVG picture: the solve rate of each seed on countdown, and the mean of each algorithm."""
    groups = by_name(results, "countdown")
    rates = [one.solve_rate for of_name in groups.values() for one in of_name]
    most = math.ceil(20 * max(rates, default=1.0)) / 20 or 1.0
    height = _LINE * len(groups)
    smallest = resolution(groups) if groups else math.nan

    def x(rate: float) -> float:
        return _LEFT + _WIDTH * rate / most

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 30} {_TOP + height + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="16">Solve rate on countdown after equal tokens</text>',
    ]
    if not math.isnan(smallest):
        best = mean_rate(next(iter(groups.values())))
        left = x(max(0.0, best - smallest))
        box = f'x="{left:.1f}" y="{_TOP - 10}" width="{x(best) - left:.1f}" height="{height + 10}"'
        lines.append(f'<rect {box} fill="#1f5fa8" fill-opacity="0.12"/>')
        lines.append(f'<text x="{_LEFT}" y="40" fill="#1f5fa8">shaded: ties with the first</text>')
    for part in range(6):
        rate = most * part / 5
        ends = f'x1="{x(rate):.1f}" x2="{x(rate):.1f}" y1="{_TOP - 10}" y2="{_TOP + height}"'
        lines.append(f'<line {ends} stroke="#ddd"/>')
        lines.append(f'<text x="{x(rate):.1f}" y="{_TOP + height + 18}" text-anchor="middle">{rate:.2f}</text>')
    for number, (name, of_name) in enumerate(groups.items()):
        y, colour = _TOP + _LINE * number + 5, "#888" if name in CONTROLS else "#1f5fa8"
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end" fill="{colour}">{escape(name)}</text>')
        for one in of_name:
            lines.append(f'<circle cx="{x(one.solve_rate):.1f}" cy="{y}" r="3" fill="{colour}" fill-opacity="0.5"/>')
        middle = x(mean_rate(of_name))
        ends = f'x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 7}" y2="{y + 7}"'
        lines.append(f'<line {ends} stroke="{colour}" stroke-width="2.5"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"
