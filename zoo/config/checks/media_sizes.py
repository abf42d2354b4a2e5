"""Sizes in the settings of image, video and audio processors: a stranger's file may ask for any, and memory is taken for them."""

from __future__ import annotations

from zoo.errors import ConfigError

MOST_EDGE = 2**13  # pixels of a side; published ones have up to 4096
MOST_LEAST = 2**24  # pixels that an image or video is enlarged to at least
MOST_PIXELS = 2**31  # that it may have at most: nothing is enlarged to these
MOST_TILES = 2**10  # of one image
MOST_SECONDS = 3600  # of a chunk of sound
MOST_SAMPLES = 2**26
MOST = {
    **dict.fromkeys(("height", "width", "patch_size", "max_image_size"), MOST_EDGE),
    **dict.fromkeys(("shortest_edge", "min_pixels"), MOST_LEAST),
    **dict.fromkeys(("longest_edge", "max_pixels"), MOST_PIXELS),
    **dict.fromkeys(("max_patches", "max_num_crops", "pan_and_scan_max_num_crops", "max_soft_tokens"), MOST_TILES * 4),
    **dict.fromkeys(("n_fft", "hop_length", "feature_size", "frame_length", "fft_length"), 2**16),
    **dict.fromkeys(("n_samples", "nb_max_frames"), MOST_SAMPLES),
    "chunk_length": MOST_SECONDS,
    "image_grid_pinpoints": MOST_EDGE,
    "size": MOST_EDGE,
    "crop_size": MOST_EDGE,
}  # fmt: skip
TOGETHER = ("longest_edge", "max_pixels")  # a least size beside one of these counts pixels, else it is a side


def check_media_sizes(settings: object, where: str) -> None:
    """Refuse settings of a processor that ask for sizes that no published one has.

    Raises:
        ConfigError: a size over its bound, and which that is.
    """
    left = [("", settings)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(key, part) for key, part in value.items()]
            side = value.get("shortest_edge")
            if not any(value.get(key) is not None for key in TOGETHER):
                _check("shortest_edge", side, MOST_EDGE, where)
        elif isinstance(value, list):
            left += [(name, part) for part in value]
        elif name in MOST:
            _check(name, value, MOST[name], where)


def _check(name: str, value: object, most: int, where: str) -> None:
    """ConfigError for a number over its bound, or none that is one (`nan`)."""
    if isinstance(value, int | float) and not value <= most:
        shown = str(value) if isinstance(value, float) or value < 10**18 else "a number of over 18 digits"
        raise ConfigError(f"{where}: {name} is {shown}; a size of a processor of at most {most:,} is wanted")
