"""Sphinx's settings for ``make pdf``: those of the site, for one page to print."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf import *  # noqa: F403  # the site's settings and hooks

root_doc = "docs/site/paper/index"
include_patterns = ["docs/site/paper/index.rst", "lectures/*.ipynb"]
html_theme = "basic"
html_theme_options: dict[str, object] = {}
html_sidebars = {"**": ["contents.html"]}
templates_path = ["."]
html_static_path = ["../static"]
html_extra_path: list[str] = []
html_css_files = ["print.css"]
html_copy_source = html_use_index = html_domain_indices = False
