"""Chat templates of strangers under limits: of the steps that one takes, of its time, and of the characters that it makes.

transformers renders templates in a sandbox of Jinja, which gives them nothing of Python, but `'x' * 20000000000`, a text doubled forty
times or loops in loops would take all memory or all time. `limit_templates` has transformers compile templates into the same sandbox
with a count beside it: each round of a loop, call, filter and operation is a step, and each text counts with its length before it is
made. What a template writes stays the same.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sized
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zoo.errors import UserError

MOST_STEPS = 2**20  # of one rendering; a chat of 4,096 turns takes some 10**5
MOST_CHARACTERS = 2**27  # that one rendering makes on its way; the texts of a row have 4 MiB at most
MOST_SECONDS = 60.0  # of one rendering, in the time of its thread
MOST_WIDTH = 10**6  # of a number that says how wide a text is to be
MOST_NUMBER = 2**64  # that is multiplied
WIDE = re.compile(r"[%:.].{0,3}?[0-9]{7}", re.DOTALL)
WIDTH_GIVEN = {"%": re.compile(r"%[-+ #0-9.]*\*"), "{": re.compile(r"[:.][^{}]{0,9}\{")}
NUMBER = re.compile(r"[0-9]{1,6}")
CHECK_EVERY = 64  # steps between two looks at the clock
WIDTHS = frozenset(("center", "indent", "tojson", "batch", "slice", "wordwrap", "truncate", "round", "urlize"))
# Filters that take lists as lists; all others make a text of one.
OF_LISTS = frozenset((
    "list", "first", "last", "length", "count", "map", "select", "selectattr", "reject", "rejectattr", "sort", "join", "items", "dictsort",
    "batch", "slice", "unique", "groupby", "min", "max", "sum", "random", "reverse", "default", "d", "attr", "int", "float",
))  # fmt: skip

_spent = threading.local()  # what the rendering at work has taken, where one is


class TemplateLimitError(SecurityError):
    """A chat template takes too many steps or too long, or makes too long a text."""


def count(steps: int, characters: int) -> None:
    """Add to what this thread's rendering has taken.

    Raises:
        TemplateLimitError: it is over a limit.
    """
    if not getattr(_spent, "open", False):
        return
    _spent.steps += steps
    _spent.characters += characters
    if _spent.steps > MOST_STEPS or _spent.characters > MOST_CHARACTERS:
        raise TemplateLimitError(
            f"the chat template takes over {MOST_STEPS:,} steps or makes over {MOST_CHARACTERS:,} characters; use another one, "
            "or cut the row"
        )
    if not _spent.steps % CHECK_EVERY and time.thread_time() - _spent.begin > MOST_SECONDS:
        raise TemplateLimitError(f"the chat template takes over {MOST_SECONDS:g} s; use another one, or cut the row")


def _counted[T](value: T) -> T:
    """Count the length of an expression's value towards the limits, and return the value."""
    count(1, len(value) if isinstance(value, Sized) else 1)
    return value


