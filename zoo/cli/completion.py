"""
usage: zoo completion bash | zsh

Prints the script with which a shell completes zoo's command lines at the Tab key: verbs and their options, recipes and
YAML files, sizes of the recipe on the line, hardware, all keys section by section, and the values of keys with choices.

  source <(zoo completion bash)    in ~/.bashrc
  source <(zoo completion zsh)     in ~/.zshrc
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from zoo.config.recipes.matrix import folder, matrix, names_in, recipe_names, size_order
from zoo.errors import UserError

# The shells ask `zoo completion answer LINE [BREAKS]`: the command up to the cursor and, for bash, the characters at which
# it ends a word. Where nothing is answered, they complete names of files.
_BASH = r"""_zoo() {
    mapfile -t COMPREPLY < <("$1" completion answer "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o default -F _zoo zoo"""
_ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_zoo() {
    local -a found
    found=(${(f)"$(${words[1]} completion answer "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=./]}
        compadd -- ${found:#*[=./]}
    else
        compset -P '*='
        _files
    fi
}
compdef _zoo zoo"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


class SchemaKey(NamedTuple):
    """What completion wants to know of a key."""

    boolean: bool
    choices: tuple[str, ...]


def run(arguments: Sequence[str]) -> int:
    """Print a shell's script, or the answers that this script asks for."""
    if len(arguments) in (2, 3) and arguments[0] == "answer":
        for text in as_typed(answers(arguments[1]), *arguments[1:]):
            print(text)
        return 0
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        raise UserError("zoo completion: name the shell: zoo completion bash | zsh")
    print(SCRIPTS[arguments[0]])
    return 0


def answers(line: str) -> list[str]:
    """What the last word of a command line may become, in order; empty where it may be any file, or nothing is known.

    Args:
        line: the command up to the cursor, "zoo train recipe=qw".
    """
    *before, word = words_of(line)
    if not before:
        return []
    from zoo.cli.main import SUBCOMMANDS

    if len(before) == 1:
        return _starting(word, [*SUBCOMMANDS, *(("--help", "--version") if word.startswith("-") else ())])
    subcommand = before[1]
    if subcommand not in SUBCOMMANDS:
        return []
    usage, known = _usage(SUBCOMMANDS[subcommand][0]), schema()
    words, option = before[2:], "--" if word.startswith("--") else ""
    last = words[-1] if words else ""
    key, equals, value = word.removeprefix(option).partition("=")
    if equals:
        return [f"{option}{key}={text}" for text in _values(key, value, words)]
    if last.startswith("--") and last.removeprefix("--") in known:  # --key VALUE
        return _values(last.removeprefix("--"), word, words)
    names = [f"{name}=" for name in _own_keys(usage)]
    if "recipe=NAME" in usage or "key of the recipe" in usage:
        names += _key_parts(key, known)
    completions = _starting(
        word, [*([] if words else _second_words(usage, subcommand)), *(option + name for name in names)]
    )
    if word.startswith("-"):
        flags = re.findall(r"(?<![\w`-])\[?(--[a-z][a-z-]*)(?![\w.=-])", usage)
        completions += _starting(word, [*flags, "--help"])
    if word and "recipe=NAME" in usage and not _recipe_of(words):
        completions += _starting(word, recipe_names())
    return list(dict.fromkeys(completions))


def as_typed(candidates: Iterable[str], line: str, breaks: str = "") -> list[str]:
    """Answers in the form that a shell takes.

    Args:
        candidates: what the line's last word may become.
        line: the command up to the cursor.
        breaks: bash's COMP_WORDBREAKS. It takes what stands behind the last of them, quoted; zsh, "", takes whole words.
    """
    if not breaks:
        return list(candidates)
    typed = words_of(line)[-1]
    cut = max(typed.rfind(sign) + 1 if sign in breaks else 0 for sign in "=:")
    return [re.sub(r"([^\w@%+=:,./~-])", r"\\\1", text[cut:]) for text in candidates]


def words_of(line: str) -> list[str]:
    """The words of an unfinished command line; the last one is empty behind a space."""
    import shlex

    for closing in ("", "'", '"'):
        try:
            words = shlex.split(f"{line}{closing}")
        except ValueError:
            continue
        return [*words, ""] if not words or (line[-1:].isspace() and not closing) else words
    return [""]


@cache
def schema() -> Mapping[str, SchemaKey]:
    """The recipe's keys by dotted name, read from the text of the schema: importing it takes ten times as long."""
    files = sorted(_path("zoo.config.schema").parent.glob("*.py"))
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    literals = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_literal(node.value)
    }
    return dict(_keys_of("Recipe", "", classes, literals))


def _is_literal(node: ast.AST) -> bool:
    """Whether it is `Literal[...]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"


def _keys_of(
    name: str, prefix: str, classes: Mapping[str, ast.ClassDef], literals: Mapping[str, ast.expr]
) -> Iterator[tuple[str, SchemaKey]]:
    """Keys of a section's class; `literals` are choices that the schema's files give a name."""
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id.startswith("_"):  # no key
            continue
        key, kinds = (f"{prefix}{node.target.id}", {getattr(part, "id", "") for part in ast.walk(node.annotation)})
        section = kinds & classes.keys()
        if section:
            yield from _keys_of(section.pop(), f"{key}.", classes, literals)
            continue
        named = [literals[kind] for kind in kinds if kind in literals]
        choices = [part for part in (*ast.walk(node.annotation), *named) if _is_literal(part)]
        values = [ast.literal_eval(choice.slice) for choice in choices if isinstance(choice, ast.Subscript)]
        listed = tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,)))
        yield key, SchemaKey("bool" in kinds, listed)


def _key_parts(typed: str, known: Mapping[str, SchemaKey]) -> list[str]:
    """Keys of the section that is typed, `train.lr=`; before its dot, the sections, `train.`, and the keys outside them."""
    section = typed[: typed.rfind(".") + 1]
    parts = (key[len(section) :].partition(".") for key in known if key.startswith(section))
    return list(dict.fromkeys(f"{section}{name}{'.' if dot else '='}" for name, dot, _ in parts))


def _values(key: str, typed: str, words: Sequence[str]) -> list[str]:
    """Values of a key that start as `typed` does."""
    known = schema().get(key)
    if key == "recipe":
        return _or_files(_starting(typed, recipe_names()), typed)
    if key in ("task", "adapter", "family"):
        kinds = {"task": "tasks", "adapter": "adapters", "family": "families"}
        return _starting(typed, names_in(kinds[key]))
    if key == "size":
        return _or_files(_starting(typed, _sizes(_recipe_of(words), words)), typed)
    if key == "hardware":
        from zoo.config.gpus import GPUS

        counts = re.match(r"(?:\d+x){0,2}", typed)
        before = counts[0] if counts else ""
        return _starting(typed, [f"{before}{name}" for name in (*(() if before else ("auto", "cpu")), *GPUS)])
    if known is None:
        return []
    return _starting(typed, known.choices or (("true", "false") if known.boolean else ()))


def _sizes(recipe: str, words: Sequence[str]) -> list[str]:
    """Sizes of the family of a recipe: a name, or the path of a file."""
    named = [text.partition("=")[2] for text in words if text.removeprefix("--").startswith("model.family=")]
    recipes = folder()
    family_file = recipes / "families" / f"{matrix()[recipe].family if recipe in matrix() else ''}.yaml"
    for path in (family_file, recipes / f"{recipe}.yaml", Path(recipe).expanduser()):
        if not named and recipe and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            named = re.findall(r"^\s+family:\s*[\"']?(\w+)", text, re.MULTILINE)
    family = named[-1] if named else "*"
    return sorted({path.stem for path in recipes.glob(f"sizes/{family}/*.yaml")}, key=size_order)


def _recipe_of(words: Sequence[str]) -> str:
    """The recipe that the words before name, by `recipe=`, by `--recipe` or by itself; empty for none."""
    for before, text in zip(("", *words), words, strict=False):
        if text.removeprefix("--").startswith("recipe="):
            return text.partition("=")[2]
        if before == "--recipe" or (not before.startswith("--") and "=" not in text and not text.startswith("-")):
            return text
    return ""


def _or_files(names: list[str], typed: str) -> list[str]:
    """Names, and YAML files; folders to look further in where there is no such name."""
    folder = typed[: typed.rfind("/") + 1]
    directory = Path(folder).expanduser()
    if not directory.is_dir():
        return names
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files = [f"{folder}{path.name}{'/' if path.is_dir() else ''}" for path in paths]
    ends = (".yaml", ".yml") if names else (".yaml", ".yml", "/")
    return names + _starting(typed, [file for file in files if file.endswith(ends)])


@cache
def _usage(module: str) -> str:
    """What `zoo VERB --help` prints."""
    return ast.get_docstring(ast.parse(_path(module).read_text(encoding="utf-8"))) or ""


def _own_keys(usage: str) -> list[str]:
    """The keys of `key=value` that a verb's help names, without those of a section."""
    names = re.findall(r"(?<![\w.\-`(\[])\[?([a-z_]+)=(?=\S)", usage)
    return [name for name in dict.fromkeys(names) if name != "key"]


def _second_words(usage: str, subcommand: str) -> list[str]:
    """The words that a verb's help lets follow it: `bash | zsh`."""
    lines = re.findall(rf"^(?:usage: +| +)zoo {subcommand} ((?:[a-z]+ \| )*[a-z]+)(?![\w=])", usage, re.MULTILINE)
    return [word for line in lines for word in line.split(" | ")]


def _starting(typed: str, known: Iterable[str]) -> list[str]:
    return [text for text in known if text.startswith(typed)]


def _path(module: str) -> Path:
    """The file of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)
