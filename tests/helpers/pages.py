"""The pages of the documentation as their reader sees them: blocks of code, the code within lines, and their marks.

A block is run by a test unless a comment right before it, which does not show, says something else:

- `<!-- not run: REASON -->`: nobody runs it;
- `<!-- parsed: REASON -->`: nothing is started, and the parsers of its programs take every argument;
- `<!-- run: HOW -->`: it is run with something in the place of what is not there;
- `<!-- run in tests/FILE: HOW -->`: that file runs it, and takes the commands from the page.

`A` for `B` in HOW, with the backticks, is done to the text: smaller sizes, fewer ranks.
"""

import ast
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SHELL = {"sh", "bash"}
SHOWN = {"text", "json", "{toctree}", "{eval-rst}"}
"""What is shown and not run: output, drawings, files; and what makes pages of the site."""
MARK = re.compile(r"<!-- (not run|parsed|run(?: in (tests/[\w/]+\.py))?): (.+?) -->", re.DOTALL)
MEANT = re.compile(r"\b(run|parsed)\b")
"""A comment with such a word means to be a mark."""
INSTEAD = re.compile(r"`([^`]+)` for `([^`]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code on a page."""

    page: str
    """Its path from the root."""
    line: int
    language: str
    """`python`, one of SHELL or of SHOWN. A block that is indented is `sh`."""
    text: str
    kind: str
    """`run`, `parsed` or `not run`."""
    file: str
    """The file of tests that runs it, "" where test_docs.py does."""
    reason: str
    """Why it is not run, or how; "" where there is nothing to say."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def typed(self) -> str:
        """The text as a test runs it, with what its mark says is put in the place of something else."""
        text = self.text
        for new, old in INSTEAD.findall(self.reason):
            assert old in text, f"{self}: there is no `{old}` to put `{new}` in the place of"
            text = text.replace(old, new)
        return text


def pages():
    """Return the paths, from the root, of the pages whose code is tested: what was decided once may be gone now."""
    names = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
    return [*names, *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("hpc/*.md")))]


@cache
def _tokens(page):
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def blocks(page):
    """Return the page's blocks, in their order."""
    found, mark = [], None
    for token in _tokens(page):
        if token.type == "html_block":
            mark = MARK.search(token.content)
            continue
        if token.type in {"fence", "code_block"}:
            kind, file, reason = mark.groups() if mark else ("run", "", "")
            found.append(
                Block(
                    page=page,
                    line=token.map[0] + 1,
                    language=token.info.strip() if token.type == "fence" else "sh",
                    text=token.content,
                    kind=kind.partition(" in ")[0],
                    file=file or "",
                    reason=" ".join(reason.split()),
                )
            )
        mark = None
    return found


def marks(page):
    """Return the comments of the page that mean to be marks, well written or not."""
    return [token.content for token in _tokens(page) if token.type == "html_block" and MEANT.search(token.content)]


def inline(page):
    """Return the code within the page's lines and tables, as (line, text)."""
    found = []
    for token in _tokens(page):
        if token.type == "inline":
            line = token.map[0] + 1 if token.map else 0
            found += [(line, child.content) for child in token.children if child.type == "code_inline"]
    return found


def all_blocks():
    """Return the blocks of all pages."""
    return [block for page in pages() for block in blocks(page)]


def python_blocks():
    """Return the blocks of Python that are run, of all pages."""
    return [block for block in all_blocks() if block.language == "python" and block.kind == "run"]


def shell_blocks(kind="run", file=""):
    """Return the blocks of commands of a kind that are left to a file of tests, "" for test_docs.py."""
    return [block for block in all_blocks() if block.language in SHELL and (block.kind, block.file) == (kind, file)]


def typed_lines(block):
    """Return a block's commands as they are typed, a line each, without comments."""
    found = (re.sub(r"(^|\s+)#\s.*", "", line).strip() for line in block.typed.replace("\\\n", " ").splitlines())
    return [" ".join(line.split()) for line in found if line]


class Left:
    """The commands that pages leave to one file of tests; tests/cli/test_docs.py sees that it takes all of them."""

    def __init__(self, file):
        """Find them.

        Args:
            file: its path from the root.
        """
        self._blocks = shell_blocks(file=file)
        self.lines = {line for block in self._blocks for line in typed_lines(block)}

    def command(self, start):
        """Return the words of the one command that is this, or begins so; it may stand on several pages."""
        found = [line for line in self.lines if self.means(start, line)]
        assert len(found) == 1, f"{start} begins {sorted(found)}"
        return shlex.split(found[0])

    def means(self, start, line):
        """Return whether `command(start)` may be the line."""
        return line == start if start in self.lines else line.startswith(start)

    def script(self, page):
        """Return a page's one block as a whole."""
        (block,) = (block for block in self._blocks if block.page == page)
        return block.typed


TAKEN = re.compile(r"\bPAGES\.(command|script)\(\s*\"([^\"]+)\"\s*\)")


def not_taken(block):
    """Return the commands of a block that is left to a file of tests which the file's text does not take."""
    source = (ROOT / block.file).read_text()
    if re.search(r"\bshell_blocks\(file=", source):
        return []  # all of them, whatever there are
    taken = TAKEN.findall(source)
    if ("script", block.page) in taken:
        return []
    left, starts = Left(block.file), [start for how, start in taken if how == "command"]
    return [line for line in typed_lines(block) if not any(left.means(start, line) for start in starts)]


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
