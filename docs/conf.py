"""The settings of the site for Sphinx, as bin/docs runs it: the root of the checkout is the source folder."""

project = "mpizero"
copyright = author = "the authors of mpizero"  # noqa: A001  (Sphinx' name)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# README, CONTRIBUTING and hpc/README are pages too, which is why the root of the checkout is the source folder: links
# between pages, and from pages to programs, are then the ones that a reader of the files follows.
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGES.md",
    "docs/**.md",
    "hpc/README.md",
    "newsfragments/README.md",
    "benchmarks/results/*.md",
]

myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page of results begins below its title

html_theme = "furo"
html_title = "mpizero"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
templates_path: list[str] = []
html_static_path = ["_static"]
html_css_files = ["tables.css"]

# Docstrings name things in single backticks, and are of Google's shape.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
