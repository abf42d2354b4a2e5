"""A recipe's file, and what a mistake in a recipe is told."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.errors import ConfigError

NAME = "qwen3_omni_sft"


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(*overrides: str, name: str = NAME) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def load_effective(name: str, overrides: Iterable[str]) -> Any:
    """The recipe with those overrides that have an effect on it: tests give the same keys to recipes of all kinds.

    Keys of `parallel` stay: which layouts a model refuses is tested.
    """
    left = list(overrides)
    while True:
        try:
            return load_recipe(name, left)
        except ConfigError as error:
            refused = re.findall(r"^ *([\w.]+)=.*?: it has no effect", str(error), re.MULTILINE)
            kept = [one for one in left if one.partition("=")[0] not in refused or one.startswith("parallel.")]
            if len(kept) == len(left):
                raise
            left = kept
