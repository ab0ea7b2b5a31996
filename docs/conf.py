"""The documentation site: ``sphinx-build -W -b html docs site``.

Sphinx rather than mkdocs, because the docstrings are written for it (math, cross references), and because
myst-nb runs the notebooks as part of the build, from text that reads well in a diff.
"""

import importlib
import os
import re
from importlib import metadata

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

project = "svb_jax"
author = "The svb_jax authors"
project_copyright = "the svb_jax authors"
version = release = metadata.version("svb_jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute"]

html_theme = "furo"
html_title = "svb_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navigation_with_keys": True,
    # The blue of the figures, darker, so that text in it can be read; lighter on dark screens.
    "light_css_variables": {"color-brand-primary": "#1f4f9e", "color-brand-content": "#2a63bf"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"},
}

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Every notebook runs in every build; its outputs are never stored.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
# With the TPU's compiler installed JAX would look for TPUs, and a first cell would show that it found none.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

autodoc_typehints = "none"  # the docstrings say what an argument is; unions of array types say less
autodoc_member_order = "bysource"
# Types of fields by their name alone, not by the private module that they come from.
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Neither a build nor a reader needs the network: nothing is fetched for links to other projects, and formulas
# are MathML, which browsers show themselves, instead of a script from elsewhere.
html_math_renderer = "mathml"

# A reference that leads nowhere is an error, unless into a package whose pages are not looked up, or to one
# of two names that are not public.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|jax|optax)\..*"),
    ("py:.*", r"svb_jax\.models\.layers\.Network|FolderInUse"),
]

HIDDEN_COLON = "\N{PRIVATE USE ONE}"
PUBLIC_MODULES = ("svb_jax", "svb_jax.ahead_of_time", "svb_jax.linen", "svb_jax.models", "svb_jax.training")


def check_public_names(app: Sphinx, env: object) -> None:
    """Warn, and so fail a build with -W, of each public name that no page documents."""
    documented = set(app.env.get_domain("py").objects)  # pyright: ignore[reportAttributeAccessIssue]
    for module in PUBLIC_MODULES:
        for name in importlib.import_module(module).__all__:
            if f"{module}.{name}" not in documented:
                logging.getLogger(__name__).warning("%s.%s is public and on no API page", module, name)


def hide_colon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Hide the colon of "The network: convnet_8" from napoleon, which takes what is before it for a type."""
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(":", HIDDEN_COLON)


def show_colon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Bring hidden colons back."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def write_math(writer: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, by docutils' converter; warn of what it does not know."""
    is_block = isinstance(node, nodes.math_block)
    tag = "div" if is_block else "span"
    writer.body.append(writer.starttag(node, tag, "", CLASS="math"))
    # The converter does not know amsmath's dots, takes \frac12 for a fraction with 12 on top, and shows the
    # backslash of an underscore inside \text.
    formula = re.sub(r"\\dots\b", r"\\ldots", node.astext())
    formula = re.sub(r"(\\[dt]?frac)(\w)(\w)", r"\1{\2}{\3}", formula)
    formula = re.sub(r"(\\text\{[^}]*?)\\_", r"\1_", formula)
    try:
        writer.body.append(tex2mathml(formula, as_block=is_block))
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", error, formula, location=node)
    writer.body.append(f"</{tag}>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Check the API pages once all pages have been read, and write formulas without a script."""
    app.connect("env-check-consistency", check_public_names)
    # Napoleon's own priority is 500.
    app.connect("autodoc-process-docstring", hide_colon, priority=400)
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
