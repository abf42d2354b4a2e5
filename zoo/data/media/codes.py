"""The codes of a row's speech, out of its npy file."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from zoo.data.errors import RowError, corrupt_media
from zoo.data.media.opening import open_binary
from zoo.data.sources.formats.speech import MAX_FRAMES, checked_codes
from zoo.data.sources.references import Blob, MediaFile
from zoo.data.sources.rows import Row

MAX_CODES = 64 * MAX_FRAMES  # of a file: more is not read


def load_codes(row: Row) -> Tensor:
    """(frames, codebooks) int64 codes of a row with `speech`.

    RowError: a file that is missing ("missing_file"), no npy file of whole numbers ("corrupt_media"), or of another shape ("bad_row").
    """
    assert row.speech is not None
    source = row.opened(row.speech)
    assert isinstance(source, MediaFile | Blob)
    try:
        with open_binary(source) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            count = int(np.prod(shape, dtype=object))
            if dtype.kind not in "iu" or count > MAX_CODES:
                raise ValueError(f"it holds {count} values of {dtype}; whole numbers, at most {MAX_CODES}, are wanted")
            file.seek(0)
            codes = np.lib.format.read_array(file, allow_pickle=False)
    except RowError as error:
        raise error.at(row.source) from error
    except (OSError, ValueError, EOFError) as error:
        raise corrupt_media(source, "an npy file", str(error).rstrip(".")).at(row.source) from error
    try:
        return torch.from_numpy(checked_codes(codes, str(source))).long()
    except RowError as error:
        raise error.at(row.source) from error
