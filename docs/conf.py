"""Settings of the site. Its source folder is the repository, so that links from and to the README are checked too."""

project = "Giornata"
html_title = "Giornata"
project_copyright = "the Giornata authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/adr/*.md"]
include_patterns += [f"deploy/model/{name}/README.md" for name in ("fresco", "adapters", "sinopia")]
exclude_patterns = [".*", "out", "services", "shared", "tests"]  # folders without pages, not walked through
myst_heading_anchors = 3

html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
