"""Every fault that zoo/engine/megatron/compat.py names is there, and a shim mends it; one that is mended upstream asks to be
removed."""

import contextlib
import importlib.util
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from zoo.engine.megatron import compat
from zoo.errors import UserError
from zoo.packing import PackedLayout

REPO = Path(__file__).parents[4]


def shim(name: str) -> compat.Shim:
    return next(s for s in compat.SHIMS if s.name == name)


def remove_me(name: str) -> NoReturn:
    """The installed megatron-core no longer has the fault."""
    fault = next(f for f in (*compat.SHIMS, *compat.AVOIDED) if f.name == name)
    what = f"what zoo does instead: {fault.instead}" if isinstance(fault, compat.Avoided) else "the shim"
    pytest.fail(f"mended upstream: remove me: {name} in zoo/engine/megatron/compat.py, and {what}")


@contextmanager
def shows(name: str, *signs: type[Exception], match: str = "") -> Iterator[None]:
    """The fault is that the block raises one of `signs`."""
    try:
        yield
    except signs as error:
        assert re.search(match, str(error)), error
    else:
        remove_me(name)


def group(size: int, rank: int = 0) -> Any:
    """Stands in for a process group where nothing is sent."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def mcore_config(**values: Any) -> Any:
    """A TransformerConfig of one layer, 8 channels and 2 heads."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **values)


class OnTheCpu(TorchFunctionMode):
    """Lets code that names CUDA make its tensors on the CPU, and lists the calls that read a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.item, torch.Tensor.tolist):
            self.read.append(func.__name__)
        return func(*args, **kwargs)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTheCpu]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with OnTheCpu() as mode:
        yield mode


def test_every_fault_has_a_test_and_a_file_that_is_there() -> None:
    for fault in (*compat.SHIMS, *compat.AVOIDED):
        assert f"test_{fault.name.replace('-', '_')}" in globals(), f"{fault.name}: its test is missing"
        known = Version(version("megatron-core")) <= Version(fault.last_broken)
        assert known, f"{fault.name}: look whether this version has it, and say so or remove it"
    for avoided in compat.AVOIDED:
        files = re.findall(r"zoo/[\w/.]*\w", avoided.instead)
        assert files and all((REPO / file).exists() for file in files), avoided.instead


def test_the_table_of_the_documentation_holds_every_fault() -> None:
    page = (REPO / "docs/megatron-faults.md").read_text()
    for fault in (*compat.SHIMS, *compat.AVOIDED):
        does = fault.instead if isinstance(fault, compat.Avoided) else "fixed by a shim"
        row = f"| {fault.name} | {fault.fault} | {does} |"
        assert row in page, f"docs/megatron-faults.md lacks the row\n{row}"
    assert page.count("| fixed by a shim |") == len(compat.SHIMS)


ANOTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.19.99" if name == "megatron-core" else real(name)
from zoo.engine.megatron import compat, probes
print(sorted(probes.pickles_that_ran()), probes.moments_are_saved_whole())
compat.install()
print(sorted(probes.pickles_that_ran()), probes.moments_are_saved_whole())
print(sorted(compat._applied) == sorted(shim.name for shim in compat.SHIMS))
"""


