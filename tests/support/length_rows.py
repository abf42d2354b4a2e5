"""Rows that say how long they are, and a processor that reads them: for tests of lengths, bins and epochs."""

from collections import Counter

import torch

from zoo.data.errors import RowError
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.rows import Row

type Texts = list[tuple[int | str, int]]


def rows_of(texts: Texts, name: str = "x") -> list[Row]:
    """A row for each (guess, length); see `Reader`."""
    return [Row((("user", f"{guess} {length}"),), source=f"{name}:{n}") for n, (guess, length) in enumerate(texts)]


class Reader:
    """A row's text is "guess length": what its headers say (-: nothing), and what encoding gives (0: it is broken)."""

    pad_id = 0
    modalities = ("text",)
    media_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.encoded: Counter[str] = Counter()

    def measure(self, row: Row, **how: object) -> SampleSize | None:
        guess = row.messages[0][1].split()[0]
        return None if guess == "-" else SampleSize(int(guess))

    def size(self, sample: Sample) -> SampleSize:
        return SampleSize(sample.length)

    def encode(self, row: Row, **how: object) -> Sample:
        self.encoded[row.source] += 1
        length = int(row.messages[0][1].split()[1])
        if not length:
            raise RowError(row.source, "corrupt_media", "broken.")
        labels = torch.arange(length)
        labels[0] = IGNORE
        return Sample(torch.arange(length), labels, source=row.source)
