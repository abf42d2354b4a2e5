"""How a row's last answer is spoken: codes (frames, codebooks) of an audio codec, checked as far as no model has to be known."""

from __future__ import annotations

import io

import numpy as np

from zoo.data.errors import bad_row
from zoo.data.sources.formats.messages import typed
from zoo.data.sources.references import Access, Blob, Medium, check_medium
from zoo.types import JsonObject

MAX_FRAMES = 20_000  # of a row; 27 minutes at 12.5 a second


def read_speech(item: JsonObject, access: Access) -> tuple[Medium | None, str]:
    """A row's codes, None for none, and who speaks them, "" where it does not say.

    Codes are a path of an npy file, its bytes, or a list of frames, which are lists of whole numbers, or whole numbers where there is
    one codebook; a list becomes an npy file's bytes.
    RowError ("bad_row" and those of `check_medium`) for anything else.
    """
    value, speaker = item.get("speech"), typed(item, "speaker", str, "")
    if value is None:
        return None, speaker
    if not isinstance(value, list | tuple | np.ndarray):
        return check_medium(value, "speech", "speech", access), speaker
    try:
        codes = np.array([frame if isinstance(frame, int | np.integer) else list(frame) for frame in value])
    except (TypeError, ValueError):  # frames of different lengths, or none
        codes = np.array(None)
    file = io.BytesIO()
    np.save(file, checked_codes(codes, "speech"), allow_pickle=False)
    return Blob(file.getvalue(), "speech"), speaker


def checked_codes(codes: np.ndarray, where: str) -> np.ndarray:
    """The codes (frames, codebooks) or (frames,) as (frames, codebooks) int32; RowError ("bad_row") for no such array, or over MAX_FRAMES."""
    if codes.ndim == 1 and codes.size:
        codes = codes[:, None]
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or not codes.size:
        seen = f"an array of {codes.dtype} of shape {codes.shape}" if codes.dtype != object else "no array"
        raise bad_row(f"{where} is {seen}; whole numbers (frames, codebooks) or (frames,) are wanted.")
    if len(codes) > MAX_FRAMES:
        raise bad_row(f"{where} has {len(codes)} frames, over the limit of {MAX_FRAMES}; cut the row into several.")
    least, most = int(codes.min()), int(codes.max())
    if least < 0 or most >= 2**24:
        raise bad_row(
            f"{where} has a code {least if least < 0 else most}; codes are counted from 0, and none has 2**24."
        )
    return codes.astype(np.int32)
