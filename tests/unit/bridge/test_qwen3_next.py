"""The projections of Qwen3-Next's linear attention, as transformers takes them apart and as ranks share them."""

import pytest
import torch

from zoo.bridge import Dims, ShardInfo
from zoo.bridge.mapping.gated_delta_net import QKVZ_BA
from zoo.bridge.parallel import cut, full_shape, join
from zoo.bridges.qwen3_next import BRIDGE

DIMS = Dims(
    heads=16, kv_heads=2, head_dim=256, linear_keys=6, linear_key_heads=3, linear_values=24, linear_value_heads=6
)


def test_rows_of_one_key_head_after_the_other() -> None:
    """Three key heads of 2, each with two value heads of 4, as transformers takes their projections apart."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "num_hidden_layers": 1}
    config = Qwen3NextConfig(
        **sizes, linear_key_head_dim=2, linear_value_head_dim=4, hidden_size=8, layer_types=["linear_attention"]
    )
    qkvz, ba = torch.arange(60.0), torch.arange(60.0, 72.0)
    parts = Qwen3NextGatedDeltaNet(config, 0).fix_query_key_value_ordering(qkvz[None, None], ba[None, None])
    wanted = torch.cat([part.flatten() for part in parts])
    transform = QKVZ_BA[1]
    found = transform.to_zoo([qkvz[:, None], ba[:, None]], DIMS)
    torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=0)
    assert not torch.equal(wanted, torch.arange(72.0))
    back = transform.to_hf(found, DIMS)
    torch.testing.assert_close(back[0][:, 0], qkvz, rtol=0, atol=0)
    torch.testing.assert_close(back[1][:, 0], ba, rtol=0, atol=0)


@pytest.mark.parametrize("tp", [1, 3])
def test_projections_under_tensor_parallelism(tp: int) -> None:
    (entry,) = BRIDGE.publish(["decoder.layers.0.self_attention.in_proj.weight"]).values()
    shard, full = entry.rule.shard_for(DIMS), torch.arange(72 * 8).view(-1, 8)
    infos = [ShardInfo(tp_rank=rank, tp_size=tp) for rank in range(tp)]
    parts = [cut(full, shard, info) for info in infos]
    torch.testing.assert_close(join(parts, shard), full, rtol=0, atol=0)
    assert full_shape(parts[0].shape, shard, infos[0]) == tuple(full.shape)
