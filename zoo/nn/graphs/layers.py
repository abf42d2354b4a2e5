"""A stack of layers as CUDA graphs, one forward and one backward, for every size of row that comes.

A layer of a small row is hundreds of launches that take the host longer than the GPU needs for them. Captured, a stack is one. The
first row of a size captures: each layer is run once, so that kernels are compiled and libraries have their memory, then all are
recorded. A row is copied into the memory of the recording, so rows of about the same size share one (`zoo.nn.graphs.row`).

Gradients of weights are added to DDP's buffers within the backward graph. So autograd gives no gradient to a weight, and no
reduction of one begins before the backward pass has ended.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import Function

from zoo.nn.autograd import Context
from zoo.nn.graphs import random
from zoo.nn.graphs.recorder import Recorder
from zoo.nn.graphs.row import StaticRow, static_segments, static_tokens

SIZES = 32  # the most sizes of rows that are captured; rows of further sizes run as they would without graphs

type LayerCall = Callable[[torch.nn.Module, Tensor], Tensor]  # a layer on hidden states (T, ...)


class LayerGraphs:
    """Graphs of a stack, by the size of a row."""

    def __init__(
        self, layers: Sequence[torch.nn.Module], ends: Collection[int] = (), recorder: Recorder | None = None
    ) -> None:
        """`ends`: numbers of layers, from 0, whose results something else takes or changes; the last layer's needs no mention."""
        self.layers = list(layers)
        self.starts = sorted({0, *(end + 1 for end in ends if end + 1 < len(layers))})
        self.recorder = recorder or Recorder()
        self.trained = any(weight.requires_grad for layer in self.layers for weight in layer.parameters())
        self.refused = False  # once a layer could not be captured
        self._captured: dict[tuple[object, ...], Captured] = {}
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._pass: weakref.ref[Pass] | None = None

    def begin(
        self, hidden: Tensor, segments: int, fill: Callable[[StaticRow], None], runner: Callable[[StaticRow], LayerCall]
    ) -> Captured | None:
        """Graphs for a row with hidden states (T, ...) and so many segments, which `fill` writes; None where it has to run without.

        `runner`: how a layer runs on a static row.
        """
        backward = torch.is_grad_enabled() and (hidden.requires_grad or self.trained)
        if self.refused or self.in_use or not (backward and self.recorder.supports(hidden)):
            return None
        size = static_tokens(len(hidden)), static_segments(segments)
        key = (*size, *hidden.shape[1:], hidden.dtype)
        captured = self._captured.get(key)
        if captured is None:
            if len(self._captured) == SIZES:
                return None
            row = StaticRow(*size, hidden.device)
            fill(row)
            try:
                self._captured[key] = captured = self._capture(hidden, row, runner)
            except NoGradientError as error:
                warnings.warn(f"engine.cuda_graphs: layers run without: {error}", stacklevel=2)
                self.refused = True
                return None
        else:
            fill(captured.row)
        return captured

    def release(self) -> None:
        """Give up all graphs and their memory; rows that come are captured anew."""
        self.recorder.release()
        self._captured.clear()
        self._buffers.clear()

    @property
    def in_use(self) -> bool:
        """Whether the backward pass of an earlier row is still to come: its activations are in the memory of all graphs."""
        current = self._pass() if self._pass is not None else None
        return current is not None and not current.done

    def enter(self) -> Pass:
        """A row enters the first layer; what is returned ends with its backward pass, or when that can't come any more."""
        captured = Pass()
        self._pass = weakref.ref(captured)
        return captured

    def _capture(self, hidden: Tensor, row: StaticRow, runner: Callable[[StaticRow], LayerCall]) -> Captured:
        """Graphs of all layers for rows like `hidden`."""
        with self.recorder.session(hidden.device), random.unchanged():
            states = hidden.new_zeros(row.tokens, *hidden.shape[1:])
            _warm_up(self.layers, states, runner(row))
            run = runner(row)
            pieces = [
                Piece(
                    self.layers[first:stop],
                    run,
                    self._shared("in", first, states),
                    self._shared("out", first, states),
                    self.recorder,
                )
                for first, stop in pairwise([*self.starts, len(self.layers)])
            ]
            for first, piece in zip(reversed(self.starts), reversed(pieces), strict=True):
                piece.capture_backward(
                    self._shared("grad of out", first, states), self._shared("grad of in", first, states)
                )
        return Captured(self, row, dict(zip(self.starts, pieces, strict=True)))

    def _shared(self, role: str, piece: int, like: Tensor) -> Tensor:
        """Memory like a tensor (T, ...) that rows of other sizes are written to as well."""
        rows = 1 << (len(like) - 1).bit_length()
        key = (role, piece, rows, *like.shape[1:], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(rows, *like.shape[1:])
        return self._buffers[key][: len(like)]


def release_graphs(modules: Sequence[torch.nn.Module]) -> None:
    """Give up the graphs within modules: before process groups end (see `Recorder.release`), or where memory moves that they write to."""
    graphs = (getattr(part, "graphs", None) for module in modules for part in module.modules())
    for stack in {stack for stack in graphs if isinstance(stack, LayerGraphs)}:
        stack.release()


class Captured:
    """Graphs of all layers for one size of row."""

    def __init__(self, stack: LayerGraphs, row: StaticRow, pieces: dict[int, Piece]) -> None:
        self.row, self._stack, self._pieces = row, stack, pieces

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        """What layer number `layer` makes of hidden states (T, ...).

        The first layer of a piece does the work of all of it; the others of it give what they are given.
        """
        piece = self._pieces.get(layer)
        if piece is None:
            return hidden
        first = self._stack.enter() if layer == 0 else None  # whose backward pass is the last
        if not hidden.requires_grad:  # what is in front is frozen
            hidden = hidden.detach().requires_grad_()
        return _Replay.apply(hidden, piece, first)

    def replay(self, layer: int, hidden: Tensor) -> Tensor:
        """As a call; what it gives leads to these graphs by `captured_of`, where other code calls the layers one by one."""
        out = self(layer, hidden)
        out.captured = self  # type: ignore[attr-defined]
        return out


def captured_of(hidden: Tensor) -> Captured | None:
    """The graphs that gave hidden states by `replay`; None where they come from elsewhere."""
    return getattr(hidden, "captured", None)


class Pass:
    """Lives as long as the backward pass of a row may come."""

    done = False


class Piece:
    """Consecutive layers: a forward graph from `states` to `out`, and a backward graph from `grad_out` to `grad_in`.

    All four are memory that pieces of other sizes use as well: what a graph made would stay in memory for each size.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Module], run: LayerCall, states: Tensor, out: Tensor, recorder: Recorder
    ) -> None:
        """Captures the forward pass."""
        self.layers, self.run, self.states, self.recorder = layers, run, states, recorder
        self._out = out
        self._kept: list[tuple[Leaves, Tensor, Tensor]] = []  # a layer's weights, what it took and what it gave
        self.replay_forward, self.out = recorder.record(self._forward)

    def capture_backward(self, grad_out: Tensor, grad_in: Tensor) -> None:
        """Captures the backward pass."""
        self.grad_out, self._grad_in = grad_out, grad_in
        self.replay_backward, self.grad_in = self.recorder.record(self._backward)

    def _forward(self) -> Tensor:
        states = self.states
        for layer in self.layers:
            self._kept.append(_run(layer, states, self.run))
            states = self._kept[-1][2].detach()
        return self._out.copy_(states)

    def _backward(self) -> Tensor:
        grad = self.grad_out
        while self._kept:  # a layer's activations go when its gradient is there
            leaves, states, out = self._kept.pop()
            grad = leaves.gradients(out, states, grad)
        return self._grad_in.copy_(grad)


class _Replay(Function):
    @staticmethod
    def forward(ctx: Context, hidden: Tensor, piece: Piece, first: Pass | None) -> Tensor:
        ctx.piece, ctx.first = piece, first
        _put(hidden, piece.states)
        piece.replay_forward()
        return piece.out[: len(hidden)].detach()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        piece = ctx.piece
        _put(grad, piece.grad_out)
        piece.replay_backward()
        if ctx.first is not None:
            ctx.first.done = True
        return piece.grad_in[: len(grad)].detach(), None, None


def _put(x: Tensor, into: Tensor) -> None:
    """Write x (T, ...) in front of a tensor with more rows, zeros behind."""
    into[: len(x)].copy_(x)
    into[len(x) :].zero_()


def _run(layer: torch.nn.Module, states: Tensor, run: LayerCall) -> tuple[Leaves, Tensor, Tensor]:
    """What a layer makes of states (T, ...), with weights and states that gradients of it are taken for."""
    leaves, leaf_states = Leaves(layer), states.detach().requires_grad_()
    with torch.enable_grad(), leaves.in_place(), random.inside():
        return leaves, leaf_states, run(layer, leaf_states)


def _warm_up(layers: Sequence[torch.nn.Module], states: Tensor, run: LayerCall) -> None:
    """Each layer once, with a gradient of zeros, which adds nothing to any weight's."""
    for layer in layers:
        leaves, leaf_states, out = _run(layer, states, run)
        leaves.gradients(out, leaf_states, torch.zeros_like(out))


class NoGradientError(RuntimeError):
    """A trained weight of a layer does not contribute to the layer's output."""


class Leaves:
    """A layer's weights as leaves of their own, on the same memory and with the same marks, for a gradient that is captured.

    Autograd hands a parameter's gradient over on the stream that the parameter was first used on, which is DDP's: a graph that is
    captured on another stream can't wait for that one. New leaves have no such past.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._places: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        leaves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.trained: dict[str, torch.nn.Parameter] = {}  # by the layer's names
        for prefix, module in layer.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in leaves:
                    leaves[parameter] = leaf = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
                    leaf.__dict__.update(parameter.__dict__)
                    if parameter.requires_grad:
                        self.trained[f"{prefix}.{name}".lstrip(".")] = leaf
                self._places.append((module, name, parameter))
        self._made = leaves

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layer has them in the place of its own."""
        for module, name, parameter in self._places:
            module._parameters[name] = self._made[parameter]
        try:
            yield
        finally:
            for module, name, parameter in self._places:
                module._parameters[name] = parameter

    def gradients(self, out: Tensor, states: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `states`, from that of `out`, which a run with these in place made of them.

        Those of weights go to DDP's buffers, unless a product added them there. NoGradientError for a weight without one.
        """
        for leaf in self.trained.values():
            leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        wanted = (states, *self.trained.values())
        of_states, *of_weights = torch.autograd.grad(out, wanted, grad, allow_unused=True)
        for (name, leaf), gradient in zip(self.trained.items(), of_weights, strict=True):
            if gradient is None:
                raise NoGradientError(f"{name} gets no gradient when its layer is captured")
            if not leaf.grad_added_to_main_grad:  # type: ignore[attr-defined]
                leaf.main_grad.add_(gradient)  # type: ignore[attr-defined]
        assert of_states is not None
        return of_states.detach()
