"""One HTML page of runs that needs nothing beside itself: no network, no other file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno import __version__
from areno.errors import ArenoError
from areno.files.durable import write_text_whole
from areno.report.contents import contents, without_nan
from areno.tracking.reader import RunReader

_STATIC = Path(__file__).with_name("static")
_SCRIPTS = ("elements", "summary", "curves", "samples", "settings", "printing", "page")


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of runs to an HTML file and return its path. A file of this name is replaced.

    runs: their folders. Raises ArenoError for what is no folder of a run, and where the file cannot be written.
    """
    if not runs:
        raise ArenoError("a report needs the folder of at least one run")
    page = render(contents([RunReader(run) for run in dict.fromkeys(map(str, runs))]))
    page = page.encode("utf-8", "replace").decode()  # names of folders, and texts of JSON, may hold half a character
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
            path.write_text(page, encoding="utf-8")
        else:
            write_text_whole(path.resolve(), page)
    except OSError as error:
        raise ArenoError("{} cannot be written: {}", path, error.strerror) from error
    return path


def render(data: dict[str, Any]) -> str:
    """The page of `contents`."""
    names = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "TITLE": html.escape(f"areno: {names}"),
        "STYLE": _static("page.css"),
        "PLOTLY": _plotly(),
        "DATA": _inside_script(without_nan({**data, "areno": __version__})),
        "SCRIPT": "".join(_static(f"{name}.js") for name in _SCRIPTS),
    }
    page = _static("page.html")
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)
    return page


def _inside_script(value: Any) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).replace("<", "\\u003c")


def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ArenoError("the curves of a report need plotly; install it by pip install 'areno[report]'") from error
    return get_plotlyjs()