def test_another_version_of_megatron_core_switches_no_shim_off() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANOTHER_VERSION], capture_output=True, text=True, cwd=REPO
    )
    assert done.stdout.splitlines() == ["['common state', 'index', 'object'] False", "[] True", "True"], (
        done.stderr
    )


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leaves one shim, as if none had been applied."""

    def leave(name: str, **changes: Any) -> compat.Shim:
        one = replace(shim(name), **changes)
        monkeypatch.setattr(compat, "SHIMS", (one,))
        monkeypatch.setattr(compat, "_applied", set())
        return one

    return leave


def broken() -> bool:
    raise AttributeError("it has another shape")


def test_a_shim_stays_on_unless_a_probe_of_its_fault_says_that_it_is_gone(only: Any) -> None:
    calls: list[str] = []
    for gone, applied in ((None, 1), (lambda: False, 1), (broken, 1), (lambda: True, 0)):
        only("norms-one-by-one", apply=lambda: calls.append("applied"), gone=gone)
        calls.clear()
        compat.install()
        compat.install()  # once a process
        assert len(calls) == applied


def test_a_shim_that_does_not_take_ends_the_start_where_data_or_safety_hang_on_it(only: Any) -> None:
    for changes in ({"apply": broken}, {"works": broken}, {"works": lambda: False}):
        only("norms-one-by-one", **changes, risk="something would be lost")
        for _ in range(2):  # at every start
            with pytest.raises(
                UserError, match=r"norms-one-by-one.*something would be lost; install megatron-core 0"
            ):
                compat.install()
        only("norms-one-by-one", **changes, risk=None)
        with pytest.warns(UserWarning, match="norms-one-by-one"):
            compat.install()


def test_what_keeps_data_and_people_safe_is_marked_so() -> None:
    risky = {one.name for one in compat.SHIMS if one.risk}
    assert risky == {"checkpoints-run-pickles", "optimizer-state-shifted-by-padding"}
    assert shim("checkpoints-run-pickles").gone is None  # on, whatever a probe says


def test_a_reader_that_goes_past_the_safe_one_is_seen(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later megatron-core might have it: other names, or another way to the files."""
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed.checkpoint import FileSystemReader

    only("checkpoints-run-pickles")
    monkeypatch.setattr(
        torch_dist, "MCoreLoadPlanner", torch_dist.MCoreLoadPlanner
    )  # what is replaced comes back
    compat.install()
    load = torch_dist.TorchDistLoadShardedStrategy.load

    def past(self: Any, wanted: Any, folder: Any, *more: Any) -> Any:
        FileSystemReader(str(folder)).read_metadata()
        return load(self, wanted, folder, *more)

    only("checkpoints-run-pickles")
    with monkeypatch.context() as patch:
        patch.setattr(torch_dist.TorchDistLoadShardedStrategy, "load", past)
        patch.setattr(
            "megatron.core.dist_checkpointing.serialization._legacy_common_state_exists", lambda _: True
        )
        patch.setattr("megatron.core.dist_checkpointing.serialization.load_common", lambda _: {"step": 0})
        patch.setattr("zoo.engine.megatron.safe_reading.common_state", lambda _: {"step": 0})
        with pytest.raises(UserError, match="could run anything"):
            compat.install()
    with monkeypatch.context() as patch:
        patch.delattr(torch_dist, "_get_filesystem_reader")
        with pytest.raises(UserError, match=r"_get_filesystem_reader.*could run anything"):
            compat.install()


def test_moments_that_are_described_otherwise_end_the_start(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "sharded_param_state_fully_reshardable"
    only("optimizer-state-shifted-by-padding")
    with monkeypatch.context() as patch:
        patch.setattr(DistributedOptimizer, name, lambda self: {})
        with pytest.raises(UserError, match="other moments and weights"):
            compat.install()
    with (
        monkeypatch.context() as patch
    ):  # one that is right is left alone: the shim would shift what it saves
        patch.setattr(DistributedOptimizer, name, inspect.unwrap(getattr(DistributedOptimizer, name)))
        shim("optimizer-state-shifted-by-padding").apply()
        right = getattr(DistributedOptimizer, name)
        compat.install()
        assert getattr(DistributedOptimizer, name) is right


def count(router_class: Any) -> torch.Tensor:
    """Tokens per expert of three tokens, the last of them padding, two experts."""
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    routing_map = torch.tensor([[True, False], [False, True], [True, True]])
    padding = torch.tensor([False, False, True])
    router_class._apply_expert_bias(router, routing_map, padding)
    return router.local_tokens_per_expert


def test_expert_bias_mask() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from zoo.nn.decoder.router import Router

    try:
        broken = count(TopKRouter)
    except RuntimeError:
        broken = None
    if broken is not None and broken.tolist() == [1.0, 1.0]:
        remove_me("expert-bias-mask")
    assert count(Router).tolist() == [1.0, 1.0]


def test_save_without_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    asked: list[str] = []
    context = SimpleNamespace(Manager=lambda: SimpleNamespace(Queue=lambda: asked.append("manager")))
    monkeypatch.setattr(filesystem_async.mp, "get_context", lambda mode: context)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    filesystem_async.get_write_results_queue()
    if not asked:
        remove_me("save-without-a-manager")
    asked.clear()
    shim("save-without-a-manager").apply()
    filesystem_async.get_write_results_queue()
    assert not asked


def test_norms_one_by_one(on_the_cpu: OnTheCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils

    read: list[torch.Tensor] = []
    as_float, make = torch.Tensor.__float__, torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, device=None, **options: make(*values, **options))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: read.append(x) or as_float(x))
    gradients = [torch.full((3,), 2.0), torch.full((4,), 1.0)]
    broken, _ = utils.local_multi_tensor_l2_norm(0, None, [gradients], False)
    if not read:
        remove_me("norms-one-by-one")
    read.clear()
    mended, _ = compat.l2_norm(0, None, [gradients], False)
    assert not read and torch.equal(mended, broken) and mended.item() == 4.0
    compat.scale_in_place(0, None, [gradients, gradients], 0.5)
    compat.scale_in_place(0, None, [[], []], 0.5)  # of a rank that holds no gradient
    assert gradients[0].tolist() == [1.0] * 3


