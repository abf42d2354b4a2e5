"""HTML pages: Jinja2 templates beside the code that fills them, whose values are escaped unless they are `Markup`."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment(package: str) -> Environment:
    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(package: str, template: str, **values: Any) -> Markup:
    """The template of that name in a package's folder, filled with `values`.

    Every value is escaped, in attributes too, so a template must quote its attributes. What this returns is `Markup`:
    another template takes it as it is.
    """
    return Markup(_environment(package).get_template(template).render(**values))
