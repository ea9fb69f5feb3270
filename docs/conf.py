"""The site: ``make site`` builds it from the pages of this folder, warnings as errors, into ``build/site``.

Pages with cells (``concepts``, ``learn``, ``notebooks``) are executed while the site is built; the blocks of the
others are run by ``parity_tests/tours/test_documentation.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import attn_bridge

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
from addresses import REPOSITORY, SITE  # noqa: E402 (found by the line above)

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cells run `attn-bridge`
# Cells run in the kernel of docs/_kernels: no progress bars, no complaint that IPython forks beside JAX.
os.environ["JUPYTER_PATH"] = str(Path(__file__).parent / "_kernels")
os.environ["MATPLOTLIBRC"] = str(Path(__file__).parent / "_kernels" / "matplotlibrc")

project = "attn-bridge"
author = "The attn-bridge maintainers"
copyright = "the attn-bridge maintainers, Apache-2.0"
release = version = attn_bridge.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "notebook_badges",
    "repository_links",
]
exclude_patterns = ["_*"]
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # generated pages begin sections at the third level

nb_execution_mode = os.environ.get("SITE_EXECUTE", "force")
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "warn"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True

html_theme = "sphinx_book_theme"
html_baseurl = SITE + "/"
html_title = "attn-bridge"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_domain_indices = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_persistent": [],
    "repository_url": REPOSITORY,
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_download_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
linkcheck_ignore = [REPOSITORY, SITE]  # not there before the first release
