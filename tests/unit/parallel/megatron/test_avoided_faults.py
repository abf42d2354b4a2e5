"""Every fault of megatron-core that zoo avoids is there; a test fails once megatron-core has fixed it."""

import gc
import inspect
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine import single_process_world
from support.megatron_faults import OnTheCpu, group, mcore_config, remove_me, shows

from zoo.packing import PackedLayout

REPO = Path(__file__).parents[4]


def count(router_class: Any) -> torch.Tensor:
    """Tokens per expert of three tokens, the last of them padding, two experts."""
    router = SimpleNamespace(enable_expert_bias=True, frozen_expert_bias=False, local_tokens_per_expert=torch.zeros(2))
    routing_map = torch.tensor([[True, False], [False, True], [True, True]])
    padding = torch.tensor([False, False, True])
    router_class._apply_expert_bias(router, routing_map, padding)
    return router.local_tokens_per_expert


def test_expert_bias_mask() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from zoo.nn.decoder.experts.router import Router

    try:
        broken = count(TopKRouter)
    except RuntimeError:
        broken = None
    if broken is not None and broken.tolist() == [1.0, 1.0]:
        remove_me("expert-bias-mask")
    assert count(Router).tolist() == [1.0, 1.0]


def test_gated_delta_rule_refuses_packing() -> None:
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    x_BTHD, gate_BTH = torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2)
    offsets = PackedLayout.from_lengths([3, 2]).cu_seqlens
    with shows("gated-delta-rule-refuses-packing", AssertionError, match="cu_seqlens"):
        torch_chunk_gated_delta_rule(x_BTHD, x_BTHD, x_BTHD, -gate_BTH, gate_BTH, cu_seqlens=offsets)


def test_gated_delta_net_waits_for_the_device(on_the_cpu: OnTheCpu) -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    layout = PackedLayout.from_lengths([3, 2], align=4)
    resolve = GatedDeltaNet._resolve_cu_seqlens
    resolve(SimpleNamespace(), layout.cu_seqlens_padded, layout.cu_seqlens, layout.total, "cu_seqlens_q")
    if not on_the_cpu.read:
        remove_me("gated-delta-net-waits-for-the-device")


def test_mtp_rolls_by_real_offsets() -> None:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    params = PackedLayout.from_lengths([3, 2], align=4).packed_seq_params()
    packed = torch.tensor([[11, 12, 13, 0, 21, 22, 0, 0]])
    rolled, _ = roll_tensor(packed, shifts=-1, dims=-1, packed_seq_params=params)
    if rolled.tolist() == [[12, 13, 0, 0, 22, 0, 0, 0]]:
        remove_me("mtp-rolls-by-real-offsets")
    assert rolled[0, 3] == 21  # B's first token, in A


