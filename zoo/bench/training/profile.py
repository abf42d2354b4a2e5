"""Where the time of a training step goes: what ran on the GPU, by kind, and how long nothing did.

Kinds follow from the names of kernels (of PyTorch's operations, on a CPU); `top` shows which fell where. Time in which
kernels overlap counts for each of them, so that kinds may sum to a little more than `busy_ms`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.types import JsonObject

STEPS = 2
TOP, GAPS, GAPS_SHOWN = 60, 20, 5

_ATTENTION = r"flash|fmha|sdpa|attention|attn"
# The first that is found in a name, in any case of letters.
KINDS = (
    ("communication", r"nccl|c10d::|all_?reduce|all_?gather|reduce_scatter|all_?to_?all"),
    ("optimizer", r"multi_tensor|adam|_foreach"),
    ("attention backward", rf"({_ATTENTION}).*(bwd|bprop|backward|dot_do_o|convert_dq|cutlassB)|bwd.*({_ATTENTION})"),
    ("attention forward", _ATTENTION),
    ("delta rule", r"delta_rule|tilelang_|chunk_|solve_tril|inverse_kernel|recompute_w_u|wy_repr|l2norm|conv1d|triangular"),
    ("matrix products", r"gemm|cutlass|nvjet|xmma|wgmma|grouped_mm|gemv|splitk|convolution|implicit_conv|aten::(mm|addmm|bmm|baddbmm)"),
    ("loss", r"cross_entropy|nll|logsumexp|softmax"),
    ("norm", r"norm"),
    ("copies and casts", r"memcpy|memset|copy|catarray|aten::(cat|zero_|fill_|clone|contiguous)|FillFunctor"),
    ("indexing", r"index|gather|scatter|embedding|sort|scan|cumsum"),
    ("elementwise and sums", r""),
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that ran: when it began and ended, and how long it did not wait for what it called, in microseconds."""

    name: str
    start: float
    end: float
    own: float


def profile(step: Callable[[], object]) -> JsonObject:
    """What ran in `step`, called STEPS times after once under the profiler without being counted."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profiler(activities=activities):  # the first use of the profiler takes seconds
        step()
    with profiler(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    return report(_events(profiled, on_gpu), STEPS)


def _events(profiled: Any, on_gpu: bool) -> list[Event]:
    """Kernels and copies of the GPU, or PyTorch's operations on the CPU."""
    events = []
    for event in profiled.events():
        start, end = event.time_range.start, event.time_range.end
        if on_gpu and event.device_type.name == "CUDA" and not event.is_user_annotation:
            events.append(Event(event.name, start, end, end - start))
        elif not on_gpu and event.name.startswith("aten::"):
            events.append(Event(event.name, start, end, event.self_cpu_time_total))
    return events


def report(events: Sequence[Event], steps: int) -> JsonObject:
    """Milliseconds a step: `span_ms` from the first to the last event, `busy_ms` with anything running, `idle_ms` without,
    `kinds` by kind, `top` by name and `gaps`, of the time without, by what ran before and what came after."""
    if not events:
        return {"span_ms": 0.0, "busy_ms": 0.0, "idle_ms": 0.0, "kinds": {}, "top": [], "gaps": []}
    per_step = 1e3 * steps
    span = max(event.end for event in events) - min(event.start for event in events)
    gaps = _gaps(events)
    idle = sum(gaps.values())
    by_name: dict[str, float] = {}
    calls = Counter(event.name for event in events)
    for event in events:
        by_name[event.name] = by_name.get(event.name, 0.0) + event.own
    kinds: dict[str, float] = {}
    for name, time in by_name.items():
        kinds[kind(name)] = kinds.get(kind(name), 0.0) + time
    return {
        "span_ms": round(span / per_step, 3),
        "busy_ms": round((span - idle) / per_step, 3),
        "idle_ms": round(idle / per_step, 3),
        "kinds": {name: round(time / per_step, 3) for name, time in _largest(kinds)},
        "top": [
            {"name": name[:160], "kind": kind(name), "ms": round(time / per_step, 3), "calls": calls[name] / steps}
            for name, time in _largest(by_name)[:TOP]
        ],
        "gaps": [
            {"after": before[:160], "before": after[:160], "ms": round(time / per_step, 3)}
            for (before, after), time in _largest(gaps)[:GAPS]
        ],
    }


def _largest[K](times: dict[K, float]) -> list[tuple[K, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def kind(name: str) -> str:
    """The kind of a kernel or an operation, by its name."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def _gaps(events: Sequence[Event]) -> dict[tuple[str, str], float]:
    """Microseconds in which nothing ran, by the names of what ran last and of what came next."""
    gaps: dict[tuple[str, str], float] = {}
    last = None
    for event in sorted(events, key=lambda event: event.start):
        if last is not None and event.start > last.end:
            pair = (last.name, event.name)
            gaps[pair] = gaps.get(pair, 0.0) + event.start - last.end
        if last is None or event.end > last.end:
            last = event
    return gaps


def table(result: JsonObject, top: int = 12) -> str:
    """The report as text."""
    span = result["span_ms"] or 1.0
    lines = [f"  {result['span_ms']:.1f} ms a step under the profiler, {result['idle_ms']:.1f} of them idle"]
    rows = [*result["kinds"].items(), ("idle", result["idle_ms"])]
    lines += [f"    {name:<24}{ms:>9.2f} ms{ms / span:>8.1%}" for name, ms in rows]
    lines += [
        f"    {entry['ms']:>9.2f} ms {entry['calls']:>6.0f} x  {entry['name'][:110]}" for entry in result["top"][:top]
    ]
    lines += [
        f"    {gap['ms']:>9.2f} ms idle between {gap['after'][:50]} and {gap['before'][:50]}"
        for gap in result["gaps"][:GAPS_SHOWN]
    ]
    return "\n".join(lines)
