"""Measure how fast a page of `lab export --html` generates text in a headless Chromium.

    python bench/html_model.py          # examples/laptop_model.html, or name another page

Prints the tokens per second of five rounds, and their median. Needs requirements-browser.txt and a Chrome
or Chromium on the PATH.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright
from records import ROOT
from tyro.conf import Positional

from lab.cli import UserError, parse_args, run_main

# a round continues the prompt until after the context window has slid; returns tokens per second
ROUND = """tokens => {
  const start = performance.now();
  for (const _ of generate(model, idx, tokens, { temperature: 1 }));
  return 1000 * tokens / (performance.now() - start);
}"""


@dataclass
class Config:
    """Measure how fast a page of `lab export --html` generates text."""

    page: Positional[Path] = ROOT / "examples/laptop_model.html"
    tokens: int = 1000  # generated in a round
    rounds: int = 5


def launch_chromium(playwright):
    """A headless browser. Raises UserError if none is installed."""
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    path = next(filter(None, map(shutil.which, names)), None)
    if not path:
        raise UserError(
            f"there is no Chrome or Chromium ({', '.join(names)}) on the PATH; install one"
        )
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def main(argv):
    cfg = parse_args(Config, argv)
    if not cfg.page.is_file():
        raise UserError(f"there is no file {cfg.page}; write one with `lab export --html`")
    with sync_playwright() as p:
        browser = launch_chromium(p)
        page = browser.new_page()
        page.goto(cfg.page.absolute().as_uri())
        speeds = [page.evaluate(ROUND, cfg.tokens) for _ in range(cfg.rounds)]
        print(
            f"tokens/s in Chromium {browser.version}: {', '.join(f'{s:.0f}' for s in speeds)}; ",
            end="",
        )
        print(f"median {median(speeds):.0f}")
        browser.close()


if __name__ == "__main__":
    run_main(main)
