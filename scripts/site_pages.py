"""A hook of mkdocs that brings pages from all over the repository into the site, and the files that they link to.

Pages link to one another, and to code and tests, by paths in the repository, so that they read well in an editor and on a
forge. On the site, the README is the home page, a family's README stands under `families/`, and a source file that a page
links to becomes a page under `source/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    **{
        f"models/{path.parent.name}/README.md": f"families/{path.parent.name}.md"
        for path in ROOT.glob("models/*/README.md")
    },
}  # path in the repository -> page of the site; pages of docs/ keep their names
ORIGINS = {page: path for path, page in PAGES.items()}

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def origin(page: str) -> str:
    """Path in the repository of a page of the site."""
    return ORIGINS.get(page) or (page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}")


def target(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if (ROOT / path / "README.md").is_file():
        path = posixpath.normpath(f"{path}/README.md")
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and Path(path).suffix in (".md", ".png", ".svg"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def linked(text: str, path: str) -> Iterator[str]:
    """Paths in the repository that the page at `path` links to."""
    for piece in FENCE.split(text)[::2]:
        for match in LINK.finditer(piece):
            file = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
            if "://" not in match[1] and (ROOT / file).exists():
                yield file


def rewritten(text: str, path: str, page: str) -> str:
    """The text of the file `path` with its links as the site's `page` needs them; a link to nothing stays for mkdocs to report."""

    def link(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if "://" in match[1] or not (ROOT / file).exists():
            return match[0]
        return f"]({posixpath.relpath(target(file), posixpath.dirname(page) or '.')}{match[2] or ''})"

    pieces = FENCE.split(text)
    pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)


def content(path: str) -> str:
    """The page that shows a file or folder of the repository."""
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text()
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if not entry.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    kind = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}.get(file.suffix, "text")
    return f"# {path}\n\n`````{kind}\n{file.read_text()}\n`````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of PAGES, and every file that a page links to, to what mkdocs found in docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        page, text = target(path), content(path)
        if files.get_file_from_path(page) is None:
            level = InclusionLevel.INCLUDED if path in PAGES else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page, content=text, inclusion=level))
        for file in linked(text, path) if path.endswith(".md") else ():
            if file not in seen and target(file).endswith(".md"):
                seen.add(file)
                waiting.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links by paths in the repository become links of the site."""
    path = origin(page.file.src_uri)
    return (
        rewritten(markdown, path, page.file.src_uri) if (ROOT / path).is_file() and path.endswith(".md") else markdown
    )
