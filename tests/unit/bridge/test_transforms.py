"""Each transform against index arithmetic, and back to the bit."""

import pytest
import torch

from zoo.bridge import QKV, Copy, Dims, GatedQKV, GateUp, Rows, Transposed

DIMS = Dims(heads=6, kv_heads=2, head_dim=5, experts=3)  # GQA ratio 3


def test_qkv_groups_hold_their_queries_then_key_then_value() -> None:
    q, k, v = torch.randn(30, 7), torch.randn(10, 7), torch.randn(10, 7)
    packed = QKV().to_zoo([q, k, v], DIMS)
    wanted = [q[:15], k[:5], v[:5], q[15:], k[5:], v[5:]]
    torch.testing.assert_close(packed, torch.cat(wanted), rtol=0, atol=0)
    torch.testing.assert_close(tuple(QKV().to_hf(packed, DIMS)), (q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("tail", [(11,), ()], ids=["weights", "biases"])
@pytest.mark.parametrize("dims", [DIMS, Dims(heads=4, kv_heads=4, head_dim=3), Dims(heads=7, kv_heads=1, head_dim=2)])
def test_qkv_round_trip_for_gqa_mha_and_mqa(dims: Dims, tail: tuple[int, ...]) -> None:
    sizes = (dims.heads, dims.kv_heads, dims.kv_heads)
    parts = [torch.randn(count * dims.head_dim, *tail).bfloat16() for count in sizes]
    torch.testing.assert_close(tuple(QKV().to_hf(QKV().to_zoo(parts, dims), dims)), tuple(parts), rtol=0, atol=0)


def test_gated_qkv_groups_hold_queries_then_their_gates() -> None:
    q, k, v = torch.randn(60, 7), torch.randn(10, 7), torch.randn(10, 7)
    packed = GatedQKV().to_zoo([q, k, v], DIMS)
    queries, gates = q.split(5)[0::2], q.split(5)[1::2]  # by head
    wanted = [*queries[:3], *gates[:3], k[:5], v[:5], *queries[3:], *gates[3:], k[5:], v[5:]]
    torch.testing.assert_close(packed, torch.cat(wanted), rtol=0, atol=0)
    torch.testing.assert_close(tuple(GatedQKV().to_hf(packed, DIMS)), (q, k, v), rtol=0, atol=0)


def test_a_transposed_matrix_comes_back() -> None:
    stored = torch.randn(9, 7)
    turned = Transposed().to_zoo([stored], DIMS)
    assert turned.shape == (7, 9)
    torch.testing.assert_close(turned[:, 4], stored[4], rtol=0, atol=0)
    torch.testing.assert_close(Transposed().to_hf(turned, DIMS)[0], stored, rtol=0, atol=0)


def test_rows_lie_below_one_another() -> None:
    parts = [torch.randn(6, 7), torch.randn(5, 7)]
    stack = Rows(lambda dims: (dims.heads, dims.head_dim))
    torch.testing.assert_close(stack.to_zoo(parts, DIMS), torch.cat(parts), rtol=0, atol=0)
    torch.testing.assert_close(tuple(stack.to_hf(torch.cat(parts), DIMS)), tuple(parts), rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        stack.to_hf(torch.empty(12, 7), DIMS)


def test_gate_comes_first() -> None:
    gate, up = torch.randn(9, 7), torch.randn(9, 7)
    joined = GateUp().to_zoo([gate, up], DIMS)
    torch.testing.assert_close(joined[:9], gate, rtol=0, atol=0)
    torch.testing.assert_close(joined[9:], up, rtol=0, atol=0)
    torch.testing.assert_close(tuple(GateUp().to_hf(joined, DIMS)), (gate, up), rtol=0, atol=0)


def test_gate_and_up_must_be_equal() -> None:
    with pytest.raises(ValueError, match="differ"):
        GateUp().to_zoo([torch.empty(9, 7), torch.empty(8, 7)], DIMS)
    with pytest.raises(ValueError, match="halve"):
        GateUp().to_hf(torch.empty(17, 7), DIMS)


def test_copy_is_the_tensor() -> None:
    tensor = torch.randn(3, 4)
    assert Copy().to_zoo([tensor], DIMS) is tensor and Copy().to_hf(tensor, DIMS)[0] is tensor


def test_dims_are_read_off_dicts_and_objects() -> None:
    from types import SimpleNamespace

    full = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 5, "hidden_size": 40}
    wanted = Dims(heads=8, kv_heads=2, head_dim=16, experts=5)
    assert Dims.from_hf(full) == Dims.from_hf(SimpleNamespace(**full)) == wanted
    linear = {"num_key_heads": 2, "key_head_dim": 3, "num_value_heads": 4, "value_head_dim": 5}
    linear = {f"linear_{key}": value for key, value in linear.items()}
    with_linear = Dims.from_hf(full | linear)
    assert (with_linear.linear_keys, with_linear.linear_values, with_linear.linear_value_heads) == (6, 20, 4)
    bare = Dims.from_hf({"num_attention_heads": 8, "hidden_size": 40}, tied=True)
    assert bare == Dims(heads=8, kv_heads=8, head_dim=5, tied=True)
