"""megatron-core is imported without what torch.compile needs, and its functions are compiled when they are called."""

import subprocess
import sys
from typing import Any

import pytest

from zoo.engine.launch.core_import import _at_first_call


def test_a_function_is_compiled_at_its_first_call_with_its_options() -> None:
    seen: list[Any] = []

    def compile_now(function, **options):
        seen.append((function.__name__, options))
        return function

    later = _at_first_call(compile_now)

    @later
    def plain(x: int) -> int:
        """Adds one."""
        return x + 1

    @later(dynamic=True)
    def with_options(x: int) -> int:
        return x * 2

    assert not seen and plain.__doc__ == "Adds one."
    assert (plain(1), plain(2), with_options(3)) == (2, 3, 6)
    assert seen == [("plain", {}), ("with_options", {"dynamic": True})]


@pytest.mark.slow
def test_a_rank_starts_without_the_compiler() -> None:
    code = (
        "import sys, torch; before = torch.compile\n"
        "from zoo.engine.distributed.determinism import set_deterministic\n"
        "from zoo.engine.launch.core_import import import_core\n"
        "import_core(); import zoo.engine.train.trainer; set_deterministic(True)\n"
        "assert torch.are_deterministic_algorithms_enabled() and torch.compile is before\n"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
