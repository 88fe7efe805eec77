"""How the site is built: ``make docs``. No page asks anything of the network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "_ext")]

from structgp import __version__  # noqa: E402

project = "structgp"
author = "The structgp developers"
copyright = "The structgp developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "command_reference", "docstrings", "mathml"]
exclude_patterns = ["_ext"]
language = "en_GB"
smartquotes = False

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"structgp {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["house.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
pygments_style = "friendly"
