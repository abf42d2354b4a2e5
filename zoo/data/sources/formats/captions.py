"""Images with captions, as WebDataset tars of image-text pairs have them: an image, and `caption`, `text` or `txt`."""

from __future__ import annotations

from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.set_format import Adapter, exchange

PROMPT = "<image>Describe the image."
NAMES = ("caption", "text", "txt")


def _convert(item: dict[str, Any], source: str) -> dict[str, Any]:
    images = item.get("images")
    image = item.get("image", images[0] if isinstance(images, list) and images else None)
    caption = next((item[name] for name in NAMES if item.get(name) is not None), None)
    if image is None or not isinstance(caption, str):
        seen = ", ".join(sorted(key for key, value in item.items() if value is not None))
        text = (
            f"the row has {seen or 'nothing'}; rows of captions have an image and one of {', '.join(NAMES)}."
        )
        raise RowError(source, "bad_row", text)
    return exchange(PROMPT, caption, images=[image], kind="caption")


captions = Adapter(_convert, ("image", "caption"))
