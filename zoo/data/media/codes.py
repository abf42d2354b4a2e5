"""The codes of a row's speech: out of its npy file, and held against the checkpoint of a talker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zoo.data.errors import RowError, corrupt_media
from zoo.data.media.opening import open_binary
from zoo.data.sample import Sample
from zoo.data.sources.formats.speech import MAX_FRAMES, checked_codes
from zoo.data.sources.references import Blob, MediaFile, shown
from zoo.data.sources.rows import Row
from zoo.packing.spoken import COUNTS, EOS, FRAMES, SPEAKERS, WEIGHTS, SpokenRow

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


@dataclass(frozen=True)
class SpeechCodes(ABC):
    """What a talker of transformers reads and says.

    limits: codes of each codebook; `generate` says none of the others.
    speakers: the code or token of each, by names in lower case.
    """

    limits: tuple[int, ...]
    speakers: Mapping[str, int]

    @abstractmethod
    def row(self, ids: Tensor, frames: Tensor, speaker: int) -> SpokenRow:
        """The talker's sequence of a row of tokens (L,), whose last answer is spoken as frames (F, codebooks); ValueError where there is none."""

    def add(self, row: Row, sample: Sample) -> Sample:
        """The sample with its speech among its media; ValueError for what does not fit the talker, RowError for a bad file."""
        if row.speech is None:
            raise ValueError("it has none; give it `speech`, or leave it out")
        speaker, frames = self.speaker(row.speaker), load_codes(row)
        if frames.shape[1] != len(self.limits):
            raise ValueError(
                f"its frames have {frames.shape[1]} codes; wanted {len(self.limits)}, one of each codebook"
            )
        beyond = (frames >= torch.tensor(self.limits)).nonzero()
        if len(beyond):
            frame, book = beyond[0].tolist()
            raise ValueError(
                f"frame {frame} has code {int(frames[frame, book])} of codebook {book}; wanted 0 to {self.limits[book] - 1} (zoo "
                "writes beginning, speaker and end itself)"
            )
        spoken, said = self.spoken(sample, speaker, frames)
        if not bool((said.text[-len(frames) :] == EOS).any()):
            raise ValueError(
                f"it has {len(frames)} frames, fewer than the answer has tokens: the talker reads one a frame, and would never read the rest"
            )
        return spoken

    def to_say(self, sample: Sample, speaker: str) -> Sample:
        """The sample with a speech of no frames yet; ValueError for an answer or a speaker that can't be spoken."""
        return self.spoken(sample, self.speaker(speaker), torch.zeros(0, len(self.limits), dtype=torch.int64))[0]

    def spoken(self, sample: Sample, speaker: int, frames: Tensor) -> tuple[Sample, SpokenRow]:
        """The sample with these frames (F, codebooks) among its media, and the talker's sequence; ValueError as `row` raises it."""
        said = self.row(sample.input_ids, frames, speaker)
        first = int(said.text[-len(frames) - 1])  # token of the answer, whose weight its codes have
        weight = 1.0 if sample.weights is None else float(sample.weights[first])
        media = {
            FRAMES: frames,
            COUNTS: torch.tensor([len(frames)]),
            SPEAKERS: torch.tensor([speaker]),
            WEIGHTS: torch.tensor([weight]),
        }
        return replace(sample, media={**sample.media, **media}, codes=len(frames) + 1, code_weight=weight), said

    def speaker(self, name: str) -> int:
        """The code or token of a speaker; of the only one where none is named."""
        known = ", ".join(sorted(self.speakers)) or "none"
        if not name:
            if len(self.speakers) == 1:
                return next(iter(self.speakers.values()))
            raise ValueError(f"it has no speaker; the checkpoint has {known}")
        if name.lower() not in self.speakers:
            raise ValueError(f"speaker {shown(name)} is not in the checkpoint, which has {known}")
        return self.speakers[name.lower()]
