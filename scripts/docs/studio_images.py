"""Takes the pictures of ``docs/studio.md``: a studio over a finished run, in Chromium.

``python scripts/docs/studio_images.py outputs/demo``, after ``make demo``. Look at what it writes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROMPT = "a red triangle moving right on a white background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="of a finished demo")
    run = parser.parse_args().run

    with tempfile.TemporaryDirectory() as outputs, sync_playwright() as driver:
        command = [sys.executable, "-m", "opensora_sp.cli", "studio", str(run)]
        command += ["--outputs", outputs, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as studio:
            assert studio.stdout is not None
            address = studio.stdout.readline().strip()
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            try:
                take(browser, address)
            finally:
                browser.close()
                studio.terminate()


def take(browser: Any, address: str) -> None:
    """The three pictures: of a video with its metadata, of the run, and on a phone."""
    page = opened(browser, address, width=1100, height=800)
    for label, text in {"Seed": "1", "Prompt": PROMPT}.items():
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_role("button", name="Sample", exact=True).click()
    page.locator("[role=status]").filter(has_text="done").first.wait_for()
    page.wait_for_timeout(5000)  # until the player hides its controls
    # In the middle of the way, not where it begins anew.
    time = "document.querySelector('#shown video').currentTime"
    page.wait_for_function(f"0.4 < {time} && {time} < 0.5")
    page.screenshot(path=IMAGES / "studio.png", full_page=True)

    page.get_by_role("tab", name="Runs").click()
    page.locator(".js-plotly-plot").nth(5).wait_for()
    page.wait_for_timeout(1000)
    page.screenshot(path=IMAGES / "studio_runs.png", full_page=True)

    page = opened(browser, address, width=390, height=800)
    page.screenshot(path=IMAGES / "studio_phone.png")


def opened(browser: Any, address: str, **viewport: int) -> Page:
    page: Page = browser.new_context(viewport=viewport).new_page()
    page.set_default_timeout(300_000)
    page.goto(address)
    page.get_by_role("button", name="Sample", exact=True).wait_for()
    page.wait_for_timeout(1000)
    return page


if __name__ == "__main__":
    main()
