"""Images as Pillow opens them, as RGB of 8 bits: upright, transparent pixels on white, 16 bits a channel scaled to 8."""

from __future__ import annotations

from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from zoo.data.errors import corrupt_media

MAX_PIXELS = 178_956_970  # of one image: Pillow's own error limit, 2 * Image.MAX_IMAGE_PIXELS
IMAGE_TYPES = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
TWELVE = 2**12  # levels of 12 bits, as cameras and scanners of medicine have them


def rgb_of(image: Image.Image, source: object) -> Image.Image:
    """An image as Pillow has opened it as RGB; `source` is its name, for errors.

    Raises:
        RowError: no pixel, more than MAX_PIXELS, or pixels of unknown range ("corrupt_media").
    """
    if image.width * image.height > MAX_PIXELS:
        size = f"{image.width} x {image.height} pixels, over the limit of {MAX_PIXELS}"
        raise corrupt_media(source, "image", f"it has {size}; scale it down")
    if not image.width * image.height:
        raise corrupt_media(source, "image", f"it has {image.width} x {image.height} pixels")
    tiles = getattr(image, "tile", None)  # an image that was not opened from a file has none
    arguments = tiles[0].args if tiles else ""
    stored = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    stored = stored if isinstance(stored, str) else ""  # how the file holds its pixels ("RGB;16B"), by Pillow's name
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16") or upright.mode == "I":
        return _grey_of_16_bits(upright, source)
    if upright.mode == "F":
        raise corrupt_media(source, "image", "its pixels are 32-bit floats, of unknown range; save it with 8 bits")
    if ";16" in stored:
        colours = np.asarray(upright)[..., :3] if upright.mode.startswith("RGB") else np.asarray(upright)
        _check_range(int(colours.max()) * 256 + 255 if colours.any() else 0, source)
    if image.format == "PNG" and "transparency" in upright.info:
        clear = upright.info["transparency"]  # Pillow scales the pixels to 8 bits, and not this colour itself
        if stored in ("L;2", "L;4") and isinstance(clear, int):
            upright.info["transparency"] = clear * 255 // (2 ** int(stored[-1]) - 1)
        elif stored.startswith("RGB;16") and isinstance(clear, tuple):
            upright.info["transparency"] = tuple(level >> 8 for level in clear)
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(page, layer).convert("RGB")
    return upright.convert("RGB")


def _grey_of_16_bits(image: Image.Image, source: object) -> Image.Image:
    """Grey of 16 bits as RGB of 8: Pillow's own conversion cuts off what is above 255."""
    grey = np.asarray(image).astype(np.int64)
    if grey.min() < 0 or grey.max() > 65535:
        raise corrupt_media(source, "image", "its pixels have 32 bits, of unknown range; save it with 8 or 16")
    _check_range(int(grey.max()), source)
    scaled = ((grey + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        scaled[grey == clear] = 255
    return Image.fromarray(scaled).convert("RGB")


def _check_range(brightest: int, source: object) -> None:
    """Refuse 16 bits of which only the lower 12 are in use: scaled as 16, nearly black."""
    if 0 < brightest < TWELVE:
        seen = f"it has 16 bits a channel, of which 65535 is white, and its brightest pixel has {brightest}"
        advice = "it would be nearly black. Scale it to 16 bits (12 bits: times 16), or save it with 8"
        raise corrupt_media(source, "image", f"{seen}, as data of 12 bits or fewer have: {advice}")


def oddities_of(image: Image.Image | IO[bytes]) -> set[str]:
    """What an image, or the header of a file, has that readers treat in ways of their own."""
    opened = image if isinstance(image, Image.Image) else Image.open(image)
    deep = opened.mode.startswith("I") or ";16" in str(getattr(opened, "tile", ""))
    turned = opened.getexif().get(ExifTags.Base.Orientation, 1) != 1
    seen = {"16 bits a channel": deep, "an orientation": turned, "transparent pixels": opened.has_transparency_data}
    return {name for name, is_there in seen.items() if is_there}
