"""What `zoo generate` makes of its arguments."""

from pathlib import Path

import pytest

from zoo.cli.checkpoints.generate import run, split
from zoo.errors import UserError


def test_places_overrides_options_and_files(tmp_path: Path) -> None:
    image = tmp_path / "a=b.png"
    image.touch()
    arguments = ["runs/demo", "What is x=3 here?", f"image={image}", f"--image={image}", "temperature=0.5"]
    places, overrides, values, files = split([*arguments, "parallel.tp=2", "max_new_tokens=7", "out=a.jsonl"])
    assert places == ["runs/demo", "What is x=3 here?"]
    assert overrides == ["parallel.tp=2"]
    assert values == {"temperature": 0.5, "max_new_tokens": 7, "out": "a.jsonl"}
    assert files == {"image": [str(image)] * 2, "audio": [], "video": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 of CHECKPOINT and PROMPT"),
        (["a", "b", "c"], "3 of CHECKPOINT and PROMPT"),
        (["a", "b", "image=nowhere.png"], "image=nowhere.png: no such file"),
        (["a", "b", "rows=c.jsonl"], "rows=c.jsonl has prompts"),
        (["a", "b", "max_new_tokens=many"], "'many' is no whole number"),
        (["nowhere", "b"], "nowhere: no such folder"),
        (["a"], "no terminal"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(arguments)
