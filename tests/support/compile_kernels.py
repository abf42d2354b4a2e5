"""Compile the Triton kernels for a GPU that is not there: prints as JSON the bytes of registers that each spills, or why not.

    python tests/support/compile_kernels.py

Launches are caught: each function runs forward and backward on tensors of a real model's widths, on the CPU, and what it
would have launched is compiled for Hopper (sm_90). Their results are never made.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime.jit import JITFunction

from zoo.nn.adamw.kernel import adamw, in_bf16, make_tables
from zoo.nn.adamw.state import Moment, Part
from zoo.nn.decoder.experts.exchange import Permutation
from zoo.nn.kernels.conv import causal_conv_silu, delta_inputs
from zoo.nn.kernels.experts import (
    accumulate,
    add_lowrank,
    count_choices,
    gather_rows,
    loads,
    place_choices,
    sum_rows,
    take,
    top,
)
from zoo.nn.kernels.gate import gated
from zoo.nn.kernels.gelu import linear_gelu
from zoo.nn.kernels.launch import column_sums
from zoo.nn.kernels.layer_norm import add_layer_norm, layer_norm
from zoo.nn.kernels.loss import cross_entropy
from zoo.nn.kernels.norm import gated_rms_norm, rms_norm, rms_norm_residual
from zoo.nn.kernels.rotary import Norms, cut_heads, rotate, rotate_qkv, split_heads
from zoo.nn.kernels.swiglu import swiglu

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
TOKENS = 5000

Launch = tuple[Any, dict[str, str], dict[tuple[int, ...], Any], dict[str, Any]]
LAUNCHES: dict[str, Launch] = {}


def caught(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In the place of a launch: note the kernel with the types of its arguments and its constants."""
    given = {**dict(zip(self.arg_names, arguments, strict=False)), **options}
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for index, (name, parameter) in enumerate(zip(self.arg_names, self.params, strict=True)):
        value = given.pop(name)
        if parameter.is_constexpr or value is None:
            types[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name] = POINTERS[value.dtype]
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
    shown = {self.arg_names[index]: value for (index,), value in constants.items() if value is not None}
    module = self.fn.__module__.rpartition(".")[2]
    LAUNCHES[f"{module}.{self.fn.__name__} {shown} {given}"] = (self, types, constants, given)


