"""The page of results as one file: nothing is fetched, nothing is lost."""

import base64
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from schoenbat.report.html import make_html
from schoenbat.report.results_page import Files

PAGE = """# Results

Text & more, see [a file](results/error.json), [elsewhere](https://example.org/a) and [below](#speed-up).

## Speed-up

<!-- speed -->
| n | ms |
| ---: | --- |
| 1 | *2* |

![error against D](results/error.svg)
<!-- end of speed -->

```sh
schoenbat speed
```
"""


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def html(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "error.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return make_html(PAGE, tmp_path, tmp_path / "out")


def test_nothing_is_fetched(html):
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    fetched = [address for address in reader.addresses if not address.startswith(("data:", "#"))]
    assert fetched == ["../results/error.json", "https://example.org/a"]
    assert "@import" not in html
    assert "url(" not in html


def test_a_plot_is_inside(html):
    (drawn,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert base64.b64decode(drawn) == b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    assert 'alt="error against D"' in html


def test_tables_have_a_box_of_their_own_and_headings_an_entry(html):
    assert re.search(r'<div class="wide" tabindex="0">\n<table>.*</table>\n</div>', html, re.DOTALL)
    assert re.search(r'<nav>.*<a href="#speed-up">Speed-up</a>.*</nav>', html, re.DOTALL)
    assert '<h2 id="speed-up">' in html
    assert "<title>Results</title>" in html


def test_markers_and_signs_do_not_show(html):
    assert "<!--" not in html
    assert "Text &amp; more" in html
    assert "<em>2</em>" in html


def test_a_folder_may_have_any_name(tmp_path):
    results = tmp_path / "it's" / "a & b (old)"
    results.mkdir(parents=True)
    (results / "error.svg").write_text("<svg/>")
    files = Files(results, tmp_path)
    page = "\n\n".join([files.link(results / "error.json"), *files.figure(results / "error.svg", "a < b")])
    html = make_html(page, tmp_path, tmp_path / "out")
    (address,) = re.findall('href="([^"]+error.json)"', html)
    assert (tmp_path / "out" / unquote(address)).resolve() == results / "error.json"
    assert '<img alt="a &lt; b" src="data:image/svg' in html
