"""Layers that are captured for rows of a size: with what is recorded done again each time, on the CPU, as a GPU does it."""

from typing import Any

import pytest
import torch
from support.recorded_again import RecordedAgain
from torch import Tensor

from zoo.nn.graphs.layers import LayerCall, LayerGraphs
from zoo.nn.graphs.row import StaticRow, pieces_behind, static_segments, static_tokens
from zoo.optim.device_memory import Memory
from zoo.packing import PackedLayout

WIDTH = 8


class Layer(torch.nn.Module):
    """Mixes each token with the one before it in its segment, as its position says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.main_grad = torch.zeros_like(parameter)

    def forward(self, x: Tensor, positions: Tensor, angle: Tensor) -> Tensor:
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:-1] * (positions > 0)[:, None]
        return x + torch.tanh(self.linear(x + 0.5 * before)) * angle


def stack(count: int) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


def run_graphs(
    graphs: LayerGraphs, x: Tensor, layout: PackedLayout, angle: Tensor, features: list[Tensor]
) -> Tensor | None:
    def runner(row: StaticRow) -> LayerCall:
        made = row.layout()
        return lambda layer, states: layer(states, made.positions[0], row.by_token["angle"])

    found = graphs.begin(x, layout.num_segments, lambda row: row.fill(layout, {"angle": angle}), runner)
    if found is None:
        return None
    for place in range(len(graphs.layers)):
        x = found(place, x)
        if place < len(features):
            x = x + features[place]
    return x


def case(lengths: list[int], seed: int) -> tuple[Tensor, PackedLayout, Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    layout = PackedLayout.from_lengths(lengths)
    x = torch.randn(layout.total, WIDTH, generator=draw).requires_grad_()
    angle = torch.rand(layout.total, 1, generator=draw)
    return x, layout, angle, [torch.randn(layout.total, WIDTH, generator=draw).requires_grad_()]


def plain(layers: list[Layer], x: Tensor, layout: PackedLayout, angle: Tensor, features: list[Tensor]) -> Tensor:
    """What the layers give without graphs, backpropagated."""
    for number, layer in enumerate(layers):
        x = layer(x, layout.positions[0], angle)
        x = x + features[number] if number < len(features) else x
    x.square().sum().backward()
    return x


def weight_grads(layers: list[Layer]) -> list[Tensor | None]:
    grads = [weight.grad for layer in layers for weight in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    return grads


def main_grads(layers: list[Layer]) -> list[Tensor]:
    found = [one.main_grad.clone() for layer in layers for one in layer.parameters()]
    for layer in layers:
        for one in layer.parameters():
            one.main_grad.zero_()
    return found


def test_rows_of_one_size_share_a_recording_and_give_what_the_layers_give() -> None:
    layers, recorder = stack(4), RecordedAgain()
    graphs = LayerGraphs(layers, ends=[0], recorder=recorder)
    for lengths, recorded in (([30, 50, 7], 4), ([100], 4), ([1, 1, 1, 1], 8), ([128], 8), ([90, 39], 12)):
        x, layout, angle, features = case(lengths, sum(lengths))
        out = run_graphs(graphs, x, layout, angle, features)
        assert out is not None and recorder.records == recorded
        out.square().sum().backward()
        mine, grads = main_grads(layers), (x.grad, features[0].grad)
        x, layout, angle, features = case(lengths, sum(lengths))
        torch.testing.assert_close(out, plain(layers, x, layout, angle, features))
        torch.testing.assert_close(grads, (x.grad, features[0].grad))
        torch.testing.assert_close(mine, weight_grads(layers))


def test_recordings_of_several_sizes_write_to_the_same_memory() -> None:
    graphs = LayerGraphs(stack(2), ends=[0], recorder=RecordedAgain())
    for length in (130, 200, 500):
        out = run_graphs(graphs, *case([length], length)[:3], [])
        assert out is not None
        out.sum().backward()
    pieces = [list(one._pieces.values()) for one in graphs._captured.values()]
    memory = [
        [x.data_ptr() for piece in row for x in (piece.states, piece._out, piece.grad_out, piece._grad_in)]
        for row in pieces
    ]
    assert memory[0] == memory[1] and len(set(memory[0])) == 8
    assert not set(memory[0]) & set(memory[2]), "four times as many tokens"


def test_a_row_before_the_last_ones_backward_pass_runs_without() -> None:
    graphs = LayerGraphs(stack(2), recorder=RecordedAgain())
    first = run_graphs(graphs, *case([40], 1)[:3], [])
    assert first is not None
    assert run_graphs(graphs, *case([50], 2)[:3], []) is None
    assert run_graphs(graphs, *case([500], 2)[:3], []) is None, "of another size: activations share memory"
    first.sum().backward()
    second = run_graphs(graphs, *case([50], 2)[:3], [])
    assert second is not None
    del second  # never to be backpropagated
    assert run_graphs(graphs, *case([50], 2)[:3], []) is not None


def test_rows_behind_a_move_of_memory_are_recorded_anew() -> None:
    """What is recorded holds the addresses of weights and of their gradients, not of the optimizer's state."""
    layers, recorder = stack(1), RecordedAgain()
    model = torch.nn.ModuleList(layers)
    graphs = LayerGraphs(layers, recorder=recorder)
    model.graphs = graphs  # type: ignore[assignment]
    memory = Memory([model])  # type: ignore[list-item]

    def recorded() -> int:
        out = run_graphs(graphs, *case([40], 1)[:3], [])
        assert out is not None
        out.sum().backward()
        return recorder.records

    assert recorded() == recorded() == 2
    memory.move(False, ["optimizer"])
    assert recorded() == 2
    for more, kind in enumerate(("gradients", "model"), 1):
        memory.move(False, [kind])
        memory.move(True, [kind])
        assert recorded() == 2 + 2 * more


