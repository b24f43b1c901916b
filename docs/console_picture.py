"""Take pictures of a run on a terminal: in the middle, and at its end. Needs tmux, playwright and Chromium.

python docs/console_picture.py docs/images/console.png docs/images/console_end.png
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH, HEIGHT = 120, 40
RUN = f"{sys.executable} -m areno.recipes.gspo trial_name=first evaluator.freq_steps=20"
SOCKET = f"areno-picture-{os.getpid()}"
_NORMAL = [
    (40, 42, 54),
    (240, 90, 90),
    (126, 190, 104),
    (230, 190, 80),
    (90, 160, 235),
    (190, 120, 220),
    (86, 182, 194),
    (215, 220, 230),
]
_BRIGHT = [(110, 115, 125), *_NORMAL[1:]]
THEME = TerminalTheme((17, 20, 30), (215, 220, 230), _NORMAL, _BRIGHT)
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>{stylesheet} body {{ background: {background}; margin: 0 }}
pre {{ font: 14px/17px "DejaVu Sans Mono", monospace; padding: 14px; margin: 0; display: inline-block;
color: {foreground} }}</style><pre>{code}</pre>"""


def tmux(*words: str) -> str:
    return subprocess.run(["tmux", "-L", SOCKET, *words], check=True, capture_output=True, text=True).stdout


def screen() -> str:
    return tmux("capture-pane", "-p", "-e").rstrip()


def wait_for(pattern: str, seconds: float = 600) -> str:
    """The screen, as soon as it shows this."""
    until = time.monotonic() + seconds
    while not re.search(pattern, Text.from_ansi(shown := screen()).plain):
        if time.monotonic() > until:
            raise TimeoutError(f"no {pattern} in {shown}")
        time.sleep(0.3)
    return shown


def take(text: str, path: str) -> None:
    """Write a picture of a screen."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    page = console.export_html(theme=THEME, code_format=PAGE)
    names = ("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as started:
        chromium = next(filter(None, map(shutil.which, names)), None)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 800})
        tab.set_content(page)
        tab.locator("pre").screenshot(path=path)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("middle", help="picture of the live display")
    parser.add_argument("end", help="picture of the end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parents[1]
        command = f"PYTHONPATH={root} {RUN}; sleep 1000"
        tmux("-f", os.devnull, "new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), "-c", folder, command)
        try:
            take(wait_for(r"step 5[2-9]/100(.|\n)*samples of step"), arguments.middle)
            take(wait_for("train on:"), arguments.end)
        finally:
            tmux("kill-server")


if __name__ == "__main__":
    main()
