"""The files of a new family, with tests that say what is to be filled in: `zoo new-family`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

import zoo
from zoo.errors import UserError
from zoo.files import write_atomically
from zoo.registry import families

TEMPLATES = Path(__file__).parent / "family_files"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Where each template goes: in a checkout of zoo, and in a package.
REPOSITORY = {
    "repository/init": "models/{name}/__init__.py",
    "config": "models/{name}/config.py",
    "repository/readme": "models/{name}/README.md",
    "bridge": "bridges/{name}.py",
    "repository/recipe": "recipes/families/{name}.yaml",
    "repository/size": "recipes/sizes/{name}/tiny.yaml",
    "repository/tiny": "tests/support/tiny_{name}.py",
    "repository/test": "tests/parity/test_{name}.py",
}
PACKAGE = {
    "package/pyproject": "pyproject.toml",
    "package/init": "{name}/__init__.py",
    "config": "{name}/config.py",
    "bridge": "{name}/bridge.py",
    "package/recipe": "{name}/recipe.yaml",
    "package/test": "tests/test_{name}.py",
}
TEXT = {
    "modalities": "text",
    "parts": "language",
    "model": "zoo.nn.vision_language:LanguageModel",
    "step": "zoo.steps:PackedStep",
    "processor": "zoo.data.processors.text:TextProcessor.build",
    "more_config": "",
    "data": '{path: digits:train, format: "zoo.data.digits:in_words"}',
    "head": "ForCausalLM",
    "auto": "AutoModelForCausalLM",
    "tests": "TextPairTests",
    "examples": "text_examples",
}
VISION = {
    "modalities": "text image video",
    "parts": "vision language",
    "model": "zoo.nn.vision_language:VisionLanguageModel",
    "step": "zoo.steps.vision:VisionStep",
    "processor": "zoo.data.processors.timestamped:TimestampedProcessor.build",
    "more_config": "    mrope_section = (24, 20, 20)  # TODO: time, height, width, where a config.json has none\n",
    "data": "digits:train",
    "head": "ForConditionalGeneration",
    "auto": "AutoModelForImageTextToText",
    "tests": "PairTests",
    "examples": "vision_examples",
}


def lay_out(name: str, root: Path, *, package: bool, vision: bool = False) -> list[Path]:
    """Write a family's files.

    Args:
        name: of the family, as users type it: a Python name in lower case.
        root: a checkout of zoo, or with `package` the folder of a package, which may be new.
        vision: it reads images and videos too, through a vision tower of transformers.

    Returns:
        The files.

    Raises:
        UserError: a name that is none or is taken, a root that is no checkout, or a file that is there already.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserError(f"new-family {name}: wanted a Python name in lower case, such as my_lm")
    if name in families():
        raise UserError(f"new-family {name}: there is a family of that name; `zoo list` shows all")
    if not package and not (root / "tests" / "support" / "pairs.py").is_file():
        raise UserError(
            f"new-family {name}: {root} is no checkout of zoo; --package lays the family out as a package of your own"
        )
    templates = PACKAGE if package else REPOSITORY
    paths = {root / pattern.format(name=name): template for template, pattern in templates.items()}
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise UserError(f"new-family {name}: {', '.join(existing)}: there already; nothing was written")
    for path, template in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _filled(template, name, vision))
    return list(paths)


def checkout() -> Path:
    """The folder that zoo runs from: a checkout, or a site-packages."""
    return Path(zoo.__file__).absolute().parents[1]


def _filled(template: str, name: str, vision: bool) -> str:
    """A template's text, without blank lines where it has nothing to say."""
    words = [word.capitalize() for word in name.split("_")]
    values = {"name": name, "title": " ".join(words), "prefix": "".join(words), **(VISION if vision else TEXT)}
    for key in ("modalities", "parts"):
        quoted = [f'"{word}"' for word in values[key].split()]
        values[f"{key}_tuple"] = f"({', '.join(quoted)}{',' * (len(quoted) == 1)})"
    rows = f"from support.rows import {values['examples']}"
    values["imports"] = "\n".join(sorted([rows, f"from support.tiny_{name} import write_tiny_{name}"]))
    values["arch"] = _substituted("arch", values).rstrip("\n")
    return re.sub(r"\n\n\n+(?=\S)", "\n\n\n", _substituted(template, values)).rstrip("\n") + "\n"


def _substituted(template: str, values: Mapping[str, str]) -> str:
    return Template((TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")).substitute(values)
