"""Tests in a real browser: pages, the chat page of lab serve, axe-core. A plugin of conftest.py.

apt-get install chromium            # or any Chrome or Chromium on the PATH
python -m pip install -r requirements-browser.txt
python -m pytest -m slow tests/test_browser_*.py
"""

import os
import shutil
from pathlib import Path

import pytest
from server import Server, endless

LAPTOP = Path(__file__).resolve().parent.parent / "examples/laptop_model"
CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# a text that would run scripts or clear a terminal if it were not escaped
EVIL = '<img src=x onerror=alert(1)></script><script>alert("é")</script>\x1b[2J\x00\x07\u202e{{ about }}'


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs requirements-browser.txt")
    path = next(filter(None, map(shutil.which, CHROMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(CHROMES)} is on the PATH")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # the sandbox refuses to run as root
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


class Tab:
    """A page in a browser; `wrong` collects its errors, dialogs and requests to other servers."""

    def __init__(self, browser, address, may_ask="no server", **how):
        self.page = browser.new_context(**how).new_page()
        self.wrong = wrong = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
        self.page.on("pageerror", lambda error: wrong.append(str(error)))
        self.page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
        known = (may_ask, "file:", "data:", "blob:")
        self.page.on("request", lambda r: r.url.startswith(known) or wrong.append(r.url))
        self.page.goto(address)


def axe_findings(page):
    """[(rule, element), ...] that axe-core finds in the page as it is now."""
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs requirements-browser.txt"
    )
    found = module.Axe().run(page).response["violations"]
    return [(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]]


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory):
    """lab serve with a small random model."""
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    from models import noisy_gpt  # here, because it imports conftest.py

    server = Server(tmp_path_factory.mktemp("serve"), endless(noisy_gpt(block_size=256)))
    yield server
    server.process.kill()


class ChatPage(Tab):
    """The page of lab serve, in its own tab."""

    def __init__(self, browser, server, **how):
        super().__init__(browser, server.url, may_ask=server.url, **how)

    def set(self, **numbers):
        for id, value in numbers.items():
            change = "one.dispatchEvent(new Event('input', { bubbles: true }))"
            one = self.page.locator(f"#{id}")
            one.evaluate(f"(one, value) => {{ one.value = value; {change}; }}", str(value))

    def write(self, prompt):
        self.page.fill("#prompt", prompt)
        self.page.click("#go")

    def mode(self, name):
        """Choose "text" or "chat"."""
        self.page.click(f"#mode button[data-value={name}]")

    def view(self, name):
        """Choose "colors", "numbers" or "attention"."""
        self.page.click(f"#view button[data-value={name}]")

    def box(self, selector):
        """Position and size of an element: x, y, width, height in CSS pixels."""
        return self.page.locator(selector).bounding_box()

    def count(self):
        """Number of branches."""
        return int(self.page.text_content("#count"))

    def messages(self):
        """The user's messages of the chat."""
        return self.page.locator(".turn.user .text").all_text_contents()

    def tokens(self):
        return self.page.locator("#out .tokens > .t:not(.next)")

    def texts(self, where="#out .tokens > .t:not(.next) > span:first-child"):
        return self.page.locator(where).all_text_contents()

    def done(self):
        self.page.wait_for_selector("#go", state="visible")
        return self.texts()

    def grows(self, n):
        """Wait until more than n tokens are shown."""
        self.page.wait_for_function(f"() => document.querySelectorAll('#out .t').length > {n}")

    def keys(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self, what="className"):
        return self.page.evaluate(f"document.activeElement.{what}")

    def tab_to(self, selector):
        """Press Tab until an element that matches has the focus. Returns the number of presses."""
        for count in range(1, 30):
            self.keys("Tab")
            if self.focused(f"matches({selector!r})"):
                return count
        raise AssertionError(f"Tab does not lead to {selector}")


@pytest.fixture
def tab(chromium, chat_server):
    """The chat page in a new tab; the test fails if its console has an error."""
    tab = ChatPage(chromium, chat_server, viewport={"width": 1000, "height": 800})
    yield tab
    assert tab.wrong == []
    tab.page.context.close()


@pytest.fixture(scope="session")
def laptop(tmp_path_factory):
    """The page of the example model, written by lab export --html."""
    from lab.hf.export import export  # here, because conftest.py sets the path to lab

    out = tmp_path_factory.mktemp("page") / "laptop.html"
    export(str(LAPTOP), html=out)
    return out


class ModelPage(Tab):
    """An exported page. js: evaluate an expression with the page's own functions."""

    def __init__(self, browser, path, **how):
        super().__init__(browser, path.as_uri(), **how)
        self.shown = self.page.locator("#tokens > span")

    def js(self, expression, value=None):
        return self.page.evaluate(f"(value) => {expression}", value)

    def set(self, **numbers):
        for id, value in numbers.items():
            self.js(f"document.getElementById('{id}').value = value", str(value))

    def write(self, prompt):
        self.page.fill("#prompt", prompt)
        self.page.click("#go")
        return self.done()

    def done(self):
        """Wait until all tokens are written; returns their ids."""
        self.page.wait_for_function("() => p.length == idx.length && idx.length >= goal")
        return self.js("idx")