def test_without_a_gradient_nothing_is_recorded() -> None:
    layers, recorder = stack(1), RecordedAgain()
    x, layout, angle, _ = case([40], 1)
    with torch.no_grad():
        assert run_graphs(LayerGraphs(layers, recorder=recorder), x, layout, angle, []) is None
    layers[0].requires_grad_(False)
    assert run_graphs(LayerGraphs(layers, recorder=recorder), x.detach(), layout, angle, []) is None
    assert recorder.records == 0


def test_trained_layers_behind_frozen_ones_are_recorded() -> None:
    layers = stack(2)
    graphs = LayerGraphs(layers, recorder=RecordedAgain())
    x, layout, angle, _ = case([40], 1)
    for _ in range(2):
        out = run_graphs(graphs, x.detach(), layout, angle, [])
        assert out is not None
        out.square().sum().backward()
        plain(layers, x.detach(), layout, angle, [])
        torch.testing.assert_close(main_grads(layers), weight_grads(layers))


def test_a_weight_without_a_gradient_leaves_its_stack_out_and_says_so() -> None:
    layers, recorder = stack(2), RecordedAgain()
    layers[1].register_parameter("unused", torch.nn.Parameter(torch.zeros(3)))
    graphs = LayerGraphs(layers, recorder=recorder)
    with pytest.warns(UserWarning, match=r"engine\.cuda_graphs: layers run without: unused gets no gradient"):
        assert run_graphs(graphs, *case([40], 1)[:3], []) is None
    assert run_graphs(graphs, *case([40], 1)[:3], []) is None, "and is not tried again"
    assert recorder.records == 0 and not any(grad.any() for grad in main_grads(layers[:1]))


def test_sizes() -> None:
    assert [static_tokens(n) for n in (1, 64, 65, 2049, 4097, 20000)] == [64, 64, 128, 2112, 4224, 20480]
    assert [static_segments(n) for n in (1, 6, 7, 14, 15)] == [8, 8, 16, 16, 32]
    assert all(static_tokens(n) >= n and static_tokens(n) <= max(n + 63, n * 33 // 32 + 1) for n in range(1, 5000, 7))


@pytest.mark.parametrize(
    ("lengths", "tokens"), [([64, 12, 64, 9], 149), ([64] * 40, 2560), ([7], 7), ([64] * 64 + [10], 4106)]
)
def test_windows_are_short_behind_a_row_too(lengths: list[int], tokens: int) -> None:
    """And longer segments, which other layers attend within, end where they end; what is behind them is one."""
    count = static_segments(len(lengths) + pieces_behind(tokens, 64))
    row = StaticRow(static_tokens(tokens), count, torch.device("cpu"))
    assert row.outer_offsets.diff().tolist() == [row.tokens, *(0,) * (count - 1)], "before it is written"
    row.fill_offsets(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0), 64)
    row.fill_outer_offsets(torch.tensor([0, tokens], dtype=torch.int32))
    written = row.offsets.diff()
    assert written[: len(lengths)].tolist() == lengths and int(written.sum()) == row.tokens
    assert int(written.min()) >= 0 and int(written.max()) <= 64
    assert row.outer_offsets.diff().tolist()[:2] == [tokens, row.tokens - tokens]
    assert int(row.outer_offsets[-1]) == row.tokens and row.outer_offsets.dtype == torch.int32


def test_chunks_of_the_delta_rule_cover_every_token_once() -> None:
    """The actual segments', those of the tokens behind, and then of a segment without any."""
    row = StaticRow(256, 8, torch.device("cpu"))
    row.fill(PackedLayout.from_lengths([70, 64, 1]), {})
    kept: dict[str, Any] = row.layout().kept("delta rule", dict)
    starts, chunks = kept["cu_seqlens"].tolist(), kept["chunk_indices"].tolist()
    assert starts == [0, 70, 134, 135, 256, 256, 256, 256, 256]
    covered = [
        token
        for segment, chunk in chunks
        for token in range(starts[segment] + 64 * chunk, min(starts[segment] + 64 * chunk + 64, starts[segment + 1]))
    ]
    assert sorted(covered) == list(range(256)) and chunks[-1] == [7, 0] and len(chunks) == 12