def multimodal_rotary() -> Any:
    """mcore's angles of 4 frequencies 1, 1/2, 1/4 and 1/8."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

    return MultimodalRotaryEmbedding(kv_channels=8, rotary_percent=1.0, rotary_base=16, cp_group=group(1))


def test_mrope_zigzags_the_pack(on_the_cpu: OnTheCpu) -> None:
    rotary = multimodal_rotary()
    layout = PackedLayout.from_lengths([4, 4], align=4)
    known = inspect.signature(rotary.forward).parameters
    packed: dict[str, Any] = {"packed_seq": True, "packed_seq_params": layout.packed_seq_params()}
    packed = {name: value for name, value in packed.items() if name in known}
    position_ids = layout.positions.expand(3, 1, -1)
    angles_TB1D = rotary(position_ids, [2, 1, 1], cp_group=group(2), **packed)
    ours = layout.positions[0, layout.cp_index(0, 2)]
    assert ours.tolist() == [0, 3, 0, 3]
    found = angles_TB1D[:, 0, 0, 0].tolist()  # of frequency 1: the positions themselves
    if found == ours.tolist() or len(found) == layout.total:  # whole angles are right: attention cuts them
        remove_me("mrope-zigzags-the-pack")
    assert found == [0, 1, 2, 3]  # chunks 0 and 3 of the pack, where the rank holds tokens 0, 3, 4 and 7


def test_mrope_has_blocks_alone(on_the_cpu: OnTheCpu) -> None:
    from zoo.nn.decoder.attention.rotary import axis_of_frequency

    rotary = multimodal_rotary()
    known = {*inspect.signature(type(rotary)).parameters, *inspect.signature(rotary.forward).parameters}
    if any("interleaved" in name for name in known - {"rotary_interleaved"}):
        remove_me("mrope-has-blocks-alone")
    position_ids = torch.tensor([1, 10, 100]).view(3, 1, 1)  # time, height, width of one token
    angles = rotary(position_ids, [2, 1, 1])[0, 0, 0, :4] / rotary.inv_freq
    axes = [[1, 10, 100].index(round(angle)) for angle in angles.tolist()]
    assert axes == axis_of_frequency([2, 1, 1], interleaved=False) == [0, 0, 1, 2]
    assert axis_of_frequency([2, 1, 1], interleaved=True) == [0, 1, 2, 0]


def test_torch_norm_without_sp() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = mcore_config(tensor_model_parallel_size=2, sequence_parallel=True, normalization="RMSNorm")
    with shows("torch-norm-without-sp", AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, hidden_size=8)


def test_local_attention_refuses_packing() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    groups = SimpleNamespace(tp=group(1))
    attention = DotProductAttention(mcore_config(), 1, AttnMaskType.causal, "self", pg_collection=groups)
    params = PackedLayout.from_lengths([3, 2]).packed_seq_params()
    x_THD = torch.rand(5, 2, 4)
    with shows("local-attention-refuses-packing", AssertionError, match="Packed sequence"):
        attention(x_THD, x_THD, x_THD, None, packed_seq_params=params)


def test_padding_mask_not_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt import gpt_model

    def scatter(x: torch.Tensor, group: Any = None) -> torch.Tensor:
        return x[: x.shape[0] // 2]  # rank 0 of 2

    monkeypatch.setattr(gpt_model.tensor_parallel, "scatter_to_sequence_parallel_region", scatter)
    stage = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=True),
        pre_process=True,
        position_embedding_type="none",
        embedding=lambda input_ids, position_ids: torch.zeros(4, 1, 8),
    )
    mask, ids = torch.zeros(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.int64)
    stage.embedding.scatter_to_sequence_parallel = True
    preprocess = gpt_model.GPTModel._preprocess
    by_ids = preprocess(stage, ids, ids, padding_mask=mask)
    by_embeddings = preprocess(stage, ids, ids, decoder_input=torch.zeros(4, 1, 8), padding_mask=mask)
    assert by_ids[0].shape == by_embeddings[0].shape and by_ids[5].shape == (1, 4)
    if by_embeddings[5].shape == (1, 4):
        remove_me("padding-mask-not-scattered")


def test_ep_overlap_drops_the_mask() -> None:
    from megatron.core.models.gpt import fine_grained_callables

    switch = "overlap_moe_expert_parallel_comm"
    if "padding_mask" in inspect.getsource(fine_grained_callables):
        remove_me("ep-overlap-drops-the-mask")
    assert getattr(mcore_config(), switch) is False
    for folder in ("zoo", "models", "recipes"):
        for path in (REPO / folder).rglob("*.*"):
            if path.suffix in (".py", ".yaml"):
                assert switch not in path.read_text(), f"{path} reaches a schedule that drops the padding mask"


def test_cp_batch_slices_four_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils

    layout = PackedLayout.from_lengths([4, 4], align=4)
    kernels = SimpleNamespace(
        thd_get_partitioned_indices=lambda offsets, total, size, rank: layout.cp_index(rank, size)
    )
    monkeypatch.setattr(utils, "tex", kernels)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)

    def shard(**tensors: torch.Tensor) -> dict[str, Any]:
        offsets = layout.cu_seqlens_padded[None]
        batch = {"cu_seqlens": offsets, "cu_seqlens_padded": offsets, "labels": None, **tensors}
        return utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group(2))

    tokens = torch.arange(8)[None]
    found = shard(tokens=tokens, padding_mask=layout.padding_mask)
    assert found["tokens"].tolist() == [[0, 3, 4, 7]]
    if found["padding_mask"].shape == (1, 4):
        remove_me("cp-batch-slices-four-keys")
    with shows("cp-batch-slices-four-keys", IndexError, RuntimeError):
        shard(tokens=tokens, position_ids=layout.positions.expand(3, 1, -1))


def test_router_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    from zoo.nn.decoder.experts.router import Router

    def gemm(weight: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        asked.append(dtype)
        return [x @ weight.t()]

    asked: list[torch.dtype] = []
    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm, raising=True)
    x, router = torch.randn(5, 3), SimpleNamespace(weight=torch.randn(2, 3), bias=None)
    logits = moe_utils.router_gating_linear(x, router.weight, None, torch.float32)
    if not asked:
        remove_me("router-in-tf32")
    asked.clear()
    torch.testing.assert_close(Router.gating(router, x), logits, rtol=0, atol=0)
    assert not asked


def test_z_loss_averages_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import router

    monkeypatch.setattr(router, "get_moe_metrics_tracker", lambda: SimpleNamespace(record=lambda *args, **kwargs: None))
    flags = {"training": True, "calculate_per_token_loss": False, "is_mtp_layer": False, "layer_number": 1}
    groups = {"tp_cp_group": group(2), "tp_dp_cp_group": None}
    rank = SimpleNamespace(config=mcore_config(moe_z_loss_coeff=1.0), **flags, **groups)
    logits = torch.ones(2, 3, 4, requires_grad=True)  # 2 ranks of 3 tokens and 4 experts
    padding = torch.tensor([[False, False, False], [False, True, True]])
    for tokens, mask in zip(logits, padding, strict=True):
        (router.TopKRouter.apply_z_loss(rank, tokens, mask) * 0).sum().backward()
    assert logits.grad is not None
    weight = logits.grad.sum(-1)[~padding]  # of equal tokens
    if torch.allclose(weight, weight[0]):
        remove_me("z-loss-averages-ranks")
    assert torch.allclose(weight[3] / weight[0], torch.tensor(3.0))  # alone among padding


def test_llava_keeps_old_offsets() -> None:
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    places, splits = LLaVAModel._preprocess_data, LLaVAModel._process_embedding_token_parallel
    if "cu_seqlens" in inspect.getsource(places) or "packed_seq_params" in inspect.getsource(places):
        remove_me("llava-keeps-old-offsets")
    assert "packed_seq_params.cu_seqlens_q_padded" in inspect.getsource(splits)


def test_weights_gathered_twice() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    dense, experts = (SimpleNamespace(buckets=[SimpleNamespace(params_list=[])]) for _ in range(2))
    gathered: list[Any] = []
    chunk = SimpleNamespace(
        bucket_groups=[dense],
        expert_parallel_bucket_groups=[experts],
        _start_bucket_group_param_sync=lambda group, force_sync: gathered.append(group),
    )
    buffer = SimpleNamespace(buckets=dense.buckets)
    optimizer: Any = SimpleNamespace(model_chunks=[chunk], buffers=[buffer], per_model_buffers={0: [buffer]})
    DistributedOptimizer.start_param_sync_for_bucket_group_subset(optimizer)
    if gathered != [dense, experts]:
        remove_me("weights-gathered-twice")


def test_experts_one_by_one() -> None:
    from megatron.core.transformer.moe.experts import SequentialMLP

    called: list[int] = []

    def expert(tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        called.append(len(tokens))
        return tokens, None

    experts = SimpleNamespace(
        config=SimpleNamespace(moe_apply_probs_on_input=False, fp8=None, fp4=None),
        num_local_experts=3,
        local_experts=[expert] * 3,
    )
    SequentialMLP.forward(experts, torch.rand(6, 8), torch.tensor([1, 2, 3]), torch.rand(6))
    if called != [1, 2, 3]:
        remove_me("experts-one-by-one")


def build(module: torch.nn.Module, make: Any, **adam: Any) -> tuple[Any, Any]:
    """DDP around a module and what `make(config, build)` makes of megatron-core's distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(mcore_config(), sharded, module)
    config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, **adam)
    return ddp, make(config, partial(get_megatron_optimizer, config, [ddp], use_gloo_process_groups=False))