def saved_weights() -> dict[str, list[float]]:
    """fp32 weights as a save cuts them: two parameters, each in a bucket that is padded to eight elements."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameters = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0, 5.0])}
    first, second = parameters.values()
    buckets = [SimpleNamespace(grad_data=torch.zeros(8), numel_unpadded=len(p)) for p in (first, second)]
    ranges = {first: (0, 3, 0), second: (8, 10, 1)}
    buffer = SimpleNamespace(param_index_map=ranges, buckets=buckets, numel_unpadded=5)
    together = {"param": torch.cat([first, second]), "numel_unpadded": 5}
    optimizer = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{torch.float32: [{}, {}]}],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: together}},
    )
    described = {name: ShardedTensor.from_rank_offsets(name, p) for name, p in parameters.items()}
    saved = DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, described, False, {})
    assert buffer.param_index_map is ranges
    return {state["param"].key: state["param"].data.tolist() for state in saved.values()}


def test_optimizer_state_shifted_by_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "sharded_param_state_fully_reshardable"
    original = inspect.unwrap(getattr(DistributedOptimizer, name))
    monkeypatch.setattr(DistributedOptimizer, name, original)
    wanted = {"optimizer.state.param.a": [1.0, 2.0, 3.0], "optimizer.state.param.b": [4.0, 5.0]}
    if saved_weights() == wanted:
        remove_me("optimizer-state-shifted-by-padding")
    shim("optimizer-state-shifted-by-padding").apply()
    assert saved_weights() == wanted


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.path, 0o777, True)


def read_index_and_object(torch_dist: Any, folder: Path) -> None:
    """What megatron-core does with the index of a checkpoint, and with an object in it."""
    for reading in (
        lambda: torch_dist._get_filesystem_reader(folder).read_metadata(),
        lambda: load_object(torch_dist, folder),
    ):
        with contextlib.suppress(
            AttributeError, UserError
        ):  # what it makes of a folder in the place of an index
            reading()


def load_object(torch_dist: Any, folder: Path) -> None:
    planner = torch_dist.MCoreLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.state_dict = {}
    item = SimpleNamespace(dest_index=SimpleNamespace(fqn="object"))
    planner.load_bytes(item, io.BytesIO((folder / "object").read_bytes()))


def test_checkpoints_run_pickles(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    sprung = [tmp_path / "by the index", tmp_path / "by the object"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(sprung[0])))
    torch.save([Trap(sprung[1])], tmp_path / "object")
    assert torch_dist.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{torch_dist.__name__}_anew", torch_dist.__file__)
    assert spec is not None and spec.loader is not None
    unmended = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unmended)
    read_index_and_object(unmended, tmp_path)
    if not all(path.is_dir() for path in sprung):
        remove_me("checkpoints-run-pickles")
    for path in sprung:
        path.rmdir()
    shim("checkpoints-run-pickles").apply()
    read_index_and_object(torch_dist, tmp_path)
    assert not any(path.exists() for path in sprung)


def gated_delta_net() -> Any:
    """mcore's layer, 2 heads of 4 channels, with nothing but identities around its own weights."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    config = mcore_config(
        linear_conv_kernel_dim=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        perform_initialization=False,
    )
    groups = SimpleNamespace(tp=group(1), cp=group(1))
    return GatedDeltaNet(config, GatedDeltaNetSubmodules(), pg_collection=groups)


def test_gated_delta_net_needs_fla(monkeypatch: pytest.MonkeyPatch, on_the_cpu: OnTheCpu) -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    monkeypatch.setattr(common, "HAVE_FLA", False)  # as where flash-linear-attention is not installed
    monkeypatch.setattr(gdn, "chunk_gated_delta_rule", None)
    with shows("gated-delta-net-needs-fla", ImportError, AssertionError):
        gated_delta_net()
    shim("gated-delta-net-needs-fla").apply()
    layer = gated_delta_net()
    assert layer.conv1d.weight.shape == (24, 1, 4)  # queries, keys and values


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
    from zoo.nn.decoder.rotary import axis_of_frequency

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
                assert switch not in path.read_text(), (
                    f"{path} reaches a schedule that drops the padding mask"
                )


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

    from zoo.nn.decoder.router import Router

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
    assert torch.equal(Router.gating(router, x), logits)  # type: ignore[arg-type]
    assert not asked


def test_z_loss_averages_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import router

    monkeypatch.setattr(
        router, "get_moe_metrics_tracker", lambda: SimpleNamespace(record=lambda *args, **kwargs: None)
    )
    rank = SimpleNamespace(
        config=mcore_config(moe_z_loss_coeff=1.0),
        training=True,
        calculate_per_token_loss=False,
        is_mtp_layer=False,
        layer_number=1,
        tp_cp_group=group(2),
        tp_dp_cp_group=None,
    )
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
