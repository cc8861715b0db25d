"""Look at the page of results in a real browser: ``python tests/check_report.py``.

Writes it as HTML and opens it in headless Chromium, wide and as narrow as a phone, light and dark. What it
reports, and fails on: requests that fail or leave the machine, errors on the console, links that lead
nowhere, anything wider than the page, text that cannot be told from its ground, tables that do not sort.
Needs Debian's packages chromium and chromium-driver.

    python tests/check_report.py --screenshots out/report
"""

import argparse
import base64
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from check_site import ROOT, browse, look, serve

from schoenbat.report.html import make_html
from schoenbat.report.results_page import Files, make_page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
CONTRAST = 4.5  # what WCAG asks for
# What sticks out of the window, unless it is inside of a box that scrolls.
OVERFLOW = """
const width = document.documentElement.clientWidth;
const scrolls = e => e && (getComputedStyle(e).overflowX === "auto" || scrolls(e.parentElement));
return Array.from(document.body.querySelectorAll("*"))
  .filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement))
  .map(e => `${e.tagName} ${e.textContent.trim().slice(0, 40)}`)
  .concat(document.documentElement.scrollWidth > width ? ["the page itself"] : []);
"""
# Sorts every column of every table twice and says which are not in order.
UNSORTED = """
const figure = text => parseFloat(text.replaceAll(",", "").replaceAll("−", "-").replace(/^[(<!]\\s*/, ""));
const problems = [];
for (const table of document.querySelectorAll("table")) {
  const count = table.tBodies[0].rows.length;
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    for (const sign of [-1, 1]) {
      heading.querySelector("button").click();
      const cells = Array.from(table.tBodies[0].rows, row => row.cells[column].textContent.trim());
      const figures = cells.map(figure).filter(x => !Number.isNaN(x));
      const wrong = figures.some((x, i) => i && sign * (x - figures[i - 1]) < 0);
      const gaps = cells.map(figure).findIndex(Number.isNaN);
      const said = heading.getAttribute("aria-sort") === "ascending" ? 1 : -1;
      const words = figures.length ? [] : cells;
      const otherwise = words.some((x, i) => i && said * x.localeCompare(words[i - 1]) < 0);
      const late = figures.length && gaps >= 0 && cells.slice(gaps).map(figure).some(x => !Number.isNaN(x));
      if (wrong || otherwise || late || cells.length !== count) problems.push(heading.textContent);
    }
  });
}
return [document.querySelectorAll("table").length, problems];
"""
# Contrast of every text with the ground below it.
FAINT = """
const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const colour = text => text.match(/[\\d.]+/g).map(Number);
const ground = e => {
  const own = e ? colour(getComputedStyle(e).backgroundColor) : [255, 255, 255];
  return own.length === 4 && own[3] === 0 ? ground(e.parentElement) : own;
};
return Array.from(document.body.querySelectorAll("p, li, td, th, a, code, h1, h2, em")).filter(e => {
  const [a, b] = [light(colour(getComputedStyle(e).color)), light(ground(e))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < arguments[0];
}).map(e => `${e.tagName} ${e.textContent.trim().slice(0, 40)}`);
"""


def check(
    browser: "Chrome", address: str, home: str, folder: Path, screenshots: Path | None
) -> Iterator[str]:
    """Problems, in words."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            _shape(browser, width, scheme)
            page = look(browser, address, home)
            where = f"{width} px, {scheme}"
            yield from (f"{where}: {problem}" for problem in page.problems)
            yield from (f"{where}: wider than the page: {what}" for what in browser.execute_script(OVERFLOW))
            yield from (f"{where}: faint: {what}" for what in browser.execute_script(FAINT, CONTRAST))
            if screenshots:
                _take_screenshot(browser, screenshots / f"{width}-{scheme}.png", width)
    for link in sorted(page.links):
        path, _, anchor = link.removeprefix(home).partition("#")
        if link.startswith(home) and not (folder / path).exists():
            yield f"link to nothing: {path}"
        if anchor and anchor not in page.anchors:
            yield f"no such anchor: {anchor}"
    tables, unsorted = browser.execute_script(UNSORTED)
    yield from (f"does not sort: {heading}" for heading in unsorted)
    if not tables:
        yield "there are no tables"


def _shape(browser: "Chrome", width: int, scheme: str) -> None:
    """A screen of this width, as a phone has it, and a reader who prefers this scheme."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def _take_screenshot(browser: "Chrome", path: Path, width: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True, "format": "png"}
    )
    path.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the result files")
    parser.add_argument("--screenshots", type=Path, help="write a PNG of each look into this folder")
    options = parser.parse_args()
    folder = options.results.resolve().parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".report-") as place, serve(folder) as home:
        page = Path(place) / "results.html"
        page.write_text(make_html(make_page(Files(options.results.resolve(), folder)), folder, page.parent))
        with browse() as browser:
            address = f"{home}{page.relative_to(folder).as_posix()}"
            problems = list(check(browser, address, home, folder, options.screenshots))
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(WIDTHS) * len(SCHEMES)} looks, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
