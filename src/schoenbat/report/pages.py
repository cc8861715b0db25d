"""Tables and figures inside of pages that people write: what stands between two markers is a command's."""

from collections.abc import Mapping


def fill(page: str, shown: Mapping[str, str]) -> str:
    """The page with each text between its markers.

    Example:
        >>> fill("<!-- n -->\\nold\\n<!-- end of n -->", {"n": "new"})
        '<!-- n -->\\nnew\\n<!-- end of n -->'
    """
    for name, text in shown.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        if begin not in page or end not in page:
            raise ValueError(
                f"the page has no place for {name!r}: it needs {begin.strip()} and {end.strip()}"
            )
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page
