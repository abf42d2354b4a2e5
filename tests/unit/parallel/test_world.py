"""How many CPU threads a rank takes beside a GPU, what its operations run on here being a CPU all the same; and what a world ends."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.checkpoint import initial_weights
from zoo.config import devices
from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.nn.graphs.recorder import Recorder
from zoo.parallel import world as place
from zoo.parallel.world import open_world


@pytest.mark.parametrize(("overrides", "in_steps", "on_weights"), [((), 1, 12), (("engine.threads=3",), 3, 3)])
def test_one_thread_beside_a_gpu(
    overrides: tuple[str, ...], in_steps: int, on_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = validate(load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu", *overrides]), 1)
    for module in (devices, place):
        monkeypatch.setattr(module, "gpu_count", lambda: 1)
    monkeypatch.setattr(devices, "cores", lambda: 12)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    loaded_with: list[int] = []

    def load(*_: Any, **__: Any) -> Any:
        loaded_with.append(torch.get_num_threads())
        return SimpleNamespace(entries={})

    monkeypatch.setattr(initial_weights, "load_hf", load)
    monkeypatch.setattr(initial_weights, "model_dims", lambda _: None)
    source = SimpleNamespace(kind="hf", weights=None, grown_from=0)
    assembly: Any = SimpleNamespace(family=SimpleNamespace(load=lambda _: None), source=source)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_world(recipe) as here:
            assert torch.get_num_threads() == in_steps
            initial_weights.init_weights([], assembly, recipe, here)
            assert loaded_with == [on_weights]
            assert torch.get_num_threads() == in_steps
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ranks_meet_under_a_name_that_no_earlier_start_had() -> None:
    """torchrun's store, with what two earlier starts have left in it; one rank is started again while the others wait."""
    store = torch.distributed.HashStore()

    def start(size: int, late: int | None = None) -> set[str]:
        if late is not None:  # it asked, and was gone before an answer came
            store.set(f"zoo-asks{late}", "gone")
        with ThreadPoolExecutor(size) as pool:
            names = {*pool.map(lambda rank: place._met(store, rank, size), range(size))}
        return names

    names = [start(3), start(2, late=1), start(4, late=3)]
    assert [len(each) for each in names] == [1, 1, 1] and len(set.union(*names)) == 3


def test_graphs_are_given_up_before_process_groups_end() -> None:
    """NCCL would wait for ever for those that hold its work."""
    there = []

    class Noted(Recorder):
        def release(self) -> None:
            there.append(torch.distributed.is_initialized())

    recipe = validate(load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu"]), 1)
    with open_world(recipe):
        held = Noted()
        assert not there
    assert there == [True] and isinstance(held, Recorder)
