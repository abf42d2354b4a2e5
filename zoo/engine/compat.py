"""Faults of megatron-core that are mended here, each in a shim of its own.

A shim says what is wrong, in which versions, and is applied to those alone. tests/unit/engine/test_compat.py
shows each fault without its shim, and asks for the shim's removal where the installed version no longer has it.
Faults that zoo avoids by other modules (rotary angles of packed rows, torch's norm without sequence parallelism)
need no shim. Below the shims stand the functions that are called in the place of faulty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version


@dataclass(frozen=True)
class Shim:
    """One mend: `fault` is a sentence, `last_broken` the newest megatron-core known to have it."""

    name: str
    fault: str
    last_broken: str
    apply: Callable[[], None]

    @property
    def needed(self) -> bool:
        """Whether the installed megatron-core is one that has the fault."""
        return Version(version("megatron-core")) <= Version(self.last_broken)


_applied: set[str] = set()


def install() -> None:
    """Apply the shims that the installed megatron-core needs, once."""
    for shim in SHIMS:
        if shim.needed and shim.name not in _applied:
            shim.apply()
            _applied.add(shim.name)


def _mend_expert_bias_mask() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = TopKRouter
    broken = router._apply_expert_bias

    def apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
        """`routing_map` (tokens, experts), `padding_mask` (tokens,): one axis is missing upstream."""
        broken(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    router._apply_expert_bias = apply_expert_bias


def _save_without_a_manager() -> None:
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    module: Any = filesystem_async
    module._results_queue = queue.Queue()


SHIMS = (
    Shim(
        name="save-without-a-manager",
        fault="a save in this process's own threads starts a spawned manager process for its results: half a GiB "
        "a rank, and EOFError in a script without `if __name__ == '__main__':`, which the process imports again",
        last_broken="0.19.2",
        apply=_save_without_a_manager,
    ),
    Shim(
        name="expert-bias-mask",
        fault="TopKRouter._apply_expert_bias combines a (tokens, experts) map with a (tokens,) padding mask",
        last_broken="0.19.2",
        apply=_mend_expert_bias_mask,
    ),
)


def allocate_optimizer_state(optimizer: Any) -> None:
    """Give torch's AdamW a state to load into: megatron-core 0.19.2 cannot describe an optimizer that never stepped.

    The step this takes, on gradients of zero, moves weights by their decay; loading overwrites them and the step count.
    """
    for one in optimizer.chained_optimizers:
        if not one.optimizer.state:
            one._init_optimizer_states_with_dummy_values()


def load_optimizer_state(optimizer: Any, loaded: dict[Any, Any], step: int) -> None:
    """Moments and fp32 weights from the checkpoint, learning rate and the like as the recipe has them now.

    In the place of `optimizer.load_state_dict(loaded)`, which can't load into other hyper-parameters or another number
    of chained optimizers (one for the experts where they are sharded otherwise). With torch's AdamW, megatron-core
    0.19.2 hands one step counter to all parameters, which each of them would advance, and expects it among the tensors.
    """
    chained = optimizer.chained_optimizers
    parts = [loaded] if len(chained) == 1 else [loaded[i] for i in range(len(chained))]
    for one, part in zip(chained, parts, strict=True):
        groups = [{**group, "step": step} for group in one.optimizer.state_dict()["param_groups"]]
        one.load_state_dict({"optimizer": {"param_groups": groups}})
        states = one.optimizer.state.values()
        counters = [state.pop("step", None) for state in states]
        one.load_parameter_state_from_fully_reshardable(part["param_state"])
        for state, counter in zip(states, counters, strict=True):
            if counter is not None:
                state["step"] = counter.clone()
