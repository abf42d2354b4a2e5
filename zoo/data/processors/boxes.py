"""Boxes and points in images as text, by the convention of the family that reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zoo.data.errors import RowError
from zoo.data.sources.formats.grounding import BOX, Box
from zoo.data.sources.rows import Message, Row

type Size = tuple[float, float]  # (height, width) in pixels


@dataclass(frozen=True)
class Coordinates:
    """How a family writes places in an image, from its upper left corner.

    Attributes:
        scale: thousandths of width and height; shares of them, with two decimals; or pixels of the image as its processor has
            resized it, in whole numbers.
        y_first: whether y stands before x.
    """

    scale: Literal["thousandths", "shares", "pixels"] = "thousandths"
    y_first: bool = False

    def written(self, box: Box, size: Size | None, resized: Size | None) -> str:
        """A box or point as text.

        Args:
            box: in pixels of the image in its file, or as shares of width and height.
            size: of the image in its file; needed of a box in pixels.
            resized: of the image as the model reads it; needed where `scale` says pixels.
        """
        height, width = (1.0, 1.0) if box.norm or size is None else size
        coordinates = []
        for n, pixel in enumerate(box.pixels):
            share = pixel / (height if n % 2 else width)
            most = 1000.0 if self.scale == "thousandths" or resized is None else resized[1 - n % 2]
            whole = str(int(min(max(round(share * most), 0), most)))
            coordinates.append(f"{min(max(share, 0.0), 1.0):.2f}" if self.scale == "shares" else whole)
        if self.y_first:
            coordinates = [coordinates[n ^ 1] for n in range(len(coordinates))]
        return f"[{', '.join(coordinates)}]"


THOUSANDTHS = Coordinates()


def with_boxes(row: Row, coordinates: Coordinates, sizes: Sequence[Size], resized: Callable[[], Sequence[Size]]) -> Row:
    """The row with its boxes in the place of `<bbox>`.

    Args:
        sizes: of its images in their files.
        resized: gives their sizes as the model reads them.

    Raises:
        RowError: a box of an image that the row does not have, whose size it needs ("bad_row").
    """
    if not row.boxes:
        return row
    read = resized() if coordinates.scale == "pixels" else ()
    left = iter(row.boxes)
    messages = []
    for role, content in row.messages:
        head, *rest = content.split(BOX)
        written = [head]
        for piece in rest:
            box = next(left)
            if box.image >= len(sizes) and (coordinates.scale == "pixels" or not box.norm):
                text = f"a box is of image {box.image}, whose size it needs, but the row has {len(sizes)} images."
                raise RowError(row.source, "bad_row", text)
            size = sizes[box.image] if box.image < len(sizes) else None
            written += [coordinates.written(box, size, read[box.image] if read else None), piece]
        messages.append(Message(role, "".join(written)))
    return replace(row, messages=tuple(messages), boxes=())
