"""An extension of griffe: the comment on a field's line is its documentation, where it has no docstring."""

from __future__ import annotations

import io
import textwrap
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives attributes without a docstring the text of the comments in their lines."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every attribute that griffe reads."""
        if attr.docstring is not None or attr.lineno is None or attr.endlineno is None:
            return
        lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
        source = io.StringIO(textwrap.dedent("\n".join(lines)) + "\n")
        comments = [
            t.string.lstrip("# ") for t in tokenize.generate_tokens(source.readline) if t.type == tokenize.COMMENT
        ]
        if comments:
            attr.docstring = griffe.Docstring(" ".join(comments), parent=attr, lineno=attr.lineno)
