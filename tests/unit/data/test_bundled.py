"""The bundled tokenizer and digits are what scripts/bundled_data makes."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from zoo.data.digits import ROOT as DIGITS
from zoo.data.tokenizer import ROOT as TOKENIZER

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bundled_data"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_tokenizer_is_what_its_generator_makes(script) -> None:
    make = script("make_tokenizer")
    assert (TOKENIZER / "tokenizer.json").read_text(encoding="utf-8") == make.train()
    assert (TOKENIZER / "tokenizer_config.json").read_text() == json.dumps(make.config(), indent=2) + "\n"


def test_the_digits_are_what_their_generator_makes(script, tmp_path, monkeypatch) -> None:
    """Rows of pictures and texts of the held-out split, and the pixels of its strips; speech needs espeak-ng."""
    pytest.importorskip("sklearn")
    make = script("make_digits")
    monkeypatch.setattr(make.digit_media, "speak", lambda *how: np.ones(4000, np.float32))
    make.make_split("heldout", tmp_path, 0)

    def chosen(folder: Path) -> list[dict]:
        kinds = ("image", "multi_image", "video", "text")
        return [row for row in make.read_rows(folder / "heldout.jsonl") if row["kind"] in kinds]

    assert len(chosen(tmp_path)) == 125 and chosen(tmp_path) == chosen(DIGITS)
    strips = sorted((DIGITS / "heldout").glob("i*.webp"))
    assert len(strips) == 80
    for strip in strips:
        made, bundled = (
            make.digit_media.read_image(folder / "heldout" / strip.name).astype(int) for folder in (tmp_path, DIGITS)
        )
        assert made.shape == bundled.shape and abs(made - bundled).mean() < 1, strip.name
