"""Examples in docstrings as code blocks: Markdown would take ``>>>`` for quotations."""

import re
from typing import Any

import griffe

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *\n).+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every example of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fence = r"\1```pycon\n\g<0>\n\1```"
            obj.docstring.value = EXAMPLE.sub(fence, obj.docstring.value)
