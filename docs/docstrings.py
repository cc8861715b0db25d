"""Docstrings as Markdown: examples become code blocks, for ``>>>`` would be a quotation."""

import re
from typing import Any

import griffe

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *\n).+)*", re.MULTILINE)
ROLE = re.compile(r":(?:func|mod|class):(?=`)")


class Docstrings(griffe.Extension):
    """Changes the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = ROLE.sub("", fenced)
