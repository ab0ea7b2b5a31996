"""The documentation site: ``sphinx-build -W -b html docs site``.

Sphinx rather than mkdocs, because the docstrings are written for it (math, cross references), and because
myst-nb runs the notebooks as part of the build, from text that reads well in a diff.
"""

import importlib
from importlib import metadata

from sphinx.application import Sphinx
from sphinx.util import logging

project = "svb_jax"
author = "The svb_jax authors"
project_copyright = "the svb_jax authors"
version = release = metadata.version("svb_jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute"]

html_theme = "furo"
html_title = "svb_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Every notebook runs in every build; its outputs are never stored.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_typehints = "none"  # the docstrings say what an argument is, in words
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# A build needs no network: nothing is fetched for links to other projects.
intersphinx_mapping = {}

PUBLIC_MODULES = ("svb_jax", "svb_jax.ahead_of_time", "svb_jax.linen", "svb_jax.models", "svb_jax.training")


def check_public_names(app: Sphinx, env: object) -> None:
    """Warn, and so fail a build with -W, of each public name that no page documents."""
    documented = set(app.env.get_domain("py").objects)  # pyright: ignore[reportAttributeAccessIssue]
    for module in PUBLIC_MODULES:
        for name in importlib.import_module(module).__all__:
            if f"{module}.{name}" not in documented:
                logging.getLogger(__name__).warning("%s.%s is public and on no API page", module, name)


def setup(app: Sphinx) -> None:
    """Check the API pages once all pages have been read."""
    app.connect("env-check-consistency", check_public_names)
