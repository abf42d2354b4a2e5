"""Arguments of `zoo speak`, and what it refuses before anything is loaded."""

import pytest

from zoo.cli.checkpoints.speak import run
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.generation.speaking import Voice
from zoo.tools.speaking.speak import _with_talker, speak


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "0 of CHECKPOINT and ROWS given"),
        (["folder", "rows.jsonl"], r"no out=: wanted out=FOLDER"),
        (["folder", "out=x", "talker_top_k=few"], "talker_top_k=few: wanted a whole number"),
        (["folder", "out=x", "audio=maybe"], "audio=maybe: wanted true or false"),
        (["folder", "out=x", "answers=both"], "answers=both: wanted model .* or rows"),
        (["folder", "out=x", "talker_temperature=-1"], r"talker_temperature=-1.0: wanted a number from 0 .greedy. to 100"),
        (["folder", "out=x", "talker_max_new_tokens=1"], "talker_max_new_tokens=1: wanted a whole number from 2"),
        (["/no/such/folder", "digits:heldout", "out=x"], "/no/such/folder"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes(arguments: list[str], reason: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        run(arguments)


def test_a_family_without_a_talker_is_refused() -> None:
    recipe = Recipe().replace({"model.family": "qwen3_vl"})
    with pytest.raises(UserError, match=r"folder: Qwen3-VL has no talker, so it writes text alone"):
        _with_talker(recipe, "folder")
    asked = _with_talker(Recipe().replace({"model.family": "qwen3_omni"}), "folder")
    assert asked.train.speech_loss and asked.model.freeze == ["vision", "audio", "language"]


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "ep", "etp"])
def test_ranks_share_no_model(name: str) -> None:
    with pytest.raises(UserError, match=rf"parallel.{name}=2: ranks that speak share out rows alone"):
        _with_talker(Recipe().replace({"model.family": "qwen3_omni", f"parallel.{name}": 2}), "folder")


def test_a_key_of_no_voice_is_refused() -> None:
    with pytest.raises(UserError, match="talker_top: wanted talker_max_new_tokens, talker_temperature"):
        speak("folder", out="x", talker_top=3)
    assert not Voice(talker_temperature=0).of_residual()
