"""Tiny Qwen3-Omni checkpoints as transformers saves them, and the helpers beside this file."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # bridge_fakes; the gloo worker imports it too

import bridge_fakes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "bridge_fakes.Tiny":
    """Folders `thinker`, `silent` (whole model without a talker) and `talking` (with one), one thinker in all three."""
    return bridge_fakes.write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))
