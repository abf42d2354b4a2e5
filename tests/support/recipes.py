"""A recipe's file, and what a mistake in a recipe is told."""

from pathlib import Path

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
