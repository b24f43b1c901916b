"""The findings of a check as text and as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from areno.checks.inputs.findings import Detail, Finding, MarkedText

_COLORS = {"green": "32", "red": "31", "not checked": "33"}
_TRAINED = "\x1b[30;42m"
_STAGES = (  # of findings about the two steps, which the steps compute one after another
    ("training-rows", "loss-mask", "row-rewards"),
    # The rollout and the passes over its tokens compute theirs each on their own.
    ("rollout-logprobs", "training-logprobs", "reference-logprobs", "critic-values", "teacher-logprobs"),
    ("reference-point",),
    ("advantages", "returns"),
    ("loss-formula", "equal-rewards"),
    ("off-policy-loss", "first-ratio", "old-logprobs"),
    ("slope-signs", "finite-differences", "micro-batches", "shared-prefixes", "data-parallel-ranks"),
    ("advantage-ascent", "pair-margin", "label-margin", "likelihood"),
)
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{margin:2rem 0 .3rem;border-bottom:1px solid #ccc}
details,.plain{margin:.3rem 0}summary{cursor:pointer}
b{display:inline-block;min-width:6.5rem}.green b{color:#1a7f37}.red b{color:#c1121f}.not b{color:#9a6700}
pre{white-space:pre-wrap;background:#f6f8fa;padding:.6rem;margin:.3rem 0;border-radius:4px}
mark{background:#aceebb}code{color:#555}.caption{color:#555;margin:.5rem 0 0}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}pre{background:#1c1f24}mark{background:#1f6f3a;color:#fff}
code,.caption{color:#aaa}}
"""


def text_lines(finding: Finding, color: bool) -> Iterator[str]:
    """Yield the line of a finding, then its details if it is not green, and marked texts always."""
    verdict = f"\x1b[{_COLORS[finding.verdict]}m{finding.verdict:<12}\x1b[0m" if color else f"{finding.verdict:<12}"
    yield f"{verdict}{finding.name:<20} {finding.line}"
    for detail in finding.details:
        if isinstance(detail, MarkedText):
            yield f"    {detail.caption}"
            yield from (f"    | {line}" for line in _marked(detail, color).split("\n"))
        elif finding.verdict != "green":
            yield f"    {detail}"


def _marked(text: MarkedText, color: bool) -> str:
    if not color:
        return "".join(f"[[{piece}]]" if trained else piece for piece, trained in text.pieces)
    # Every line has its own colour, so that the bar at the start of a line has none.
    painted = (
        "\n".join(f"{_TRAINED}{line}\x1b[0m" if line else line for line in piece.split("\n")) if trained else piece
        for piece, trained in text.pieces
    )
    return "".join(painted)


def red_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each red finding again, in one line: causes before what may follow from them."""
    reds = sorted((each for each in findings if each.verdict == "red"), key=lambda each: _stage(each.name))
    for finding in reds:
        causes = [each.name for each in reds if 0 < _stage(each.name) < _stage(finding.name)]
        told = f" (may follow from {causes[0]})" if causes else ""
        yield f"{finding.verdict:<12}{finding.name:<20} {finding.line}{told}"


def _stage(name: str) -> int:
    """Return 0 for a finding that follows from no other in the list. Those of later stages may follow from earlier."""
    return next((number for number, names in enumerate(_STAGES, 1) if name in names), 0)


def summary_line(findings: Sequence[Finding], seconds: float) -> str:
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _COLORS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{said}, in {seconds:.0f} s"


def html_page(command: str, findings: Sequence[Finding], summary: str) -> str:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    parts = [
        f"<h2>{html.escape(group)}</h2>\n{''.join(map(_html_finding, members))}" for group, members in groups.items()
    ]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>areno check</title><style>{_STYLE}</style>'
    title = f"<h1>areno check</h1><p><code>{html.escape(command)}</code></p><p>{html.escape(summary)}</p>"
    reds = "".join(f"<pre>{html.escape(line)}</pre>" for line in red_lines(findings))
    parts += [f"<h2>red</h2>\n{reds}\n"] * bool(reds)
    return f"{head}\n{title}\n{''.join(parts)}</html>\n"


def _html_finding(finding: Finding) -> str:
    line = f"<b>{finding.verdict}</b> <code>{html.escape(finding.name)}</code> {html.escape(finding.line)}"
    kind = finding.verdict.split()[0]
    if not finding.details:
        return f'<div class="plain {kind}">{line}</div>\n'
    is_open = " open" * (finding.verdict == "red" or any(isinstance(each, MarkedText) for each in finding.details))
    return f'<details class="{kind}"{is_open}><summary>{line}</summary>{_html_details(finding.details)}</details>\n'


def _html_details(details: Iterable[Detail]) -> str:
    parts, plain = list[str](), list[str]()
    for detail in details:
        if isinstance(detail, MarkedText):
            text = "".join(
                f"<mark>{html.escape(piece)}</mark>" if trained else html.escape(piece)
                for piece, trained in detail.pieces
            )
            parts.append(f'<p class="caption">{html.escape(detail.caption)}</p><pre>{text}</pre>')
        else:
            plain.append(html.escape(detail))
    return "".join([f"<pre>{chr(10).join(plain)}</pre>"] * bool(plain) + parts)
