"""Placeholder expansion against a naive token walk, and the recognition of rows already expanded."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.packing import PackedLayout, already_expanded, expand_index, placeholder_counts

MANY = settings(max_examples=60, deadline=None)
IMAGE = 99


@st.composite
def rows(draw):
    """(lengths, counts): segments with any number of placeholders each, listed in any order."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    counts = []
    for length in lengths:
        at = draw(st.lists(st.integers(0, length - 1), unique=True, max_size=4))
        counts.append([(position, draw(st.integers(1, 6))) for position in at])
    return lengths, counts


def tokens_of(lengths, counts):
    """Samples of ids, counting up, with the placeholders in place."""
    samples = []
    for segment, (length, media) in enumerate(zip(lengths, counts, strict=True)):
        ids = [1000 * (segment + 1) + i for i in range(length)]
        for position, _ in media:
            ids[position] = IMAGE
        samples.append(ids)
    return samples


def naive_expand(samples, counts):
    """Each sample's tokens after expansion, as (source position in the sample, is media)."""
    grown = []
    for ids, media in zip(samples, counts, strict=True):
        number = dict(media)
        grown.append([(i, i in number) for i in range(len(ids)) for _ in range(number.get(i, 1))])
    return grown


@MANY
@given(rows(), st.sampled_from([1, 4]), st.booleans())
def test_expansion_agrees_with_a_naive_walk(row, align, padded):
    lengths, counts = row
    samples = tokens_of(lengths, counts)
    grown = naive_expand(samples, counts)
    roomy = sum(-(-len(g) // align) * align for g in grown) + align if padded else None
    layout = PackedLayout.from_lengths(lengths, align=align, pad_to=roomy)
    new, source, media, media_index = expand_index(layout, counts)
    assert new == layout.expand(counts) == PackedLayout.from_lengths([len(g) for g in grown], align, roomy)
    assert (new.align, new.pad_to) == (align, roomy)
    start = layout.cu_seqlens_padded.tolist()
    expected, is_media = [], []
    for segment, (tokens, room) in enumerate(zip(grown, new.padded_lengths, strict=True)):
        pad = room - len(tokens)
        expected += [start[segment] + i for i, _ in tokens] + [-1] * pad
        is_media += [flag for _, flag in tokens] + [False] * pad
    assert source.shape == media.shape == (1, new.total)
    assert source.dtype == torch.int64
    assert source[0].tolist() == expected
    assert media.dtype == torch.bool
    assert media[0].tolist() == is_media
    assert media_index.tolist() == [i for i, flag in enumerate(is_media) if flag]
    torch.testing.assert_close(source == -1, new.padding_mask, rtol=0, atol=0)


@MANY
@given(rows(), st.sampled_from([1, 4]))
def test_expanded_rows_are_recognised_and_left_alone(row, align):
    lengths, counts = row
    counts = [sorted(media) for media in counts]
    numbers = [[n for _, n in media] for media in counts]
    samples = tokens_of(lengths, counts)
    layout = PackedLayout.from_lengths(lengths, align=align)
    # Padding filled with the placeholder's own id must not be counted.
    ids = layout.pack_list([torch.tensor(ids) for ids in samples], fill=IMAGE)
    trivial = all(n == 1 for media in numbers for n in media)
    assert already_expanded(layout, ids, IMAGE, numbers) is trivial
    found = placeholder_counts(layout, ids, IMAGE, numbers)
    assert found == counts
    new, source, *_ = expand_index(layout, found)
    expanded_ids = ids[0][source.clamp(min=0)]
    assert already_expanded(new, expanded_ids, IMAGE, numbers) is True


def one_row(*samples):
    return PackedLayout.from_lengths([len(s) for s in samples]), torch.tensor([list(chain(*samples))])


def test_touching_media_are_recognised():
    layout, ids = one_row([1, IMAGE, IMAGE, IMAGE, 2])
    assert already_expanded(layout, ids, IMAGE, [[1, 2]])


@pytest.mark.parametrize(
    ("samples", "counts", "message"),
    [
        ([[1], [IMAGE, IMAGE, 2]], [[], [3]], r"Segment 1 holds 2 placeholder.*1 \(one per medium\) or 3"),
        ([[1, IMAGE]], [[]], "Segment 0 holds 1 placeholder"),
        ([[1, 2]], [[4]], "Segment 0 holds 0 placeholder"),
        ([[IMAGE, 5, IMAGE, IMAGE]], [[3]], "Segment 0 is expanded.*after token 0, inside a medium"),
        ([[IMAGE, IMAGE], [IMAGE]], [[2], [2]], "Segment 0 .* expanded and segment 1 has not"),
        ([[IMAGE]], [[0]], "Medium 0 of segment 0 has 0"),
        ([[IMAGE]], [[1], [1]], "2 lists for 1 segments"),
    ],
)
def test_conflicting_rows_are_refused_by_segment(samples, counts, message):
    layout, ids = one_row(*samples)
    with pytest.raises(ValueError, match=message):
        already_expanded(layout, ids, IMAGE, counts)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[], [(2, 3)]], "Segment 1 has 2 tokens; it has no placeholder position 2"),
        ([[(-1, 3)], []], "Segment 0 .* position -1"),
        ([[(0, 0)], []], "position 0 of segment 0 has 0 embeddings"),
        ([[(1, 2), (1, 2)], []], "Segment 0 lists the placeholder position 1 twice"),
        ([[]], "1 lists for 2 segments"),
        ([[(0, 9)], []], "over pad_to 8"),
    ],
)
def test_conflicting_counts_are_refused_by_segment(counts, message):
    with pytest.raises(ValueError, match=message):
        PackedLayout.from_lengths([3, 2], pad_to=8).expand(counts)


def test_other_disagreements_are_refused():
    layout, ids = one_row([1, IMAGE, 2], [3])
    with pytest.raises(ValueError, match=r"Segment 0 holds 1 placeholder tokens .* for 2 media"):
        placeholder_counts(layout, ids, IMAGE, [[2, 2], []])
    with pytest.raises(ValueError, match=r"\(1, T=4\)"):
        already_expanded(layout, ids[0], IMAGE, [[2], []])