def _size(value: object) -> int:
    """Characters of a value as a text, at least."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        items: Iterable[object] = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return 1
    size = 0
    for item in items:
        inner = _size(item)
        count(1, inner)
        size += inner
    return size


@pass_context
def _output[T](context: Context, value: T) -> T:
    """A value that is written, its length counted. As it takes the context, nothing is written while a template is compiled."""
    count(1, _size(value))
    return value


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a count of steps and characters."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, optimized=False, **options)
        self.extend(count=count, joined=_joined)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The operation, where its result is as long as a text may be."""
        if operator == "*":
            pairs = [(a, b) for a, b in ((left, right), (right, left)) if isinstance(a, Sized) and isinstance(b, int)]
            count(1, max((len(text) * max(times, 0) for text, times in pairs), default=0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            count(1, len(left) + len(right))
        if operator in ("*", "**"):
            large = any(isinstance(value, int) and abs(value) > MOST_NUMBER for value in (left, right))
            sized = isinstance(left, Sized) or isinstance(right, Sized)
            if (large and not sized) or (operator == "**" and isinstance(right, int) and abs(right) > 64):
                raise TemplateLimitError("the chat template computes too large a number")
        return _counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The call, where no argument asks for too long a text."""
        if __obj is count or __obj is _joined:
            return __obj(*args)
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str | bytes | int):
            args = (list(args[0]), *args[1:]) if name == "join" and args else args
            _check_method(text, name, [*args, *kwargs.values()])
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a text, in the sandbox's form."""
        form = super().wrap_str_format(value)
        if form is None:
            return None
        text, inner = value.__self__, form

        @wraps(inner)
        def limited(*args: Any, **kwargs: Any) -> str:
            _check_format(text, "{", [*args, *kwargs.values()])
            return inner(*args, **kwargs)

        return limited

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """Compile, with a step in each round of a loop and each call of a macro, which count what they write."""
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body = [_called("count", [nodes.Const(1), nodes.Const(written)], True), *node.body]  # type: ignore[attr-defined]
        for parent in list(source.find_all(nodes.Node)):
            for name, value in list(parent.iter_fields()):
                if isinstance(value, list):
                    setattr(parent, name, [_limited_join(node) for node in value])
                else:
                    setattr(parent, name, _limited_join(value))
        return super()._generate(source, *args, **kwargs)


def _limited_join(node: object) -> object:
    """`a ~ b` as a call that counts them before."""
    return _called("joined", node.nodes) if isinstance(node, nodes.Concat) else node


def _called(name: str, arguments: list[nodes.Expr], is_statement: bool = False) -> nodes.Node:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    return nodes.ExprStmt(call) if is_statement else call


def _joined(*values: object) -> str:
    """Texts one after the other."""
    count(1, sum(map(_size, values)))
    return "".join(map(str, values))


def _check_method(text: str | bytes | int, name: str, values: list[Any]) -> None:
    """Refuse a call that makes too long a text."""
    _check_widths(values)
    if isinstance(text, int):
        return
    if name == "replace" and len(values) > 1:
        _check_replaced(text, values[0], values[1])
    elif name == "join" and values:
        count(1, len(text) * len(values[0]) + _size(values[0]))
    elif name == "expandtabs":
        count(1, len(text) * max([8, *(value for value in values if isinstance(value, int))]))
    elif name == "translate":
        raise TemplateLimitError("the chat template calls translate, which has no limit here")


def _check_widths(values: list[object]) -> None:
    if any(isinstance(value, int) and abs(value) > MOST_WIDTH for value in values):
        raise TemplateLimitError(f"the chat template asks for a width or number over {MOST_WIDTH:,}")


def _check_replaced(text: str | bytes, old: object, new: object) -> None:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        times = text.count(old) if old else len(text) + 1  # type: ignore[arg-type]
        count(1, times * len(new))


def _check_format(form: str, mark: str, values: object) -> None:
    """Refuse a format that makes too long a text, or whose widths have over six digits or are arguments."""
    if WIDE.search(form) or WIDTH_GIVEN[mark].search(form):
        raise TemplateLimitError(
            "the chat template formats with a width of over six digits, or one that is an argument"
        )
    widths = sum(map(int, NUMBER.findall(form)))
    count(1, len(form) + widths + form.count(mark) * _size(values))


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose text is counted."""
    passed = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        filter_arguments = list(args[passed:])
        if filter_arguments and name == "join" and not isinstance(filter_arguments[0], Sized):
            filter_arguments[0] = list(filter_arguments[0])
        value, further = (filter_arguments[0] if filter_arguments else None), [*filter_arguments[1:], *kwargs.values()]
        size = 0 if name in OF_LISTS and name != "join" else _size(value)
        if name in WIDTHS:
            _check_widths(further)
            widest = max(
                [
                    1,
                    *(extra for extra in further if isinstance(extra, int)),
                    *(len(extra) for extra in further if isinstance(extra, str)),
                ]
            )
            if name in ("indent", "wordwrap", "tojson"):
                count(1, size * widest)
        elif name == "replace" and len(further) > 1:
            _check_replaced(str(value), str(further[0]), str(further[1]))
        elif name == "format":
            _check_format(str(value), "%", further)
        elif name == "join" and isinstance(value, Sized):
            count(1, size + len(value) * max([0, *(len(extra) for extra in further if isinstance(extra, str))]))
        return _counted(function(*args[:passed], *filter_arguments, **kwargs))

    return limited


def _limited(environment: Environment, source: str) -> Template:
    """A template in a sandbox with the settings, filters and globals of `environment`, under limits."""
    limited = LimitedEnvironment(
        trim_blocks=environment.trim_blocks,
        lstrip_blocks=environment.lstrip_blocks,
        keep_trailing_newline=environment.keep_trailing_newline,
        extensions=[type(extension) for extension in environment.extensions.values()],
    )
    limited.globals.update(environment.globals)
    del limited.globals["lipsum"]  # words without a limit
    limited.filters = {name: _limited_filter(name, function) for name, function in environment.filters.items()}
    limited.tests.update(environment.tests)
    template = limited.from_string(source)
    render = template.render

    def counted(*args: Any, **kwargs: Any) -> str:
        _spent.open, _spent.steps, _spent.characters, _spent.begin = True, 0, 0, time.thread_time()
        try:
            return render(*args, **kwargs)
        finally:
            _spent.open = False

    template.render = counted  # type: ignore[method-assign]
    return template


def limit_templates() -> None:
    """Have transformers render all chat templates of this process under limits."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template
    if getattr(compiled, "limited", False):
        return

    @lru_cache(maxsize=64)
    def limited(chat_template: str) -> Template:
        return _limited(compiled("").environment, chat_template)

    limited.limited = True  # type: ignore[attr-defined]
    chat_template_utils._compile_jinja_template = limited


def check_template(template: str, folder: str) -> None:
    """Raise UserError where a folder's chat template is no template of Jinja's."""
    from transformers.utils import chat_template_utils

    try:
        chat_template_utils._compile_jinja_template(template)
    except TemplateError as error:
        raise UserError(f"chat_template.jinja of {folder} is no template: {error}") from error
