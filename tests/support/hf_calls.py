"""A row as arguments of a transformers processor, as its user would write them by hand: text and media."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.sources.rows import Row, read_rows

QWEN_TURN = "<|im_start|>{role}\n{said}<|im_end|>\n"
QWEN_MARKS = {
    "<image>": "<|vision_start|><|image_pad|><|vision_end|>",
    "<video>": "<|vision_start|><|video_pad|><|vision_end|>",
    "<audio>": "<|audio_start|><|audio_pad|><|audio_end|>",
}


def hf_arguments(row: Row, marks: Mapping[str, str] = QWEN_MARKS, turn: str = QWEN_TURN) -> dict[str, Any]:
    """`text`, and `images`, `videos` at 2 frames a second and `audio` as far as the row has them."""
    text = "".join(turn.format(role=role, said=said) for role, said in row.messages)
    for mark, written in marks.items():
        text = text.replace(mark, written)
    media = {
        "images": [load_image(row.path(name)) for name in row.images],
        "videos": [load_video(row.path(name), 2.0, 64)[0] for name in row.videos],
        "audio": [
            load_audio(row.path(name)) for name in (*row.audios, *(row.videos if row.use_audio_in_video else ()))
        ],
    }
    return {"text": text, "return_tensors": "pt", **{kind: items for kind, items in media.items() if items}}


def assert_as_called(sample: Any, wanted: Mapping[str, Any]) -> None:
    """A sample has the tokens and the media of transformers' own call."""
    torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
    names = wanted.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}
    assert sample.media.keys() == names
    for name in names:
        torch.testing.assert_close(sample.media[name], torch.as_tensor(wanted[name]), rtol=0, atol=0)


def vision_rows(media: Path) -> list[Row]:
    """Rows of texts, images and videos, with some of each."""
    rows = [row for row in read_rows(media / "rows.jsonl") if row.media <= {"image", "video"}]
    assert {"image", "video"} <= {kind for row in rows for kind in row.media}
    return rows


def omni_videos(hf: Any, row: Row, options: Mapping[str, Any], clock: Mapping[str, float]) -> dict[str, Any]:
    """Further arguments of an omni processor's call for a row with videos: `options` of videos, the `clock`, and whose sound is heard.

    They are another's from transformers 5.23 on.
    """
    if not row.videos:
        return {}
    heard = row.use_audio_in_video
    if not hasattr(hf, "load_audio_from_video"):
        return {"videos_kwargs": {**options, **clock, "use_audio_in_video": heard}}
    sounds = [*[None] * len(row.audios), *(range(len(row.videos)) if heard else ())]
    return {"videos_kwargs": dict(options), **clock, "load_audio_from_video": heard, "audio_from_video_indices": sounds}
