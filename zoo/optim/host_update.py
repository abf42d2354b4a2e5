"""Updates of weights whose optimizer state is on the host, beside those that the GPU makes of the others.

Gradients and weights come to the host in chunks, through a few pinned buffers; the rank's cores work on a chunk while the
next ones arrive and the ones before go back. The state itself never moves. Beside a GPU a compiled function makes the
updates (`zoo.nn.adamw.cpu`). On a CPU the same steps run one after the other in PyTorch's operations, each core on pieces
that stay in its cache, and the update has the same bits as without them.

Megatron-Core's HybridDeviceOptimizer, which has an fp32 copy of each weight on the host and moments of fp32, is not used: a
checkpoint's state would have another form, and neither split weights nor moments of fewer bits would be left.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zoo.nn.adamw import cpu, state
from zoo.nn.adamw.state import BLOCK, Moment, Part, UpdateOptions

CHUNK = 2**25  # elements that are copied at once; a multiple of the pieces
DEPTH = 4  # chunks under way at once
WORKED_ON = 2  # chunks that cores work on at once: those that are done with one don't wait for the others
TOUCHED = 2**26  # bytes of new memory that a core makes zero at once
PIECE = 2**17  # elements that a core updates at once in PyTorch's operations; a multiple of BLOCK
COMPILED_PIECE = 2**21  # the same of the compiled function: a call from Python each

type Job = tuple[Part, UpdateOptions]


class _Slot:
    """CPU memory for a chunk of any of the jobs, pinned where there is a GPU, and when the copies to it and from it are done."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.weights = self._bytes([part.weight for part, _ in jobs])
        self.grads = self._bytes([part.grad for part, _ in jobs])
        self.arrived, self.sent = torch.cuda.Event(), torch.cuda.Event()

    @staticmethod
    def _bytes(tensors: Sequence[Tensor]) -> Tensor:
        most = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        return torch.empty(most, dtype=torch.uint8, pin_memory=tensors[0].is_cuda)

    def views(self, chunk: Part) -> tuple[Tensor, Tensor]:
        """A chunk's weights and gradients on the CPU."""
        weight, grad = (
            memory[: like.numel() * like.element_size()].view(like.dtype)
            for memory, like in ((self.weights, chunk.weight), (self.grads, chunk.grad))
        )
        return weight, grad


