"""Fits our Markdown, which is written to be read in the repository, to the site that mkdocs makes of it.

Links to files outside docs/ lead to pages that are made of these files. A page of a folder lists its files.
Code blocks lose the words that tell our tests what to do with them (`bash run`); `file=NAME` becomes a title.
Headings get the anchors that code hosts give them. Names in tables break where a reader would break them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
"""Where pages of files outside docs/ lie in the site."""
_CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=fence)$"
    r"|(?P<before>\]\()(?!\w+:)(?P<target>[^)#\s]+)(?P<after>(?:#[^)]*)?\))",
    re.M | re.S,
)
_LANGUAGES = {".py": "python", ".yaml": "yaml"}
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        source, text = waiting.pop()
        for path in (_in_repository(source, match["target"]) for match in _CODE_OR_LINK.finditer(text)):
            uri = _uri(path)
            if path.startswith("docs/") or uri in files.src_uris or not (ROOT / path).exists():
                continue  # a link to nothing is reported by mkdocs
            content = _content(path)
            files.append(File.generated(config, uri, content=content))
            waiting.append((path, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """The text of a page as mkdocs wants it."""
    here = page.file.src_uri
    source = f"docs/{here}"
    if here.startswith(f"{OUTSIDE}/"):
        source = here.removeprefix(f"{OUTSIDE}/")
        source = source if (ROOT / source).exists() else source.removesuffix(".md")

    def fitted(match: re.Match[str]) -> str:
        if match["fence"]:
            words = match["info"].split()
            title = "".join(f' title="{word[5:]}"' for word in words if word.startswith("file="))
            return f"{match['fence']}{''.join(words[:1])}{title}\n{match['code']}{match['fence']}"
        path = _in_repository(source, match["target"])
        to = path.removeprefix("docs/") if path.startswith("docs/") else _uri(path)
        return f"{match['before']}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{match['after']}"

    return _CODE_OR_LINK.sub(fitted, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Long names in tables may break after their dots and underscores, and nowhere else (site.css)."""

    def breakable(match: re.Match[str]) -> str:
        return re.sub(r"([._=])(?=\w)", r"\1<wbr>", match[0])

    return re.sub(r"<td>.*?</td>", lambda cell: re.sub(r"<code>.*?</code>", breakable, cell[0]), html, flags=re.S)


def _in_repository(source: str, target: str | None) -> str:
    """The path of a link's target from the root of the repository. source: the file with the link. None: itself."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else source


def _uri(path: str) -> str:
    """The page of the site for a file or folder outside docs/."""
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def _content(path: str) -> str:
    """Markdown for a file or a folder outside docs/."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.suffix in {".md", *_LANGUAGES})
        links = "".join(f"- [{name}]({file.name}/{name})\n" for name in names)
        return f"{_NOT_SEARCHED}# {path}\n\n{links}"
    code = f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"
    return f"{_NOT_SEARCHED}# {path}\n\n{code}"