def both_ways(function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """Call it on bf16 tensors of these shapes, and take the gradients of all that it gives."""
    out = function(*(torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes))
    found = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
    torch.autograd.backward(found, [torch.zeros_like(x) for x in found])


def spilled(launch: Launch) -> int | str:
    """Bytes of registers that a kernel stores because it has too few; why it can't be compiled."""
    kernel, types, constants, options = launch
    try:
        made = compile_source(ASTSource(kernel, types, constants), GPUTarget("cuda", 90, 32), options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def main() -> dict[str, int | str]:
    JITFunction.run = caught  # type: ignore[method-assign, assignment]
    angles = torch.zeros(TOKENS, 64)
    positions = torch.arange(TOKENS)
    for width in (1024, 2048, 5120):
        both_ways(lambda x, w: rms_norm(x, w, 1e-6), (TOKENS, width), (width,))
        both_ways(lambda x, w: rms_norm_residual(x, w, 1e-6, True), (TOKENS, width), (width,))
    for width in (128, 256):
        both_ways(lambda x, w: rms_norm(x, w, 1e-6, True), (TOKENS, 16, width), (width,))
        both_ways(lambda x, g, w: gated_rms_norm(x, g, w, 1e-6), *((TOKENS, 16, width),) * 2, (width,))
    for width in (1024, 1152, 4096):
        both_ways(lambda x, w, b: layer_norm(x, w, b, 1e-6), (TOKENS, width), (width,), (width,))
        both_ways(lambda x, d, w, b: add_layer_norm(x, d, w, b, 1e-6), *((TOKENS, width),) * 2, (width,), (width,))
    both_ways(lambda x, w: causal_conv_silu(x, w, positions), (TOKENS, 2048), (2048, 4))
    for heads, width in ((16, 2048), (64, 4096)):
        widths = (2048, 2048, width, width)
        shapes = (TOKENS, sum(widths) + 2 * heads), (sum(widths[:3]), 4), (heads,), (heads,)
        both_ways(lambda x, w, a, b, widths=widths: delta_inputs(x, w, a, b, positions, widths), *shapes)
    both_ways(lambda x, w, b: linear_gelu(x, w, b, tanh=True), (TOKENS, 1024), (4096, 1024), (4096,))
    both_ways(gated, *((TOKENS, 2048),) * 2)
    for width in (1024, 4304):
        column_sums(torch.zeros(TOKENS, width).bfloat16())
    permutation = Permutation.from_choices(positions[:, None] % 128, 128, TOKENS)
    gather_rows(torch.zeros(TOKENS, 2048).bfloat16(), permutation.tokens)
    sum_rows(torch.zeros(TOKENS, 2048).bfloat16(), permutation.places)
    for chosen, experts in (
        (torch.zeros(TOKENS, 8, dtype=torch.int64), 128),
        (torch.zeros(TOKENS, 16).int()[:, 8:], 32),
    ):
        counts, upto = count_choices(chosen, experts, 0)
        places = place_choices(chosen, experts, 0, counts, upto)[2]
        take(torch.zeros(TOKENS * 8, 1), places)
    top(torch.zeros(TOKENS, 128), 8)
    top(torch.zeros(TOKENS, 512), 10)
    for experts, mask in ((128, None), (256, torch.zeros(TOKENS, dtype=torch.bool))):
        loads(torch.zeros(TOKENS, experts, requires_grad=True), positions[:, None] % 8, mask)[0].sum().backward()
    for rank in (16, 32, 64):
        given = torch.zeros(TOKENS, 1536), torch.zeros(TOKENS, rank), torch.zeros(128, 1536, rank)
        add_lowrank(*(one.bfloat16() for one in given), permutation.bounds[1:])
    accumulate(torch.zeros(TOKENS, 2048), torch.zeros(TOKENS, 2048).bfloat16())
    both_ways(swiglu, (TOKENS, 2 * 6144))
    both_ways(swiglu, (TOKENS, 2 * 768), (TOKENS,))
    end = torch.zeros(1, dtype=torch.int32)
    both_ways(lambda x, p: swiglu(x, p, end=end), (TOKENS, 2 * 768), (TOKENS,))
    both_ways(lambda x: swiglu(x, gelu=True), (TOKENS, 2 * 10240))
    both_ways(lambda x: rotate(x, angles, angles), (TOKENS, 16, 128))
    both_ways(lambda x: rotate_qkv(x, angles, angles), (TOKENS, 3, 16, 64))
    both_ways(lambda x: rotate_qkv(x, torch.zeros(TOKENS, 72), torch.zeros(TOKENS, 72), 96), (TOKENS, 3, 16, 72))
    both_ways(lambda x: cut_heads(x, 72), (TOKENS, 16, 96))
    for shape, gated_heads, turning in (((8, 4, 128), False, 128), ((2, 8, 256), True, 64), ((8, 4, 64), False, 64)):
        groups, repeats, width = shape
        cos = torch.zeros(TOKENS, turning)
        mixed = TOKENS, groups, repeats * (2 if gated_heads else 1) + 2, width

        def heads(x: Tensor, *weights: Tensor, given: Any = (cos, cos, repeats, gated_heads)) -> Any:
            return split_heads(x, *given, Norms(*weights, 1e-6) if weights else None)

        both_ways(heads, mixed, (width,), (width,))
        if not gated_heads:
            both_ways(heads, mixed)
    both_ways(lambda x: cross_entropy(x, positions[:300], None), (300, 151_936))
    for size in (TOKENS * 16, TOKENS):  # whose ends lie on whole vectors, or not
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            zeros = torch.zeros(size)
            moments = (Moment.zeros(size, dtype, signed, zeros.device) for signed in (True, False))
            part = Part(zeros.bfloat16(), torch.zeros(size, dtype=torch.int16), zeros, *moments, seed=0)
            if dtype == torch.uint8:
                in_bf16(part.exp_avg, 100, size)
            (table,) = make_tables([part])
            adamw(table, step=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return {name: spilled(launch) for name, launch in LAUNCHES.items()}


if __name__ == "__main__":
    print(json.dumps(main()))
