"""One tiny Qwen3-Omni in transformers and in zoo, and rows of every kind."""

from typing import Any

import pytest
from support.engine import Zoo, recipe_for
from support.rows import Example, make_examples
from support.tiny import load_thinker
from support.tiny_omni import TinyOmni

from zoo.model import build


@pytest.fixture(scope="session")
def hf(tiny_omni: TinyOmni) -> Any:
    """transformers' thinker."""
    return load_thinker(tiny_omni.thinker)


@pytest.fixture(scope="module")
def zoo(tiny_omni: TinyOmni, cpu_world: Any) -> Zoo:
    """The same weights through zoo's own path; in training mode, which tests must leave it in."""
    return Zoo.load(tiny_omni.thinker, cpu_world)


@pytest.fixture(scope="session")
def examples(tiny_omni: TinyOmni) -> dict[str, Example]:
    """Rows of every kind and mixtures."""
    return make_examples(build.assemble(recipe_for(tiny_omni.thinker)).processor)


@pytest.fixture(scope="session")
def samples(examples: dict[str, Example]) -> list[Any]:
    """The samples of all examples, in order."""
    return [example.sample for example in examples.values()]
