"""What is special to InternVL: tiles, and a rotary embedding that is stretched beyond its length."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.families import FAMILIES, pair_of
from support.pairs import Pair

from zoo.errors import UserError

pair = pair_of("internvl")


def test_rows_are_cut_into_tiles(pair: Pair) -> None:
    media = {name: example.sample.media for name, example in pair.examples.items()}
    tiles = {name: int(m["num_tiles"]) for name, m in media.items() if "num_tiles" in m}
    wanted = {"wide": 4 + 1, "tall": 2 + 1, "square": 9 + 1, "two": 10 + 7, "video+video+image": 4 + 4 + 5}
    assert {name: tiles[name] for name in wanted} == wanted


@pytest.mark.slow
def test_a_dynamic_rotary_embedding_is_the_default_one_within_its_length(tmp_path: Path, cpu_world: Any) -> None:
    """As of InternVL3; beyond it transformers stretches the embedding, sample by sample."""
    folder = FAMILIES["internvl qwen2"].write(tmp_path, text={"max_position_embeddings": 100})
    with pytest.raises(UserError, match=r"set packing\.budget=100 or less"):
        Zoo.load(folder, cpu_world, "model.family=internvl", "packing.budget=101")
    Zoo.load(folder, cpu_world, "model.family=internvl", "packing.budget=100")