class HostUpdate:
    """The updates of one optimizer's parts that are on the host: `start`, then the GPU's share, then `finish`."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: of the host that work on a chunk; None: as many as PyTorch uses anyway."""
        self._threads = threads
        self._workers: ThreadPoolExecutor | None = None
        self._how: tuple[Callable[..., None], int] | None = None  # the update, and elements of a piece
        self._slots: list[_Slot] = []
        self._jobs: list[Job] = []
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, and back

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) on the host, whose pages all cores take from the system: one alone takes some 1.5 GB/s of new ones."""
        held = torch.empty(numel, dtype=dtype)
        with self._one_thread_each() as workers:
            for _ in workers.map(Tensor.zero_, held.split(TOUCHED // dtype.itemsize)):
                pass
        return held

    @torch.no_grad()
    def start(self, jobs: Sequence[Job]) -> None:
        """Begin to copy gradients and weights, which are final in the current stream."""
        self._jobs = [(chunk, options) for part, options in jobs for chunk in pieces(part, CHUNK)]
        if not self._jobs:
            return
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        self._streams[0].wait_stream(torch.cuda.current_stream())
        if not self._slots:
            self._slots = [_Slot(self._jobs) for _ in range(DEPTH)]
        if self._how is None:
            self._how = _compiled() if self._jobs[0][0].weight.is_cuda else (state.update, PIECE)
        for number in range(min(DEPTH, len(self._jobs))):
            self._fetch(number)

    @torch.no_grad()
    def finish(self) -> None:
        """Make the updates; work that comes after them in the current stream sees the new weights."""
        if not self._jobs:
            return
        assert self._streams is not None and self._how is not None
        update, size = self._how
        with self._one_thread_each() as workers:
            under_way: deque[list[Future[None]]] = deque()
            for number, (chunk, options) in enumerate(self._jobs):
                slot = self._slots[number % DEPTH]
                slot.arrived.synchronize()
                weight, grad = slot.views(chunk)
                task = partial(_without_gradients, update, options)
                parts = pieces(replace(chunk, weight=weight, grad=grad), size)
                under_way.append([workers.submit(task, part) for part in parts])
                if len(under_way) == WORKED_ON:
                    self._send_back(number - WORKED_ON + 1, under_way.popleft())
            for number in range(len(self._jobs) - len(under_way), len(self._jobs)):
                self._send_back(number, under_way.popleft())
        torch.cuda.current_stream().wait_stream(self._streams[1])
        self._jobs = []

    def _send_back(self, number: int, updates: list[Future[None]]) -> None:
        """Copy a chunk to where it came from once it is updated, and have a later one come in its place."""
        assert self._streams is not None
        for update in updates:
            update.result()  # an error of one is raised here
        (chunk, _), slot, (to_cpu, back) = self._jobs[number], self._slots[number % DEPTH], self._streams
        with torch.cuda.stream(back):
            chunk.weight.copy_(slot.views(chunk)[0], non_blocking=True)
            slot.sent.record(back)
        if number + DEPTH < len(self._jobs):
            to_cpu.wait_event(slot.sent)
            self._fetch(number + DEPTH)

    @contextmanager
    def _one_thread_each(self) -> Iterator[ThreadPoolExecutor]:
        """Workers whose PyTorch uses no further threads; the number of this thread stays what it is."""
        before = torch.get_num_threads()
        if self._workers is None:
            count = self._threads or before
            self._workers = ThreadPoolExecutor(count, "host-update", torch.set_num_threads, (1,))
        try:
            yield self._workers
        finally:
            torch.set_num_threads(before)  # a worker's call has set that of threads to come

    def _fetch(self, number: int) -> None:
        assert self._streams is not None
        chunk, slot = self._jobs[number][0], self._slots[number % DEPTH]
        (weight, grad), stream = slot.views(chunk), self._streams[0]
        with torch.cuda.stream(stream):
            grad.copy_(chunk.grad, non_blocking=True)
            weight.copy_(chunk.weight, non_blocking=True)
            slot.arrived.record(stream)


@torch.no_grad()
def _without_gradients(update: Callable[..., None], options: UpdateOptions, part: Part) -> None:
    update(part, **options)


def _compiled() -> tuple[Callable[..., None], int]:
    if (problem := cpu.fallback_reason()) is None:
        return cpu.update, COMPILED_PIECE
    print(
        f"zoo: WARNING: train.optimizer_offload_fraction: {problem}, so PyTorch's operations update weights on the host, which "
        f"takes up to thirty times as long; install a C compiler",
        file=sys.stderr,
        flush=True,
    )
    return state.update, PIECE


def pieces(part: Part, size: int) -> Iterator[Part]:
    """A part in pieces of `size` elements, a multiple of BLOCK, which round as they would together."""

    def of_moment(moment: Moment, cut: slice) -> Moment:
        exponents = moment.exponents
        if exponents is not None:
            exponents = exponents[cut.start // BLOCK : -(-cut.stop // BLOCK)]
        return replace(moment, values=moment.values[cut], exponents=exponents)

    for start in range(0, part.weight.numel(), size):
        cut = slice(start, min(start + size, part.weight.numel()))
        yield Part(
            weight=part.weight[cut],
            remainder=None if part.remainder is None else part.remainder[cut],
            grad=part.grad[cut],
            exp_avg=of_moment(part.exp_avg, cut),
            exp_avg_sq=of_moment(part.exp_avg_sq, cut),
            seed=part.seed + start,
        )


def on_host(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of so many parameters of these sizes are on the host, so that `share` (0 to 1) of all elements are, or a little less.

    Large ones come first: each is on the host as long as there is memory left.
    """
    capacity = share * sum(sizes)
    chosen = [False] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if sizes[index] <= capacity:
            chosen[index] = True
            capacity -= sizes[index]
    return chosen
