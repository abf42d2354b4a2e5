"""Talkers, speakers and layouts that are not built, or not whole, are refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engine import recipe_for
from support.tiny_qwen25_talker import whole_config as qwen25_config
from support.tiny_talker import whole_config

TALKS = ("train.speech_loss=1", "model.freeze=[vision,audio,language]")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.freeze=[vision,audio,language,talker]"], "nothing would be left to train"),
        (["train.speech_loss=0"], "nothing would be left to train"),
        (["packing.mode=none"], "packing.mode=none with train.speech_loss=1"),
    ],
    ids=str,
)
def test_what_a_talker_is_not_built_for_is_refused(overrides: list[str], reason: str, tmp_path: Path) -> None:
    from zoo.errors import ConfigError

    with pytest.raises(ConfigError, match=reason):
        recipe_for(tmp_path, *TALKS, *overrides, ranks=2)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tp": 2, "sp": True}, "tp=2 does not divide the 6 attention heads and 3 key-value heads of the talker's code predictor"),
        ({"ep": 4}, "ep=4 does not divide the talker's experts, 6; 1, 2, 3 or 6 would"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_cannot_share_a_talker_are_refused(keys: dict, reason: str) -> None:
    from zoo.config.checks.layout import check_layout
    from zoo.config.schema import Recipe
    from zoo.errors import ConfigError

    arch = whole_config(num_experts=8).to_dict()
    recipe = Recipe().replace({"model.family": "qwen3_omni", "model.arch": arch, "train.speech_loss": 1.0})
    with pytest.raises(ConfigError, match=reason):
        check_layout(recipe.replace({f"parallel.{key}": value for key, value in keys.items()}), 4)


def test_a_family_without_a_talker_is_refused() -> None:
    from zoo.config.checks.training import check_speech
    from zoo.config.schema import Recipe
    from zoo.errors import ConfigError

    with pytest.raises(ConfigError, match="Qwen3-VL has no talker that is trained here"):
        check_speech(Recipe().replace({"model.family": "qwen3_vl", "train.speech_loss": 1.0}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a pickle", "can't be read as speakers"),
        (None, "is not there: it names the speakers"),
        ({"Ethan": {"cond": 1}}, r"can't be read as speakers \(KeyError"),
        (
            {"Ethan": {"bos_token": 9999, "cond": torch.zeros(1, 8), "ref_mel": torch.zeros(1, 12, 20)}},
            r"bos_token of speakers is .*wanted tokens of the thinker",
        ),
    ],
    ids=["bytes", "none", "no token", "no token of the thinker"],
)
def test_a_file_of_speakers_that_is_none_is_refused(content: Any, reason: str, tmp_path: Path) -> None:
    from zoo.errors import ConfigError
    from zoo.models.qwen25_omni.speech_codes import Qwen25SpeechCodes

    config, path = qwen25_config(), tmp_path / "spk_dict.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=reason):
        Qwen25SpeechCodes.build(config, tiny.processor("qwen25_omni", config).tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"embedding_size": 48}, "talker_config.embedding_size is 48; wanted the thinker's hidden_size 44"),
        ({"tie_word_embeddings": True}, "talker_config.tie_word_embeddings is True; wanted False"),
        ({"pad_token_id": 3}, "talker_config.pad_token_id is 3; wanted None"),
        ({"tts_codec_mask_token_id": 46}, r"tts_codec_\.\.\._token_id .* wanted 0 to 45"),
        ({"tts_text_pad_token_id": 386}, r"tts_text_\.\.\._token_id .* wanted 0 to 385"),
    ],
    ids=str,
)
def test_a_talker_that_is_not_built_is_refused(keys: dict, reason: str) -> None:
    from zoo.errors import UserError
    from zoo.models.qwen25_omni.config import Qwen25OmniConfig

    config = Qwen25OmniConfig(qwen25_config(talker=keys))
    with pytest.raises(UserError, match=reason):
        config.checked_talker()
