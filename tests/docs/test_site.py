"""The site: every link leads somewhere, every page is in the navigation, nothing is loaded from elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import areno
from areno.api import agentic

pytest.importorskip("material", reason="needs the docs extra")

ROOT = Path(__file__).parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all processes of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "site"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = tmp_path_factory.mktemp("site") / "site"
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-3000:]
            made.rename(folder)
    return folder


class Addresses(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self, page: Path):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and given.get("rel") != "canonical":
            self.loaded.append(given.get(LOADED[tag]) or "")
        elif tag == "a":
            self.links.append(given.get("href") or "")


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for address in Addresses(page).loaded:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            assert page.name == "404.html" or not address or (page.parent / address.split("?")[0]).exists(), address
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.slow
def test_the_search_works_in_pages_that_are_opened_from_a_folder(site: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium to open a page in")
    playwright, asked = pytest.importorskip("playwright.sync_api"), []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: None if request.url.startswith("file:") else asked.append(request.url))
        page.goto((site / "coming_from/trl.html").as_uri())
        page.keyboard.press("f")
        page.locator(".md-search__input").wait_for(state="visible")
        page.keyboard.type("partial rollout")
        found = page.locator(".md-search-result__item a").first
        found.wait_for()
        assert "rollout_ahead.html" in (found.get_attribute("href") or "")
        browser.close()
    assert asked == []


@pytest.mark.slow
def test_links_out_of_the_documentation_lead_to_pages_of_the_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name != "404.html":
            for address in Addresses(page).links:
                file = address.partition("#")[0]
                assert re.match(r"\w+:", file) or (page.parent / file).exists(), f"{page.name}: {address}"
    folder = site / "repository"
    assert (folder / "examples/algorithms/dro.py.html").exists()
    assert "grpo.py.html" in " ".join(Addresses(folder / "areno/loss_fns.html").links)
    assert "../../league.html#what-is-compared" in Addresses(folder / "recipes/index.html").links


@pytest.mark.slow
def test_the_search_finds_pages_and_no_code(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"troubleshooting.html", "reference/config.html", "repository/recipes/index.html"} <= places
    assert not any("/areno/" in place for place in places)


@pytest.mark.slow
def test_code_blocks_show_no_words_for_tests(site: Path) -> None:
    page = (site / "recipes.html").read_text(encoding="utf-8")
    assert '<span class="filename">letters.py</span>' in page
    assert "bash run" not in page
    assert "```" not in "".join(each.read_text(encoding="utf-8") for each in site.glob("*.html"))


@pytest.mark.slow
def test_each_public_name_is_on_the_page_of_the_sdk(site: Path) -> None:
    text = (site / "reference/sdk.html").read_text(encoding="utf-8")
    public = [areno.ArenoConfig, areno.PPOTrainer, *map(vars(areno.api).get, areno.api.__all__)]
    public += [getattr(module, name) for module in (areno, agentic) for name in module.__all__]
    for thing in public:
        assert f'id="{thing.__module__}.{thing.__name__}"' in text, thing
