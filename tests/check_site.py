"""Look at every built page in a real browser: ``python tests/check_site.py`` after ``make docs``.

Serves site/ on this machine and opens each page in headless Chromium. What it reports, and fails on: links
and anchors that lead nowhere, images that do not load, requests that fail or leave the machine, errors on
the console. External links are counted, not followed. Needs Debian's packages chromium and chromium-driver.

    python tests/check_site.py --screenshots out/site
"""

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urlsplit

from rich.progress import track

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 1300, 1000
CHROME = 150  # pixels that a window takes beside its page
PATIENCE = 20.0  # seconds
# Links as the browser resolves them; images that are hidden count too, so none may wait to be scrolled to.
LOOK = """
for (const image of document.images) image.loading = "eager";
return {
  links: Array.from(document.querySelectorAll("a[href]"), a => a.href),
  anchors: Array.from(document.querySelectorAll("[id], a[name]"), e => e.id || e.name),
  unloaded: Array.from(document.images).filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  requested: performance.getEntriesByType("resource").map(r => r.name),
};
"""
LOADED = "return document.readyState === 'complete' && Array.from(document.images).every(i => i.complete)"


@dataclass(frozen=True)
class Page:
    """What the browser saw."""

    address: str
    links: frozenset[str]
    anchors: frozenset[str]
    problems: tuple[str, ...]


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address under which the folder is served meanwhile."""
    handler = functools.partial(_Silent, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@contextmanager
def browse() -> "Iterator[Chrome]":
    """Headless Chromium, by its own driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        sys.exit("a browser is missing; install it: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--disable-dev-shm-usage", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    if os.geteuid() == 0:  # as root, as in a container, Chromium refuses to start with its sandbox
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def look(browser: "Chrome", address: str, home: str) -> Page:
    """Open a page and wait until all of it is there."""
    browser.get(address)
    browser.execute_script(LOOK)
    if not _wait_for(browser, LOADED):
        return Page(address, frozenset(), frozenset(), ("does not finish loading",))
    seen = browser.execute_script(LOOK)
    problems = [f"image does not load: {image}" for image in seen["unloaded"]]
    problems += [
        f"leaves the machine: {request}" for request in seen["requested"] if not _is_inside(request, home)
    ]
    problems += [
        f"console: {entry['message']}"
        for entry in browser.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]
    return Page(address, frozenset(seen["links"]), frozenset(seen["anchors"]), tuple(problems))


def _is_inside(address: str, home: str) -> bool:
    return address.startswith((home, "data:", "blob:"))


def broken_links(pages: dict[str, Page], site: Path, home: str) -> Iterator[tuple[str, str]]:
    """The page and the link, for each that leads to no file or to no anchor."""
    for page in pages.values():
        for link in sorted(page.links):
            if not _is_inside(link, home):
                continue
            target, anchor = urldefrag(link)
            path = unquote(urlsplit(target).path).lstrip("/") or "index.html"
            if not (site / path).is_file():
                yield page.address, f"link to nothing: {link}"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield page.address, f"no such anchor: {link}"


def search_finds(browser: "Chrome", home: str, word: str) -> bool:
    """Whether the site's own search answers; it runs in a worker, on an index that is fetched."""
    browser.get(f"{home}?q={word}")
    return _wait_for(browser, "return document.querySelectorAll('.md-search-result__item').length > 0")


def take_screenshot(browser: "Chrome", path: Path) -> None:
    """All of a page, not only what fits a window."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.set_window_size(WIDTH, height + CHROME)
    browser.save_screenshot(str(path))
    browser.set_window_size(WIDTH, HEIGHT)


def _wait_for(browser: "Chrome", condition: str) -> bool:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        if browser.execute_script(condition):
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the built site")
    parser.add_argument("--screenshots", type=Path, help="write a PNG of each page into this folder")
    options = parser.parse_args()
    files = sorted(options.site.rglob("*.html"))
    if not files:
        sys.exit(f"there are no pages in {options.site}; build them first: make docs")
    with serve(options.site) as home, browse() as browser:
        addresses = [home + file.relative_to(options.site).as_posix() for file in files]
        pages = {}
        for address in track(addresses, "pages", transient=True):
            pages[address] = look(browser, address, home)
            if options.screenshots:
                take_screenshot(browser, options.screenshots / f"{Path(urlsplit(address).path).stem}.png")
        problems = [(page.address, problem) for page in pages.values() for problem in page.problems]
        problems += broken_links(pages, options.site, home)
        if not search_finds(browser, home, "calibrate"):
            problems.append((home, "search finds nothing for 'calibrate'"))
    for address, problem in problems:
        print(f"{urlsplit(address).path}: {problem}")
    links = {link for page in pages.values() for link in page.links}
    outside = sum(not _is_inside(link, home) for link in links)
    print(f"{len(pages)} pages, {len(links)} links ({outside} external), {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