def test_mixed_dtypes_swap_states() -> None:
    from zoo.optim.adamw import AdamW
    from zoo.parallel.megatron import inner_optimizer

    def swapped(zoo: bool) -> bool:
        with single_process_world():
            model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(4, 3)]).bfloat16()
            model[1].float()
            make = lambda config, build: inner_optimizer.build(config, AdamW, build) if zoo else build()  # noqa: E731
            _, optimizer = build(model, make, bf16=True)
            (distributed,) = optimizer.chained_optimizers
            ranges = inner_optimizer.held_ranges(distributed)
            return any(held.part.numel() != held.parameter.numel() for held in ranges)

    if not swapped(zoo=False):
        remove_me("mixed-dtypes-swap-states")
    assert not swapped(zoo=True)


def test_ddp_is_never_freed() -> None:
    from zoo.training.optimization import release_ddp

    def stays(release: bool) -> bool:
        with single_process_world():
            ddp, optimizer = build(torch.nn.Linear(2, 2), lambda _, make: make(), params_dtype=torch.float32)
            ddp.config.grad_scale_func = optimizer.scale_loss
            gradients = weakref.ref(ddp.buffers[0].grad_data)
            if release:
                release_ddp([ddp])
            del ddp, optimizer
            gc.collect()
            return gradients() is not None

    if not stays(release=False):
        remove_me("ddp-is-never-freed")
    assert not stays(release=True)
