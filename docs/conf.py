"""How Sphinx builds the site: `uv run --group docs sphinx-build -W --keep-going -q -b html docs docs/_build`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from site_of_docs import OPTIONS, VERSIONS, commands, repository, repository_links, versions, write_list

project = "RoundPipe"
author = "The RoundPipe authors"
copyright = "the RoundPipe authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
# Of names that several classes have, such as `step`, any will do.
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "RoundPipe"
html_theme_options = repository_links(repository())
# Copied without prompts, and without what a command prints.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
# Sources are beside the pages, as Markdown: `llms.txt` lists them.
html_copy_source = True
html_static_path = ["_static"]
html_css_files = ["site.css"]

# In docstrings `name` is a link where there is such an object, and code otherwise.
default_role = "py:obj"
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "groupwise"
python_maximum_signature_line_length = 100

# Links to other projects' sites need the network, so only the job that publishes asks for them.
if os.environ.get("ROUNDPIPE_DOCS_ONLINE") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }


def setup(app):
    """Lead links that work in the repository to the page that the site has for the same file."""
    app.connect("source-read", _lead_to_pages)
    app.connect("source-read", _tell_options)
    app.connect("build-finished", write_list)


def _lead_to_pages(_app, _page, source):
    source[0] = source[0].replace("](../CONTRIBUTING.md", "](contributing.md")


def _tell_options(_app, _page, source):
    for mark, make in ((OPTIONS, commands), (VERSIONS, versions)):
        if mark in source[0]:
            source[0] = source[0].replace(mark, make())
