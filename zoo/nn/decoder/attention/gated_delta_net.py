"""Gated DeltaNet: linear attention with a decaying state that is corrected rather than summed (arXiv 2412.06464).

The layer is mcore's in its parameters and checkpoints, with a forward of its own: mcore's needs
flash-linear-attention, asks the device for the offsets in every layer, and has no plain rule for packed rows.

Causal convolution and state start anew at every segment: with flash-linear-attention or FlashQLA through its offsets, without
(on a CPU, in fp32 checks) by `delta_rule_inputs` and `gated_delta_rule`, which know the layout.

Context parallelism: where segments are cut, every rank trades its tokens' channels for all tokens of its heads in one all-to-all,
puts them in row order, runs convolution and rule over whole segments, and trades back.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net.common import get_parameter_local_cp
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet as McoreGatedDeltaNet
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch import Tensor

from zoo.errors import UserError
from zoo.nn.decoder.attention import flash_qla
from zoo.nn.decoder.attention.cache import DecodeCache
from zoo.nn.decoder.attention.context_moves import channels_by_rank, in_rank_order, in_row_order, side_by_side
from zoo.nn.decoder.attention.delta_inputs import causal_convolution, delta_rule_inputs, gates
from zoo.nn.decoder.attention.delta_rule_settings import use_shipped_settings
from zoo.nn.decoder.attention.fla_import import import_fla
from zoo.nn.decoder.attention.self_attention import uniform_layout
from zoo.nn.decoder.unused_arguments import refuse_unused
from zoo.nn.graphs.row import CHUNK
from zoo.nn.kernels import fused
from zoo.nn.kernels.widths import fla_takes
from zoo.packages import installed_version
from zoo.packing import PackedLayout
from zoo.packing.index import chunks, cpu_to_device, int64, offsets


class GatedRMSNorm(torch.nn.Module):
    """rms_norm(x) * weight * silu(gate) over a head's width; the norm and the gate in fp32."""

    fp32_parameters = ("weight",)

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate (..., hidden_size); the result has x's dtype."""
        # Tensor-parallel ranks hold other heads: the weight's gradient is summed over them here.
        weight = copy_to_tensor_model_parallel_region(self.weight)
        if fused(x):
            from zoo.nn.kernels.norm import gated_rms_norm

            return gated_rms_norm(x, gate, weight, self.eps)
        normed = F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype) * weight
        return (normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(McoreGatedDeltaNet):
    """Projection, causal convolution, gated delta rule, gated norm, projection. Input and output (T, B, hidden)."""

    fp32_parameters = ("A_log", "dt_bias")

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.A_log.initial = _initial_decay
        self.delta_rule = getattr(self.config, "delta_rule", "auto")  # engine.delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (T', B, hidden): this rank's tokens, of a packed row (B = 1, SeqParams) or of B rows.

        `rotary_pos_emb` comes to every layer; this one has no use for angles, as its state knows the order.
        """
        refuse_unused("GatedDeltaNet", {**unused, "attention_mask": attention_mask})
        mixed, _ = self.in_proj(hidden_states)  # (T / cp, B, channels / tp)
        tokens, batch = mixed.shape[:2]
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            layout = uniform_layout(batch, tokens * self.cp_size).to(mixed.device)
        rows, cache = mixed.transpose(0, 1).flatten(0, 1), getattr(packed_seq_params, "cache", None)
        if self.cp_size > 1 and getattr(packed_seq_params, "cut", True):
            # This rank's tokens become the tokens of its heads, in the order of the row, but for the gate, which is a token's own.
            group, size = self.pg_collection.cp, self.cp_size
            gate_section = self.in_proj_split_names.index("z")
            parts, gate = channels_by_rank(rows, self.in_proj_split_sections, size, gate_section)
            rows = in_row_order(all_to_all(group, parts.flatten(0, 1)), layout, size)
            out, _ = self._mix(rows, layout, cache, cut=True)
            parts = all_to_all(group, in_rank_order(out.flatten(1), layout, size))
            out = side_by_side(parts, size).unflatten(1, (-1, self.value_head_dim))
        else:
            out, gate = self._mix(rows, layout, cache)
        out = self.out_norm(out, gate.reshape(out.shape)).flatten(1)
        return self.out_proj(out.unflatten(0, (batch, tokens)).transpose(0, 1).contiguous())

    def _mix(
        self, rows: Tensor, layout: PackedLayout, cache: DecodeCache | None = None, *, cut: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(N, channels of this rank's heads) -> the rule's output (N, G, V) and the output gate (N, G * V).

        `cut`: the heads are shared out over context-parallel ranks, and the gate is not among the channels; an empty tensor is
        returned in its place.
        """
        every = list(self.in_proj_split_sections[:4])  # queries, keys, values, gate
        parameters = (self.conv1d.weight, self.A_log, self.dt_bias)
        if cut:
            sections = (every[:3], None, None)
            parameters = tuple(
                get_parameter_local_cp(parameter, dim=0, cp_group=self.pg_collection.cp, split_sections=parts)
                for parameter, parts in zip(parameters, sections, strict=True)
            )
            every = [*(section // self.cp_size for section in every[:3]), 0]
        kernel, a_log, dt_bias = parameters
        taps, heads, convolved = kernel.squeeze(1), len(a_log), sum(every[:3])
        if cache is not None:
            gate, beta, alpha = rows[:, convolved:].split([every[3], heads, heads], dim=-1)
            decay, beta = gates(alpha, beta, a_log, dt_bias)
            out = self._mix_cached(rows[:, :convolved], taps, decay, beta, layout, cache)
        else:
            *qkv, gate, decay, beta = delta_rule_inputs(rows, taps, a_log, dt_bias, layout, every)
            out = gated_delta_rule(*self._heads(*qkv), decay, beta, layout, self.delta_rule)
        return out, gate

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, width) each -> query, key (N, H, K), value (N, G, V)."""
        widths = (self.key_head_dim, self.key_head_dim, self.value_head_dim)
        query, key, value = (x.unflatten(-1, (-1, width)) for x, width in zip((query, key, value), widths, strict=True))
        return query, key, value

    def _mix_cached(
        self, qkv: Tensor, taps: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout, cache: DecodeCache
    ) -> Tensor:
        """(N, G, V) of the packed prompts, whose end the cache keeps, or of the next token of each of its sequences."""
        layer, widths = self.layer_number, [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        if not cache.decoding:
            cache.keep_inputs(layer, qkv, taps.shape[1], layout)
            parts = zip(qkv.split(widths, -1), taps.split(widths), strict=True)
            heads = self._heads(*(causal_convolution(part, tap, layout) for part, tap in parts))
            # Padding behind a segment writes nothing and forgets nothing, so its end is the state at its last token.
            padding = layout.padding_mask[0].unsqueeze(-1)
            decay, beta = decay.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)
            out, state = gated_delta_rule_and_state(*heads, decay, beta, layout, self.delta_rule)
            assert state is not None
            cache.keep_state(layer, state)
            return out
        count = cache.sequences  # the rows behind are padding
        query, key, value = self._heads(*cache.convolve(layer, qkv[:count], taps).split(widths, -1))
        repeats = value.shape[1] // query.shape[1]
        query, key = (_unit(x).repeat_interleave(repeats, 1) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        out = cache.apply_delta_rule(layer, query, key, value, decay[:count], beta[:count])
        return F.pad(out.to(value.dtype), (0, 0, 0, 0, 0, len(qkv) - count))


def _initial_decay(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """log A of the full layer, A uniform in [1, 16) as mcore draws it, whatever the parallel layout."""
    return torch.empty(shape).uniform_(1, 16, generator=generator).log()


def _kernel_offsets(layout: PackedLayout) -> dict[str, Tensor]:
    """What flash-linear-attention's kernels want of a packed row: `cu_seqlens` (S + 1,) and `chunk_indices`.

    The latter, (chunks, 2) of segment and chunk within it, the library would make in every layer, and wait for the
    device to know how many there are. Made here once a layout, from lengths on the host.
    """
    lengths = layout.padded_lengths
    kernel_offsets = {"cu_seqlens": offsets(lengths).long(), "chunk_indices": chunks(lengths, CHUNK)}
    return {name: cpu_to_device(tensor, layout.device) for name, tensor in kernel_offsets.items()}


def has_fla(x: Tensor) -> bool:
    """Whether flash-linear-attention takes this tensor (installed, GPU, half precision).

    It is not asked to where runs are to be the same to the bit: its block sizes, and so the order of its sums, are chosen
    by timing them.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    if not (x.is_cuda and half) or torch.are_deterministic_algorithms_enabled():
        return False
    return importlib.util.find_spec("fla") is not None


@cache
def fla_fault() -> str | None:
    """Why flash-linear-attention's gated delta rule must not train on this GPU with the Triton that is here; or None.

    Its backward kernel is miscompiled for Hopper by Triton 3.4 up to 3.7.0 (fla issue 640). fla 0.6 refuses, older ones
    train with wrong gradients.
    """
    triton = installed_version("triton")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if triton is None or not hopper or not Version("3.4") <= Version(triton) < Version("3.7.1"):
        return None
    return (
        f"Triton {triton} on {torch.cuda.get_device_name()} gives wrong gradients of the gated delta rule; "
        f"pip install 'triton>=3.7.1', or set engine.delta_rule=torch, which is several times slower"
    )


def delta_rule_kernel(x: Tensor, wanted: str = "auto", key_width: int | None = None) -> str:
    """What works the rule on values x (..., V): "fla", "flash_qla" or "torch"; `wanted` is `engine.delta_rule`.

    `key_width`: that of the keys' heads; None doesn't ask whether the kernel takes the widths.

    Raises UserError where it would be flash-linear-attention's kernel, with gradients that are known to be wrong, or FlashQLA's, which
    takes other widths.
    """
    if wanted == "torch" or not has_fla(x):
        return "torch"
    if wanted == "flash_qla":
        if key_width not in (None, flash_qla.HEAD) or x.shape[-1] != flash_qla.HEAD:
            raise UserError(
                f"engine.delta_rule=flash_qla: its kernels take heads of {flash_qla.HEAD} alone, and these are of "
                f"{key_width} and {x.shape[-1]}; leave engine.delta_rule out"
            )
        return "flash_qla"
    if key_width is not None and not fla_takes(key_width, x.shape[-1]):
        return "torch"
    fault = fla_fault() if torch.is_grad_enabled() else None
    if fault is not None:
        raise UserError(fault)
    return "fla"


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout, wanted: str = "auto"
) -> Tensor:
    """The gated delta rule over every segment, from a state of zeros at its start.

    With S (K, V) the state of a head, q and k of unit length, and g the log of the decay:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,    out_t = S_t^T q_t / sqrt(K)

    query, key (T, H, K) not yet normalised; value (T, G, V), G a multiple of H; decay, beta (T, G) -> (T, G, V).
    `wanted`: see `delta_rule_kernel`.
    """
    return gated_delta_rule_and_state(query, key, value, decay, beta, layout, wanted, keep=False)[0]


def gated_delta_rule_and_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    layout: PackedLayout,
    wanted: str = "auto",
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As `gated_delta_rule`, and the state (S, G, K, V) fp32 at the end of each segment; without `keep` it may be None.

    FlashQLA is for training alone: with `keep` flash-linear-attention works the rule.
    """
    kernel = delta_rule_kernel(value, "auto" if keep and wanted == "flash_qla" else wanted, key.shape[-1])
    if kernel != "torch":
        use_shipped_settings()
    if kernel == "flash_qla":
        return flash_qla.flash_qla_rule(query, key, value, decay, beta, layout), None
    if kernel == "fla":
        return fla_rule(query, key, value, decay, beta, layout, keep)
    layout.refuse_static_shapes("the delta rule in plain PyTorch")
    return chunked_delta_rule(query, key, value, decay, beta, layout.padded_lengths)


def fla_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, layout: PackedLayout, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule_and_state` by flash-linear-attention, whether or not its gradients are right here (`fla_fault`)."""
    kernel_offsets = layout.kept("delta rule", lambda: _kernel_offsets(layout))
    packed = (x[None].contiguous() for x in (q, k, v, decay, beta))
    options = {"use_qk_l2norm_in_kernel": True, **({"output_final_state": True} if keep else {})}
    rule = import_fla("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    out, state = rule(*packed, **options, **kernel_offsets)
    return out[0], state


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` and its states in plain PyTorch, in fp32: chunks of all segments at once, then a scan over these.

    Within a chunk the corrections of its tokens depend on one another through a unit lower triangular system (the
    WY form of arXiv 2412.06464, section 3.3); what they owe to the state before the chunk is linear in that state
    and is put in during the scan. Chunks that come i-th in their segments are scanned together, longest segments
    first, so that the states still in use are always the first ones.
    """
    dtype, repeats = value.dtype, value.shape[1] // query.shape[1]
    slots, active = _chunk_slots(lengths)
    slots = cpu_to_device(slots, value.device)

    def in_chunks(x: Tensor) -> Tensor:
        """(T, G, ...) -> (chunks, G, CHUNK, ...) fp32, zeros behind a segment's end."""
        filled = x.new_zeros(sum(active) * CHUNK, *x.shape[1:], dtype=torch.float32).index_copy(0, slots, x.float())
        return filled.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    query, key = (
        in_chunks(x).repeat_interleave(repeats, 1) if repeats > 1 else in_chunks(x)
        for x in (_unit(query) * query.shape[-1] ** -0.5, _unit(key))
    )
    beta = beta.float()
    scaled_value, scaled_key = in_chunks(value * beta[..., None]), key * in_chunks(beta)[..., None]
    total = in_chunks(decay).cumsum(-1)  # (chunks, G, CHUNK): log of the decay since the chunk's start
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = (scaled_key @ key.mT) * between
    since_start = total.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, torch.cat((scaled_value, scaled_key * since_start), -1), upper=False, unitriangular=True
    )
    updates, owed = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.mT) * between
    reads = query * since_start
    writes = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]

    state = value.new_zeros(len(lengths), value.shape[1], key.shape[-1], value.shape[-1], dtype=torch.float32)
    outputs, ends = [], []
    steps = (x.split(active) for x in (updates, owed, scores, reads, writes, kept))
    for update, owe, score, read, write, keep in zip(*steps, strict=True):
        ends.append(state[len(update) :])  # of segments that have no further chunk
        state = state[: len(update)]
        update = update - owe @ state
        outputs.append(read @ state + score @ update)
        state = state * keep + write.mT @ update
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    by_length = sorted(range(len(lengths)), key=lambda segment: -lengths[segment] // CHUNK)  # as `_chunk_slots`
    order = cpu_to_device(int64(by_length).argsort(), value.device)
    states = torch.cat((state, *reversed(ends))).index_select(0, order)
    return out.index_select(0, slots).to(dtype), states


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis in fp32, as flash-linear-attention has it: 1e-6 is added to the squares' sum."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@lru_cache(maxsize=8)
def _chunk_slots(lengths: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """((T,) int64 place of each token among the chunks, chunks that come i-th in their segments).

    Chunks stand in the order of the scan: the first ones of all segments, longest segment first, then the second
    ones, and so on. Lengths 70 and 200 make 2 and 4 chunks, of which [2, 2, 1, 1] are scanned together.
    """
    counts = [-(-length // CHUNK) for length in lengths]
    by_length = sorted(range(len(counts)), key=lambda segment: -counts[segment])
    rank = {segment: order for order, segment in enumerate(by_length)}
    active = [sum(count > step for count in counts) for step in range(max(counts))]
    first = int64([sum(active[:step]) for step in range(len(active))])
    layout = PackedLayout.from_lengths(lengths)
    position = layout.positions[0]
    in_step = int64([rank[segment] for segment in range(len(counts))])[layout.segment_ids[0]]
    return (first[position // CHUNK] + in_step) * CHUNK + position % CHUNK, active
