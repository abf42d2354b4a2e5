"""PackedLayout against naive per-segment references, over random ragged lengths."""

import copy
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zoo.packing import PackedLayout

MANY = settings(max_examples=40, deadline=None)
LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=6)
ALIGN = st.sampled_from([1, 2, 3, 8])
SIDES = st.sampled_from(["left", "right"])


def masked(lengths, side, slack=0):
    """(B, T) mask of rows padded on one side, `slack` tokens wider than the longest."""
    width = max(lengths) + slack
    rows = [[0] * (width - n) + [1] * n if side == "left" else [1] * n + [0] * (width - n) for n in lengths]
    return torch.tensor(rows, dtype=torch.bool)


def causal(mask):
    """(B, 1, T, T) form of a (B, T) mask."""
    return (mask[:, None, None, :] & mask[:, None, :, None]).tril()


def naive_pack(rows, padded_lengths, fill):
    """One segment after another, by Python lists."""
    row = []
    for tokens, padded in zip(rows, padded_lengths, strict=True):
        row += list(tokens) + [fill] * (padded - len(tokens))
    return row


@MANY
@given(LENGTHS, ALIGN, st.one_of(st.none(), st.integers(0, 5)))
@example([1], 1, None)
@example([1, 1], 8, 0)
@example([8], 8, None)
def test_properties_agree_with_a_naive_walk(lengths, align, tail):
    aligned = [-(-n // align) * align for n in lengths]
    pad_to = None if tail is None else sum(aligned) + tail * align
    layout = PackedLayout.from_lengths(lengths, align=align, pad_to=pad_to)
    aligned[-1] += (tail or 0) * align
    assert layout.lengths == tuple(lengths)
    assert layout.padded_lengths == tuple(aligned)
    assert all(padded % align == 0 for padded in layout.padded_lengths)
    assert layout.num_segments == len(lengths)
    assert layout.total == sum(aligned) == layout.cu_seqlens_padded[-1]
    assert pad_to in (None, layout.total)
    assert layout.real_tokens == sum(lengths) == layout.cu_seqlens[-1]
    assert layout.max_seqlen == max(aligned)
    assert type(layout.max_seqlen) is int
    for offsets, expected in ((layout.cu_seqlens, lengths), (layout.cu_seqlens_padded, aligned)):
        assert offsets.dtype == torch.int32
        assert offsets.diff().tolist() == list(expected)
        assert offsets[0] == 0
    expected = [(i, p, p >= n) for i, n in enumerate(lengths) for p in range(aligned[i])]
    assert layout.padding_mask[0].tolist() == [pad for _, _, pad in expected]
    assert layout.padding_mask.dtype == torch.bool
    assert layout.padding_mask.sum() == layout.total - layout.real_tokens
    assert layout.segment_ids[0].tolist() == [-1 if pad else i for i, _, pad in expected]
    assert layout.positions[0].tolist() == [p for _, p, _ in expected]
    assert layout.positions.dtype == torch.int64
    assert layout.positions.shape == layout.segment_ids.shape == layout.padding_mask.shape == (1, layout.total)


@MANY
@given(LENGTHS, ALIGN, SIDES, st.integers(0, 3), st.booleans())
def test_masks_give_the_layout_of_their_lengths(lengths, align, side, slack, four_d):
    mask = masked(lengths, side, slack)
    given_mask = causal(mask) if four_d else mask
    expected = PackedLayout.from_lengths(lengths, align=align)
    for form in (given_mask, given_mask.long()):
        layout = PackedLayout.from_mask(form, align=align)
        assert layout == expected
        assert hash(layout) == hash(expected)
    assert layout.width == mask.shape[1]


def attends(mask, kind, queries):
    """(B, 1, T, T) mask, True where query attends key; `queries`: those of padding attend nothing."""
    out = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    if queries:
        out = out & mask[:, None, :, None]
    return out.tril() if kind == "causal" else out


@MANY
@given(
    LENGTHS, SIDES, st.integers(0, 3), st.sampled_from(["causal", "full"]), st.booleans(), st.booleans(), st.booleans()
)
@example([3, 5, 7], "right", 1, "causal", True, True, False)
@example([3, 5, 7], "right", 1, "causal", False, True, True)
@example([3, 5, 7], "left", 1, "full", False, True, False)
@example([1, 1], "right", 2, "causal", False, True, False)
@example([1, 1], "right", 2, "causal", False, False, False)
def test_a_mask_is_never_read_upside_down(lengths, side, slack, kind, queries, megatron, whole_numbers):
    """With its sense named it gives its lengths; without, its lengths or, where it may be the other one, an error."""
    attend = attends(masked(lengths, side, slack), kind, queries)
    given_mask = ~attend if megatron else attend
    if whole_numbers:
        given_mask = given_mask.long()
    named = PackedLayout.from_mask(given_mask, masked_is_true=megatron)
    assert named.lengths == tuple(lengths)
    assert named.starts == PackedLayout.from_mask(masked(lengths, side, slack)).starts
    all_full = not slack and len(set(lengths)) == 1
    if not megatron and ((kind == "causal" and max(lengths) > 1) or queries or all_full):
        assert PackedLayout.from_mask(given_mask).lengths == tuple(lengths)
    else:
        try:
            assert PackedLayout.from_mask(given_mask).lengths == tuple(lengths)
        except ValueError as error:
            assert "masked_is_true=False" in str(error) and "Megatron" in str(error)
    if kind == "causal" and max(lengths) > 1:  # the wrong sense by name: an error as well
        with pytest.raises(ValueError, match="sense"):
            PackedLayout.from_mask(given_mask, masked_is_true=not megatron)


def test_a_two_dimensional_mask_of_the_other_sense():
    mask = masked([3, 5, 7], "right", 1)
    for form in (~mask, (~mask).long()):
        assert PackedLayout.from_mask(form, masked_is_true=True).lengths == (3, 5, 7)


@MANY
@given(LENGTHS, ALIGN, SIDES, st.integers(0, 3), st.sampled_from([(), (3,)]))
def test_pack_and_unpack_are_inverse_on_real_tokens(lengths, align, side, slack, tail_shape):
    mask = masked(lengths, side, slack)
    layout = PackedLayout.from_mask(mask, align=align, pad_to=sum(-(-n // align) * align for n in lengths) + align)
    x = torch.randn(*mask.shape, *tail_shape, dtype=torch.float64, requires_grad=True)
    packed = layout.pack(x, fill=7)
    if not tail_shape:
        rows = [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]
        assert packed[0].tolist() == naive_pack(rows, layout.padded_lengths, 7)
    assert packed.shape == (1, layout.total, *tail_shape)
    assert (packed[layout.padding_mask] == 7).all()
    back = layout.unpack(packed, fill=-1)
    torch.testing.assert_close(back[mask], x[mask], rtol=0, atol=0)
    assert (back[~mask] == -1).all()
    torch.testing.assert_close(layout.pack(back, fill=7), packed, rtol=0, atol=0)
    samples = [row[keep] for row, keep in zip(x, mask, strict=True)]
    torch.testing.assert_close(layout.pack_list(samples, fill=7), packed, rtol=0, atol=0)
    # A token's gradient is what arrives at its place; padding gets and gives none.
    weight = torch.randn_like(back)
    (grad,) = torch.autograd.grad((back * weight).sum(), x)
    torch.testing.assert_close(grad, weight * mask.view(*mask.shape, *(1 for _ in tail_shape)), rtol=0, atol=0)


def test_padding_of_the_batch_cannot_poison_gradients():
    layout = PackedLayout.from_lengths([1, 3], align=4)
    x = torch.randn(2, 3)
    x[0, 1:] = float("nan")
    x.requires_grad_()
    (layout.pack(x) ** 2).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_pack_keeps_the_dtype(dtype):
    layout = PackedLayout.from_lengths([2, 3], align=4)
    x = torch.ones(2, 3).to(dtype)
    assert layout.pack(x).dtype == layout.unpack(layout.pack(x)).dtype == dtype


def test_unpack_is_right_padded_to_the_longest_or_to_a_width():
    layout = PackedLayout.from_lengths([1, 3], align=2)
    row = torch.arange(1, 7)[None]
    assert layout.unpack(row).tolist() == [[1, 0, 0], [3, 4, 5]]
    assert layout.unpack(row, width=5, fill=-1).tolist() == [[1, -1, -1, -1, -1], [3, 4, 5, -1, -1]]


def attended_pairs(positions):
    """Causal (query, key) pairs of the queries at these positions of one segment."""
    return sum(position + 1 for position in positions)


@MANY
@given(LENGTHS, st.sampled_from([1, 2, 3, 4]))
@example([1], 4)
@example([16], 4)
def test_cp_indices_partition_the_row_evenly(lengths, size):
    layout = PackedLayout.from_lengths(lengths, align=2 * size)
    shards = [layout.cp_index(rank, size) for rank in range(size)]
    assert all(shard.dtype == torch.int64 and shard.shape == (layout.total // size,) for shard in shards)
    assert sorted(torch.cat(shards).tolist()) == list(range(layout.total))
    starts = layout.cu_seqlens_padded.tolist()
    for rank, shard in enumerate(shards):
        expected = []
        for start, padded in zip(starts, layout.padded_lengths, strict=False):
            chunks = torch.arange(start, start + padded).chunk(2 * size)
            expected += chunks[rank].tolist() + chunks[2 * size - 1 - rank].tolist()
        assert shard.tolist() == expected
    owner = torch.arange(layout.num_segments).repeat_interleave(torch.tensor(layout.padded_lengths))
    for segment in range(layout.num_segments):
        costs = {attended_pairs(layout.positions[0][shard[owner[shard] == segment]].tolist()) for shard in shards}
        assert len(costs) == 1
    x = torch.randn(layout.total)
    gathered = torch.cat([x[shard] for shard in shards])
    torch.testing.assert_close(gathered[layout.cp_restore_index(size)], x, rtol=0, atol=0)


def test_cp_size_one_keeps_an_odd_row_whole():
    assert PackedLayout.from_lengths([3]).cp_index(0, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PackedLayout.from_lengths([]), ValueError, "empty batch"),
        (lambda: PackedLayout.from_lengths([3, 0]), ValueError, "Segment 1 has length 0"),
        (lambda: PackedLayout.from_lengths([3, 2.5]), TypeError, "Segment 1 has length 2.5"),
        (lambda: PackedLayout.from_lengths(torch.tensor([3])), TypeError, "tensor"),
        (lambda: PackedLayout.from_lengths([3], align=0), ValueError, "align is 0"),
        (lambda: PackedLayout.from_lengths([3, 5], 4, pad_to=8), ValueError, "12 tokens.*over pad_to 8; raise pad_to"),
        (lambda: PackedLayout.from_lengths([3, 5], 4, pad_to=14), ValueError, "multiple of align 4.*use 16"),
        (lambda: PackedLayout.from_lengths([3, 6], 2).cp_index(0, 2), ValueError, "Segment 1 has padded length 6"),
        (lambda: PackedLayout.from_lengths([6]).cp_restore_index(2), ValueError, "Segment 0 has padded length 6"),
        (lambda: PackedLayout.from_lengths([9], pad_to=8), ValueError, "take 9 tokens .*over pad_to 8"),
        (lambda: PackedLayout.from_lengths([4]).cp_index(2, 2), ValueError, "CP rank is 2"),
        (lambda: PackedLayout.from_lengths([4]).cp_index(0, 0), ValueError, "CP size is 0"),
    ],
)
def test_bad_lengths_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(0, 4, dtype=torch.bool), ValueError, "empty batch"),
        (torch.ones(2, 0, dtype=torch.bool), ValueError, "Row 0 .* no real token"),
        (torch.tensor([[1, 1], [0, 0]]), ValueError, "Row 1 .* no real token"),
        (torch.tensor([[1, 1, 1], [1, 0, 1]]), ValueError, "Row 1 .* hole"),
        (torch.tensor([[1, 1, 0], [1, 2, 2]]), ValueError, "Row 1 .* other than 0 and 1"),
        (torch.ones(2, 3), TypeError, "float32"),
        (torch.ones(3, dtype=torch.bool), ValueError, r"\(3,\)"),
        (torch.ones(2, 1, 1, 3, dtype=torch.bool), ValueError, r"\(2, 1, 1, 3\)"),
        (~causal(torch.ones(1, 3, dtype=torch.bool)), ValueError, "Megatron"),
        (torch.eye(3, dtype=torch.bool).expand(2, 1, 3, 3), ValueError, "Row 0 .* hides a real token"),
    ],
)
def test_bad_masks_are_refused_by_row(mask, error, message):
    with pytest.raises(error, match=message):
        PackedLayout.from_mask(mask)


def test_disagreeing_tensors_are_refused():
    layout = PackedLayout.from_mask(masked([2, 3], "left", slack=1))
    with pytest.raises(ValueError, match="B=2"):
        layout.pack(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"5 tokens wide.*was 4"):
        layout.pack(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="T=5"):
        layout.unpack(torch.zeros(1, 6))
    with pytest.raises(ValueError, match="Row 0 ends at token 4"):
        layout.unpack(torch.zeros(1, 5), width=3)
    with pytest.raises(ValueError, match="Sample 1 has shape"):
        layout.pack_list([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match="1 samples"):
        layout.pack_list([torch.zeros(2)])
    with pytest.raises(ValueError, match="Row 1 ends at token 3"):
        PackedLayout.from_lengths([2, 3]).pack(torch.zeros(2, 2))


def test_a_layout_is_an_immutable_value():
    layout = PackedLayout.from_mask(masked([2, 3], "left"), align=4)
    with pytest.raises(AttributeError):
        layout.lengths = (1,)
    assert layout != PackedLayout.from_lengths([2, 3], align=8)
    layout.positions  # noqa: B018  (fills the cache that copies must leave behind)
    for twin in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout)), layout.to("cpu")):
        assert twin == layout
        assert (twin.starts, twin.width, twin.align) == (layout.starts, layout.width, layout.align)
    assert len(pickle.dumps(layout)) == len(pickle.dumps(copy.deepcopy(layout)))


