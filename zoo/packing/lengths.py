"""Segment lengths as Python ints: checked, padded and expanded, before any tensor is made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Counts = Sequence[Sequence[tuple[int, int]]]  # (position in the segment, embeddings) of each placeholder


def as_ints(lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
    """The lengths as Python ints; TypeError for a tensor, or for a length that is not an integer."""
    if isinstance(lengths, Tensor):
        raise TypeError("lengths is a tensor; give host integers (`.tolist()`), so that no device sync hides here.")
    for segment, length in enumerate(lengths):
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise TypeError(f"Segment {segment} has length {length!r} ({type(length).__name__}); an int is wanted.")
    return tuple(int(length) for length in lengths)


def padded_lengths(lengths: Sequence[int], align: int, pad_to: int | None) -> tuple[int, ...]:
    """S lengths, each padded to a multiple of `align`; the last one also takes what is missing to `pad_to` in all.

    Raises:
        ValueError: no lengths, a length or `align` below 1, `pad_to` too small or not a multiple of `align`.
    """
    if not lengths:
        raise ValueError("No lengths were given: an empty batch can't be packed.")
    if align < 1:
        raise ValueError(f"align is {align}; it must be at least 1.")
    for segment, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"Segment {segment} has length {length}; drop it, every segment needs a real token.")
    padded = [-(-length // align) * align for length in lengths]
    if pad_to is not None:
        needed = sum(padded)
        if needed > pad_to:
            raise ValueError(
                f"The {len(lengths)} segments take {needed} tokens at align {align}, over pad_to "
                f"{pad_to}; raise pad_to, or plan bins with at most that budget and the same align."
            )
        if pad_to % align:
            raise ValueError(
                f"pad_to is {pad_to}, not a multiple of align {align}: the last segment takes up the "
                f"tail and must stay aligned; use {-(-pad_to // align) * align}."
            )
        padded[-1] += pad_to - needed
    return tuple(padded)


def expanded_lengths(lengths: Sequence[int], counts: Counts) -> list[int]:
    """S lengths after each listed placeholder became its number of embeddings.

    Raises:
        ValueError: the number of lists is not S, a position is outside its segment or listed twice, or a number of
            embeddings is below 1.
    """
    check_segments(lengths, counts)
    for segment, (media, length) in enumerate(zip(counts, lengths, strict=True)):
        seen: set[int] = set()
        for position, number in media:
            if not 0 <= position < length:
                raise ValueError(f"Segment {segment} has {length} tokens; it has no placeholder position {position}.")
            if number < 1:
                raise ValueError(
                    f"The placeholder at position {position} of segment {segment} has {number} embeddings; "
                    "at least 1 is wanted."
                )
            if position in seen:
                raise ValueError(f"Segment {segment} lists the placeholder position {position} twice.")
            seen.add(position)
    grown = [sum(number - 1 for _, number in media) for media in counts]
    return [length + extra for length, extra in zip(lengths, grown, strict=True)]


def check_segments(lengths: Sequence[int], counts: Sequence[Sequence[object]]) -> None:
    """Raise ValueError unless `counts` has one list for each segment."""
    if len(counts) != len(lengths):
        raise ValueError(f"counts has {len(counts)} lists for {len(lengths)} segments; give each segment one.")
