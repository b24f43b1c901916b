"""Take pictures of a report: its first screen, and its samples. Needs playwright and Chromium.

python docs/report_picture.py report.html docs/images/report.png docs/images/report_samples.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("summary", help="picture of the verdict and the first curves")
    parser.add_argument("samples", help="picture of the samples")
    arguments = parser.parse_args()
    names = ("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, names)), None), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(arguments.report.absolute().as_uri())
        for section, path in {"summary": arguments.summary, "samples": arguments.samples}.items():
            if section == "samples":  # of the first step, where the rewards of a group differ
                page.evaluate("document.getElementById('samples').scrollIntoView()")
                page.locator("#step").select_option(index=1)
                page.locator("#samples tbody tr").nth(1).click()
            page.wait_for_timeout(3000)  # until the curves are drawn
            page.screenshot(path=path)
    for path in (arguments.summary, arguments.samples):
        # 128 colours: half the size, and it looks the same.
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
