"""Launch settings of flash-linear-attention's kernels, found by tuning once and shipped.

The library times every setting of each of its kernels at their first call, and again for other widths: two minutes before
the first step of a run, and as many again wherever its cache is empty. `use_shipped_settings` leaves each kernel the one setting
that was fastest on the GPU at hand, and has it launched without its tuner; a kernel, GPU or release that is not listed here tunes
itself as before.

Where TileLang or FlashQLA is installed, the library calls their kernels in the place of its own, which nothing here was measured with:
FlashQLA's take a minute and a half to compile, wait for the device in each row, and can't be captured as CUDA graphs. So its own are
taken, unless the library's variables FLA_TILELANG and FLA_FLASH_QLA say otherwise. `engine.delta_rule=flash_qla` asks for the latter.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any

import torch

from zoo.nn.decoder.attention.fla_import import import_fla

# The library's variables that say whose kernels it calls, and what they are where nobody has set them.
SWITCHES = {"FLA_TILELANG": "0", "FLA_FLASH_QLA": "0"}

# By compute capability: kernel -> setting. Found on an H200 with flash-linear-attention 0.6.0 and Triton 3.7.1, bf16,
# heads of width 128, chunks of 64 tokens.
SETTINGS: dict[tuple[int, int], dict[str, dict[str, int]]] = {
    (9, 0): {
        "fla.modules.norm.l2norm.l2norm_bwd_kernel": {"BT": 8, "num_warps": 4, "num_stages": 3},
        "fla.modules.norm.l2norm.l2norm_fwd_kernel": {"BT": 8, "num_warps": 1, "num_stages": 3},
        "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 32, "num_warps": 4, "num_stages": 3},
        "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32, "num_warps": 4, "num_stages": 3},
        "fla.ops.common.chunk_o.chunk_bwd_kernel_dqkwg": {"num_warps": 4, "num_stages": 3},
        "fla.ops.common.chunk_o.chunk_bwd_kernel_dv_local": {"num_warps": 2, "num_stages": 3},
        "fla.ops.common.chunk_o.chunk_fwd_kernel_o": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
        "fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 1, "num_stages": 3},
        "fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": {"num_warps": 4, "num_stages": 4},
        "fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd_kernel": {"num_warps": 4, "num_stages": 3},
        "fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel": {"num_warps": 4, "num_stages": 3},
    }
}  # fmt: skip


@lru_cache(maxsize=1)
def use_shipped_settings() -> int:
    """Give the kernels their settings for this process's GPU; returns how many got one."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
    listed = SETTINGS.get(torch.cuda.get_device_capability(), {})
    return sum(_use(*name.rpartition(".")[::2], setting) for name, setting in listed.items())


def _use(module: str, kernel: str, setting: dict[str, int]) -> bool:
    """Leave a kernel this one of its settings; returns whether the kernel has it."""
    try:
        tuner: Any = getattr(import_fla(module), kernel)
    except (ImportError, AttributeError):  # of another release
        return False
    while not hasattr(tuner, "configs") and hasattr(tuner, "fn"):
        tuner = tuner.fn
    fitting = []
    for config in getattr(tuner, "configs", ()):  # of triton.Config
        values = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        if {name: values.get(name) for name in setting} == setting:
            fitting.append(config)
    if fitting:
        tuner.configs = fitting[:1]
        if fitting[0].pre_hook is None:  # a launch has nothing to look up, which would take as long as it does
            tuner.run = partial(_run, tuner.fn, fitting[0].all_kwargs())
    return bool(fitting)


def _run(kernel: Any, setting: dict[str, Any], *args: Any, **options: Any) -> Any:
    """What Triton's autotuner does with one setting."""
    return kernel.run(*args, **options, **setting)
