"""The documentation site: every page in its navigation, links that lead to pages, an API reference of names that exist."""

import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import zoo

REPO = Path(__file__).parents[2]


HOOK = SimpleNamespace(**runpy.run_path(str(REPO / "scripts" / "site_pages.py")))


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


def test_every_page_stands_once_in_the_navigation() -> None:
    nav = list(leaves(yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]))
    pages = [*HOOK.PAGES.values(), *(str(p.relative_to(REPO / "docs")) for p in REPO.glob("docs/**/*.md"))]
    assert sorted(nav) == sorted(pages)
    families = {path.parent.name for path in REPO.glob("models/*/__init__.py")}
    assert families <= {Path(page).stem for page in nav}


@pytest.mark.parametrize(
    ("path", "link", "wanted"),
    [
        ("README.md", "docs/data.md#a-row", "data.md#a-row"),
        ("README.md", "docs/images/packed_rows.svg", "images/packed_rows.svg"),
        ("README.md", "LICENSE", "source/LICENSE.md"),
        ("docs/data.md", "packing.md", "packing.md"),
        ("docs/data.md", "../README.md", "index.md"),
        ("docs/data.md", "../zoo/errors.py", "source/zoo/errors.py.md"),
        ("docs/data.md", "../tests/unit", "source/tests/unit.md"),
        ("docs/data.md", "../models/llava", "families/llava.md"),
        ("models/llava/README.md", "config.py", "../source/models/llava/config.py.md"),
        ("models/llava/README.md", "../../docs/data.md", "../data.md"),
        ("docs/data.md", "https://example.org/zoo/errors.py", "https://example.org/zoo/errors.py"),
        ("docs/data.md", "nothing.md", "nothing.md"),  # mkdocs reports it
    ],
)
def test_links_are_those_of_the_site(path: str, link: str, wanted: str) -> None:
    text = "See [it]({}).\n```text\n[it]({})\n```\n"
    page = HOOK.target(path)
    assert HOOK.origin(page) == path
    assert HOOK.rewritten(text.format(link, link), path, page) == text.format(wanted, link)


def test_files_that_pages_link_to_become_pages() -> None:
    found = set(HOOK.linked((REPO / "models/qwen3_omni/README.md").read_text(), "models/qwen3_omni/README.md"))
    assert "zoo/nn/towers/audio.py" in found
    assert "def " in HOOK.content("zoo/nn/towers/audio.py")
    assert "- `test_site.py`" in HOOK.content("tests/unit")


def referenced() -> dict[str, Any]:
    """Name -> object, for all that docs/reference.md shows."""
    objects = {}
    for name in re.findall(r"^::: (\S+)$", (REPO / "docs" / "reference.md").read_text(), re.MULTILINE):
        try:
            objects[name] = importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            objects[name] = getattr(importlib.import_module(module), attribute)
    return objects


def test_the_reference_names_what_is_there_and_all_that_zoo_offers() -> None:
    objects = referenced()
    assert {f"zoo.{name}" for name in zoo.__all__ if name != "__version__"} <= objects.keys()
    for name, value in objects.items():
        assert value.__doc__, f"{name} has no docstring"


def test_docstrings_of_the_reference_name_parameters() -> None:
    """`make docs` refuses an entry under Args that is no parameter, such as two names on one line."""
    for name, value in referenced().items():
        methods = [member for _, member in inspect.getmembers(value, inspect.isfunction)]
        for function in [value, *methods] if inspect.isfunction(value) or inspect.isclass(value) else methods:
            section = re.search(r"\n *Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(function.__doc__ or ""), re.DOTALL)
            entries = re.findall(r"^    (\S.*?):", section[1], re.MULTILINE) if section else []
            assert set(entries) <= set(inspect.signature(function).parameters), f"{name}: {entries}"
