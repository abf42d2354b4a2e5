"""A small processor, and a folder with media, one of them outside of the data root."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from support.fuzz import memory_below
from support.tiny_omni import PROCESSOR_ARCH


@pytest.fixture(scope="session")
def processor() -> Any:
    from zoo.models.qwen3_omni.processor import build_processor

    return build_processor(PROCESSOR_ARCH)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a.png, b.wav, a link above.png that leads out of it, and a file beside it."""
    folder = tmp_path_factory.mktemp("fuzz") / "root"
    folder.mkdir()
    Image.new("RGB", (40, 40), "red").save(folder / "a.png")
    Image.new("RGB", (40, 40), "blue").save(folder.parent / "secret.png")
    os.symlink("../secret.png", folder / "above.png")
    os.symlink("..", folder / "up")
    soundfile.write(folder / "b.wav", 0.1 * np.ones(4000, np.float32), 16_000)
    return folder


@pytest.fixture(autouse=True)
def bounded(request: pytest.FixtureRequest) -> Any:
    """A test takes less memory than its module's MEMORY_MB, where that has one."""
    limit = getattr(request.module, "MEMORY_MB", None)
    with memory_below(limit) if limit else nullcontext():
        yield
