"""Pages in HTML and Markdown: Jinja2 templates beside the code that fills them, whose values are escaped unless they are markup already."""

from __future__ import annotations

import re
from functools import cache

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from zoo.errors import printable
from zoo.types import JsonMapping, JsonObject

# Letters that mean something to a renderer of Markdown: those that a backslash makes plain everywhere, and further ones.
_MARKS = re.compile(r"[\\`*{}\[\]#]|(?<![^\W_])_|_(?![^\W_])|^[-+=]")
_FURTHER = re.compile(r"[|~$@]|:(?=//)|(?<=www)\.|(?<=^\d)\.(?= |$)", re.IGNORECASE)


class Markdown(str):
    """Text that is Markdown already: templates take it as it is."""


_BLOCKS: JsonObject = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}


@cache
def _html(package: str) -> Environment:
    return Environment(loader=PackageLoader(package, "."), autoescape=True, **_BLOCKS)


@cache
def _markdown(package: str) -> Environment:
    loader = PackageLoader(package, ".")
    environment = Environment(loader=loader, finalize=escape_markdown, keep_trailing_newline=True, **_BLOCKS)
    environment.filters.update(code=code, fenced=fenced, front_matter=front_matter)
    return environment


def render(package: str, template: str, **values: object) -> Markup:
    """The HTML template of that name in a package's folder, filled with `values`.

    Every value is escaped, in attributes too, so a template must quote its attributes. What this returns is `Markup`:
    another template takes it as it is.
    """
    return Markup(_html(package).get_template(template).render(**values))


def render_markdown(package: str, template: str, **values: object) -> Markdown:
    """The Markdown template of that name, filled with `values`: each becomes text of one line, also in a table or a heading.

    Its filters write what is no plain text: `front_matter` (a mapping), `fenced` (lines of code) and `code` (a few words of it).
    """
    return Markdown(_markdown(package).get_template(template).render(**values))


def escape_markdown(value: object) -> Markdown:
    """The value as text of one line, which renderers of Markdown show as it is; `Markdown` stays as it is."""
    if isinstance(value, Markdown):
        return value
    marked = _MARKS.sub(r"\\\g<0>", printable(str(value)).strip())
    return Markdown(_FURTHER.sub(lambda match: f"&#{ord(match[0])};", str(escape(marked))))


def front_matter(values: JsonMapping) -> Markdown:
    """The YAML at the top of a page, which says what the page is about."""
    return Markdown(f"---\n{yaml.safe_dump(dict(values), sort_keys=False)}---")


def fenced(lines: str, language: str) -> Markdown:
    """A block of code, between fences that are longer than any within it."""
    fence = "`" * max(3, 1 + _longest_fence(lines))
    return Markdown(f"{fence}{language}\n{lines}\n{fence}")


def code(words: object) -> Markdown:
    """Code within a line, but not within a table, which would split it."""
    text = printable(str(words))
    fence = "`" * (1 + _longest_fence(text))
    space = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return Markdown(f"{fence}{space}{text}{space}{fence}")


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
