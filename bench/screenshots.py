"""Take the pictures of the report and of the chat page in readme.assets/, light and dark, with Chromium.

    python bench/screenshots.py                  # all
    python bench/screenshots.py --out FOLDER     # somewhere else

report.png is the report of readme.assets/runs/laptop_builtin.jsonl; serve.png and serve_tokens.png are the
page of `lab serve examples/laptop_model` with seed 1. Needs requirements-browser.txt, requirements-serve.txt
and a Chrome or Chromium on the PATH.
"""

import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from html_model import launch_chromium
from playwright.sync_api import sync_playwright
from records import ROOT, RUNS

from lab.cli import parse_args, run_main
from lab.tools import report

PROMPT = "The import statement"
TOKEN = "(piece, i) => i > 20 && piece.p > 0.1 && piece.p < 0.2"  # whose card is shown


@dataclass
class Config:
    """Take the pictures of the report and of the chat page, light and dark."""

    out: Path = ROOT / "readme.assets"


@contextmanager
def served(model):
    """The address of `lab serve` with this model."""
    command = [sys.executable, ROOT / "lab", "serve", model, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.terminate()


def save(page, path, **clip):
    """Write the part of the page as a PNG. clip: x, y, width and height in CSS pixels."""
    page.screenshot(path=path, clip=clip, full_page=True)
    print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")


def report_picture(page, address, out, ending):
    """The head of the report, its numbers and the loss curve."""
    page.goto(address)
    page.wait_for_selector("#loss svg .trace path")
    bottom = page.locator("#loss").evaluate("one => one.getBoundingClientRect().bottom")
    save(page, out / f"report{ending}.png", x=0, y=20, width=1280, height=bottom - 20)


def chat_pictures(page, address, out, ending):
    """A text with the card of a token, and the same text with the candidates under each token."""
    page.goto(address)
    page.evaluate("() => { $('seed').value = 1; setSettings(); }")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.wait_for_function("() => $('live').textContent.includes(' tokens: ')")
    place = page.evaluate(f"() => turns()[0].pieces.findIndex({TOKEN})")
    page.locator("#out .tokens > .t").nth(place).click()
    page.wait_for_function("() => $('sum').textContent.includes('can be drawn')")
    bottom = page.locator("#card").evaluate("one => one.getBoundingClientRect().bottom")
    save(page, out / f"serve{ending}.png", x=0, y=0, width=680, height=bottom + 12)
    page.keyboard.press("Escape")
    page.click("#view button[data-value=numbers]")
    top = page.locator("#out").evaluate("one => one.getBoundingClientRect().top + scrollY")
    save(page, out / f"serve_tokens{ending}.png", x=0, y=top - 8, width=680, height=236)


def main(argv):
    cfg = parse_args(Config, argv)
    cfg.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as p, tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "report.html"
        report.write_page([RUNS / "laptop_builtin.jsonl"], html)
        browser = launch_chromium(p)
        with served(ROOT / "examples/laptop_model") as address:
            for scheme, ending in (("light", ""), ("dark", "_dark")):
                page = browser.new_page(
                    viewport={"width": 1280, "height": 900}, color_scheme=scheme
                )
                report_picture(page, html.as_uri(), cfg.out, ending)
                page = browser.new_page(
                    viewport={"width": 680, "height": 900}, color_scheme=scheme,
                    device_scale_factor=1.5,
                )  # fmt: skip
                chat_pictures(page, address, cfg.out, ending)
        browser.close()


if __name__ == "__main__":
    run_main(main)
