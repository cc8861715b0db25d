"""Tables and figures inside of pages that people write: what stands between two markers is a command's."""

from collections.abc import Mapping


def fill(page: str, shown: Mapping[str, str]) -> str:
    """The page with each text between its markers.

    Example:
        >>> fill("<!-- n -->\\nold\\n<!-- end of n -->", {"n": "new"})
        '<!-- n -->\\nnew\\n<!-- end of n -->'
    """
    for name, text in shown.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, has_begin, rest = page.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end):
            raise ValueError(f"the page has no place for {name!r}: it needs {begin} and {end}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page