def test_evaluation_leaves_no_trace_on_training():
    layout = PackedLayout.from_lengths([2, 3], align=4)
    with torch.inference_mode():
        layout.pack(torch.randn(2, 3))
        layout.cp_index(0, 2)
    x = torch.randn(2, 3, requires_grad=True)
    layout.pack(x).index_select(1, layout.cp_index(0, 2)).sum().backward()
    assert x.grad is not None


def test_tensors_follow_the_device_not_the_default():
    layout = PackedLayout.from_lengths([2, 3], align=4)
    with torch.device("meta"):
        assert layout.positions.device.type == "cpu"
    meta = layout.to("meta")
    assert {t.device.type for t in (meta.cu_seqlens, meta.padding_mask, meta.cp_index(0, 2))} == {"meta"}
    assert layout.cu_seqlens.device.type == "cpu"


@given(LENGTHS, ALIGN)
@settings(max_examples=10, deadline=None)
def test_packed_seq_params_are_those_mcore_would_make(lengths, align):
    params_module = pytest.importorskip("megatron.core.packed_seq_params")
    layout = PackedLayout.from_lengths(lengths, align=align)
    params = layout.packed_seq_params()
    assert params.qkv_format == "thd"
    torch.testing.assert_close(params.cu_seqlens_q, layout.cu_seqlens, rtol=0, atol=0)
    torch.testing.assert_close(params.cu_seqlens_kv, layout.cu_seqlens, rtol=0, atol=0)
    torch.testing.assert_close(params.cu_seqlens_q_padded, layout.cu_seqlens_padded, rtol=0, atol=0)
    torch.testing.assert_close(params.cu_seqlens_kv_padded, layout.cu_seqlens_padded, rtol=0, atol=0)
    assert (type(params.max_seqlen_q), params.max_seqlen_q, params.max_seqlen_kv) == (int, *[layout.max_seqlen] * 2)
    assert params.total_tokens == layout.total
    assert params.pad_between_seqs == (layout.total > layout.real_tokens)
    own = params_module.PackedSeqParams(cu_seqlens_q_padded=layout.cu_seqlens_padded, total_tokens=layout.total)
    torch.testing.assert_close(params.seq_idx, own.seq_idx, rtol=0, atol=0)
    assert params.seq_idx.dtype == own.seq_idx.dtype
    assert layout.packed_seq_params(device="meta").cu_seqlens_q.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packing_never_waits_for_the_device():
    lengths = [5, 3, 8]
    x = torch.randn(3, 8, 2, device="cuda", requires_grad=True)
    PackedLayout.from_lengths([1]).to("cuda").positions  # noqa: B018  (warms the allocators up)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = PackedLayout.from_lengths(lengths, align=4)
        packed = layout.pack(x)
        back = layout.unpack(packed)
        shard = packed.index_select(1, layout.to("cuda").cp_index(0, 2))
        (back.sum() + shard.sum() + layout.to("cuda").padding_mask.sum()).backward()
        params = layout.packed_seq_params(device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert params.cu_seqlens_q.is_cuda
    assert params.seq_idx.is_cuda
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    torch.testing.assert_close(back.cpu()[mask], x.detach().cpu()[mask], rtol=0, atol=0)


def test_without_batch_pads_on_the_right() -> None:
    """What a left-padded batch becomes where segments are laid side by side under a causal mask."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1]])
    layout = PackedLayout.from_mask(mask, align=2)
    row = layout.pack(torch.arange(1, 13).view(3, 4))
    plain = layout.without_batch()
    assert plain == layout and plain.width is None
    assert plain.unpack(row).tolist() == [[3, 4, 0], [5, 6, 7], [12, 0, 0]]
    assert layout.unpack(row).tolist() == [[0, 0, 3, 4], [5, 6, 7, 0], [0, 0, 0, 12]]
    assert plain.without_batch() is plain


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_positions_pack_unpack_and_split_along_their_own_dimension(align: int, dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    layout = PackedLayout.from_mask(mask, align)
    x = torch.arange(30).view(2, 3, 5).to(dtype)
    packed = layout.pack(x, batch_dim=1)
    assert packed.shape == (2, 1, layout.total)
    torch.testing.assert_close(packed[1], layout.pack(x[1]), rtol=0, atol=0)
    back = layout.unpack(packed, batch_dim=1)
    torch.testing.assert_close(back, x * mask.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(layout.unpack(packed, 7, batch_dim=1)[0], layout.unpack(packed[0], 7), rtol=0, atol=0)
    for size in (1, 2) if align == 4 else (1,):
        for rank in range(size):
            index = layout.cp_index(rank, size)
            torch.testing.assert_close(layout.cp_shard(packed, rank, size, dim=2), packed[:, :, index], rtol=0, atol=0)
            torch.testing.assert_close(layout.cp_shard(packed[0], rank, size), packed[0][:, index], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"batch has shape \(3, 5\)"):
        layout.pack(x[0], batch_dim=1)
    with pytest.raises(ValueError, match="tokens are wanted at dimension 1"):
        layout.cp_shard(packed, 0, 1)


def test_what_arrives_at_padding_cannot_poison_gradients() -> None:
    layout = PackedLayout.from_lengths([3, 1], align=4)
    x = torch.ones(2, 3, requires_grad=True)
    packed = layout.pack(x)
    packed.backward(torch.where(layout.padding_mask, float("nan"), 2.0))
    torch.testing.assert_close(x.grad, torch.tensor([[2.0, 2, 2], [2, 0, 0]]), rtol=0, atol=0)

    y = torch.ones(1, 8)
    y[layout.padding_mask] = float("nan")
    y.requires_grad_()
    back = layout.unpack(y, width=4)
    torch.testing.assert_close(back, torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]]), rtol=0, atol=0)
    back.backward(torch.where(torch.arange(4) < torch.tensor([[3], [1]]), 2.0, float("nan")))
    torch.testing.assert_close(y.grad, torch.where(layout.padding_mask, 0.0, 2.0), rtol=0, atol=0)
