"""Settings of the site. Its source folder is the repository, so that links from and to the README are checked too."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

project = "Giornata"
html_title = "Giornata"
project_copyright = "the Giornata authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/adr/*.md", "docs/results/*.md"]
include_patterns += [f"deploy/model/{name}/README.md" for name in ("fresco", "adapters", "sinopia")]
exclude_patterns = [".*", "out", "services", "shared", "tests"]  # folders without pages, not walked through
myst_heading_anchors = 3

html_theme = "furo"
html_show_sphinx = False
html_copy_source = False


RECORDS = ("docs/adr/", "CHANGELOG")
"""Pages about what was decided and changed. A search finds those about what to do, and these name the same words."""
FRONT = """<!doctype html>
<meta charset="utf-8">
<title>Giornata</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">Giornata</a>
"""


def read_index(_: Sphinx, _page: str, source: list[str]) -> None:
    """Let pages name the words of the search that lead to a section, out of readers' sight."""
    source[0] = re.sub(r"<!-- index: (.*?) -->", r"```{index} \1\n```", source[0])


def hide_records(_: Sphinx, env: BuildEnvironment) -> None:
    """Leave the records out of the search index."""
    for page in env.all_docs:
        if page.startswith(RECORDS):
            env.metadata[page]["nosearch"] = True


def write_front(app: Sphinx, error: Exception | None) -> None:
    """Write the page at the site's root, from which a browser goes on to the index."""
    if error is None:
        Path(app.outdir, "index.html").write_text(FRONT, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Add these to what Sphinx does."""
    app.connect("source-read", read_index)
    app.connect("env-updated", hide_records)
    app.connect("build-finished", write_front)
