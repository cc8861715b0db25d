"""Tables between the markers of a page."""

import pytest

from schoenbat.report.pages import fill

PAGE = "before\n<!-- n -->{}<!-- end of n -->\nafter\n"


@pytest.mark.parametrize("old", ["\n", "\n\n", "\nold\n", "\n| old |\n\ntext\n"])
def test_what_stands_between_is_replaced_and_nothing_else(old):
    page = fill(PAGE.format(old), {"n": "new"})
    assert page == PAGE.format("\nnew\n")
    assert fill(page, {"n": "new"}) == page


@pytest.mark.parametrize(
    "page", ["", "<!-- n -->\n", "<!-- end of n -->\n<!-- n -->\n", "<!-- m -->\n<!-- end of m -->"]
)
def test_a_page_without_the_place_is_refused(page):
    with pytest.raises(ValueError, match="no place for 'n'"):
        fill(page, {"n": "new"})
