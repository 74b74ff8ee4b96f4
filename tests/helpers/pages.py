"""The pages of the documentation as their reader sees them: blocks of code, the code within lines, and their marks.

A block is run by a test unless a comment right before it says `<!-- not run: REASON -->`; the comment does not show.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SHELL = {"sh", "bash"}
SHOWN = {"text", "json", "{toctree}", "{eval-rst}"}
"""What is shown and not run: output, drawings, files; and what makes pages of the site."""
MARK = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code on a page."""

    page: str
    """Its path from the root."""
    line: int
    language: str
    """`python`, one of SHELL or of SHOWN. A block that is indented is `sh`."""
    text: str
    reason: str
    """Why it is not run; empty where it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages():
    """Return the paths, from the root, of the pages whose code is tested: what was decided once may be gone now."""
    names = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
    return [*names, *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("hpc/*.md")))]


@cache
def _tokens(page):
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def blocks(page):
    """Return the page's blocks, in their order."""
    found, mark = [], ""
    for token in _tokens(page):
        if token.type == "html_block":
            match = MARK.search(token.content)
            mark = " ".join(match.group(1).split()) if match else ""
            continue
        if token.type in {"fence", "code_block"}:
            language = token.info.strip() if token.type == "fence" else "sh"
            line = token.map[0] + 1
            found.append(Block(page=page, line=line, language=language, text=token.content, reason=mark))
        mark = ""
    return found


def marks(page):
    """Return the comments of the page that mean to be marks, well written or not."""
    return [token.content for token in _tokens(page) if token.type == "html_block" and "not run" in token.content]


def inline(page):
    """Return the code within the page's lines and tables, as (line, text)."""
    found = []
    for token in _tokens(page):
        if token.type == "inline":
            line = token.map[0] + 1 if token.map else 0
            found += [(line, child.content) for child in token.children if child.type == "code_inline"]
    return found


def python_blocks():
    """Return the blocks of Python that are run, of all pages."""
    return [block for page in pages() for block in blocks(page) if block.language == "python" and not block.reason]


def shell_blocks():
    """Return the blocks of commands that are run, of all pages."""
    return [block for page in pages() for block in blocks(page) if block.language in SHELL and not block.reason]


def calls(text):
    """Yield (name, keywords) of each call of `mz.name(...)` in code; nothing where it is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func)).startswith("mz."):
            yield name.removeprefix("mz."), [word.arg for word in node.keywords if word.arg]


def _dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"
