"""Configuration of the documentation site: Sphinx with MyST and numpydoc.

The source folder is the repository, so that links between its pages lead to the same place on the site and on a
code host. The pages of the API reference are written into docs/api before Sphinx reads them.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import api_pages  # noqa: E402 - found beside this file

from flwr_kd import __version__  # noqa: E402

api_pages.write(ROOT / "docs" / "api")

project, author, release = "flwr-kd", "the authors of flwr-kd", __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_nb", "mathml"]
if os.environ.get("READTHEDOCS"):
    # Links to other projects need their indexes from the network, which a build elsewhere does not use.
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.rst",
    "strategies/*/README.md",
    "apps/*/README.md",
    "notebooks/*.ipynb",
    "tests/plugin/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "benchmarks", "flwr_kd"]

myst_enable_extensions = ["smartquotes"]
myst_heading_anchors = 4
nb_execution_mode = "off"
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name the types
autodoc_default_options = {"show-inheritance": True}
# Every reference to a name of this package must lead somewhere; names of other packages have no page here.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!flwr_kd\.).*"),
    # Type variables, and private base classes.
    (r"py:.*", r"flwr_kd\.([a-z_]+\.)+([A-Za-z]+T|_\w+)"),
]


def _find_home(app, env, node, content):
    """Lead a reference to a name that is exported again to the place where it is defined."""
    home = api_pages.home_of(node["reftarget"]) if node.get("refdomain") == "py" else node["reftarget"]
    if home == node["reftarget"]:
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", home, node, content)


def setup(app):
    """Connect what this file adds to Sphinx."""
    app.connect("missing-reference", _find_home)


html_theme = "furo"
html_math_renderer = "mathml"
html_favicon = "icon.svg"
html_title = f"flwr-kd {release}"
html_copy_source = False
