import functools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project, author, copyright = (
    "instruct_goose",
    "The instruct_goose developers",
    "The instruct_goose developers",
)
extensions = ["myst_nb", "sphinx.ext.viewcode", "sphinx_copybutton", "typeset", "find"]
source_suffix = {".ipynb": "myst-nb", ".md": "myst-nb"}
html_math_renderer = "built"

myst_enable_extensions = [
    "dollarmath",
    "colon_fence",
    "deflist",
    "fieldlist",
    "attrs_inline",
    "attrs_block",
]
myst_heading_anchors = 3
myst_html_meta = {
    "description": "PPO and RLHF by running it: notebooks that define every step, and the library they export"
}
myst_dmath_double_inline = True
nb_execution_mode = "off"  # the outputs are those that nbdev-test --save stored
nb_render_markdown_format = "myst"
nb_merge_streams = True
nb_ipywidgets_js = {}  # nothing is fetched
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

add_module_names = False
maximum_signature_line_length = 72
toc_object_entries = False
viewcode_line_numbers = False
viewcode_follow_imported_members = (
    False  # an entry stands where its name is defined; to look, every module would be imported
)
math_number_all = False
numfig = False

pygments_dark_style = "github-dark"
html_theme = "furo"
templates_path = [str(Path(__file__).parent / "_templates")]
html_additional_pages = {"search": "search.html"}
html_sidebars = {
    "**": [
        f"sidebar/{part}.html" for part in ("search", "scroll-start", "navigation", "scroll-end")
    ]
}
html_title = "instruct_goose"
version = release = re.search(
    r'__version__ = "([^"]+)"',
    (Path(__file__).parents[1] / "instruct_goose/__init__.py").read_text("utf-8"),
)[1]
copyright += f" · version {version}"
html_static_path = [
    str(Path(__file__).parent / "_static"),
    str(Path(__file__).parent / "_build/static"),
]
html_css_files = ["goose.css"]
html_js_files = [("figures.js", {"defer": "defer"}), ("course.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_extra_path = [str(Path(__file__).parent / "_build/extra")]
html_favicon = "_static/goose.svg"
COLOURS = {  # of what: on a light page, on a dark one
    "brand-primary": ("#1f4f9e", "#8fb3f5"),
    "brand-content": ("#1f4f9e", "#8fb3f5"),
    "brand-visited": ("#5b3f8f", "#bda4e8"),
    "api-name": ("#1f4f9e", "#8fb3f5"),
    "api-pre-name": ("#5a5c63", "#a3a6ab"),
    "background-primary": ("#fdfcf9", "#16181c"),
    "background-secondary": ("#f6f4ee", "#1d2025"),
    "background-hover": ("#efece3", "#24282e"),
    "background-hover--transparent": ("#efece300", "#24282e00"),
    "background-border": ("#e2ded3", "#33373e"),
    "foreground-primary": ("#1c1e22", "#dcdcd8"),
    "foreground-secondary": ("#53565c", "#a9acb1"),
    "foreground-muted": ("#65686e", "#94979d"),
    "foreground-border": ("#8b8c8e", "#6d7077"),
    "code-background": ("#f6f4ee", "#1d2025"),
    "inline-code-background": ("#f3f0e8", "#22262b"),
    "highlight-on-target": ("#fbf0c4", "#3b3413"),
}
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
        "color-sidebar-link-text--top-level": "var(--color-foreground-secondary)",
        "color-sidebar-background": "transparent",
        "color-sidebar-search-background": "transparent",
        "color-toc-background": "transparent",
        **{f"color-{name}": light for name, (light, _) in COLOURS.items()},
    },
    "dark_css_variables": {f"color-{name}": dark for name, (_, dark) in COLOURS.items()},
}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


@functools.cache  # asked once for each name on a page, and a third of the build when worked out each time
def source_of(module):
    "A module's text and where its definitions are, without importing it; methods that are added to a class under its name."
    import ast

    from lessons import ROOT, patched
    from sphinx.pycode import ModuleAnalyzer

    text = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")
    analyzer = ModuleAnalyzer.for_string(text, module)
    analyzer.find_tags()
    tree = ast.parse(text).body
    classes = {node.name for node in tree if isinstance(node, ast.ClassDef)}
    for node in tree:
        if owner := patched(
            node
        ):  # of another module's class: its entry stands there, where this text is not
            tag = analyzer.tags.pop(node.name)
            if owner in classes:
                analyzer.tags[f"{owner}.{node.name}"] = tag
    return text, analyzer.tags


def navigation(app, page, template, context, doctree):
    "The list at the side and the ways on are those of shelves.py, and not of Sphinx's tree of pages."
    from shelves import neighbours, up

    context["toctree"] = lambda **options: ""
    for way, lesson in zip(("prev", "next"), neighbours(page)):
        context[way] = (
            {"link": f"{up(page, lesson.url)}.html", "title": f"{lesson.number} · {lesson.title}"}
            if lesson
            else None
        )


def beside(app, page, template, context, doctree):
    from shelves import sidebar

    context["furo_navigation_tree"] = sidebar(page)


def setup(app):
    app.connect("viewcode-find-source", lambda app, module: source_of(module))
    app.connect(
        "html-page-context", navigation, priority=400
    )  # before the theme, which asks for the list
    app.connect("html-page-context", beside, priority=600)  # and behind it
