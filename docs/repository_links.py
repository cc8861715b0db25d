"""Links of a page to files of the repository outside docs/: the files come along with the site.

``[the file](../benchmarks/results/cpu.json)`` works in a checkout as it is; on the site it leads to a copy
under ``repository/``.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

OUTSIDE = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
PLACE = "repository"


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page links to."""
    root = Path(config.docs_dir).parent
    for page in files.documentation_pages():
        for path in OUTSIDE.findall(page.content_string):
            if not (root / path).is_file():
                raise PluginError(f"{page.src_uri} links to ../{path}, which is not there")
            name = f"{PLACE}/{path}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead such links to the copies; all pages lie directly in docs/."""
    return OUTSIDE.sub(rf"{PLACE}/\1", markdown)
