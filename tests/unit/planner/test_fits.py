"""docs/fits.md is what its script writes, by a sample of its lines."""

import runpy
from pathlib import Path
from typing import Any

import pytest

import zoo

REPO = Path(zoo.__file__).parents[1]
SAMPLE = [
    ("qwen3_omni", "30b-a3b", "sft", 80),
    ("qwen3_vl", "32b", "sft", 141),
    ("qwen35_vl", "9b", "lora", 80),
    ("llava", "onevision-0.5b", "lora", 141),
    ("qwen3_vl", "30b-a3b", "lora", 141),
    ("gemma3", "4b", "sft", 141),
    ("gemma3_text", "270m", "lora", 80),
    ("gemma4", "31b", "lora", 141),
    ("internvl", "8b", "sft", 80),
    ("glm45v", "4.5-106b-a12b", "lora", 141),
    ("qwen25_omni", "3b", "lora", 80),
    ("qwen3_asr", "0.6b", "sft", 80),
    ("qwen3", "30b-a3b", "sft", 80),
    ("qwen3_next", "80b-a3b", "lora", 141),
]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(REPO / "scripts" / "fits_table.py"))


@pytest.mark.parametrize(("family", "size", "way", "memory_gb"), SAMPLE)
def test_a_line_of_the_tables(
    family: str, size: str, way: str, memory_gb: int, script: dict[str, Any]
) -> None:
    title = f"### {script['WAYS'][way]}, GPUs of {memory_gb} GB\n"
    table = script["PAGE"].read_text(encoding="utf-8").split(title)[1].split("###")[0]
    wanted = script["line"](family, size, way, memory_gb)
    assert wanted in table.splitlines(), "run python scripts/fits_table.py"


def test_every_published_size_has_a_line(script: dict[str, Any]) -> None:
    assert len(script["sizes"]()) == 53
    text = script["PAGE"].read_text(encoding="utf-8")
    for family, size in script["sizes"]():
        assert text.count(f"| {script['FAMILIES'][family]} {size} | ") == 4
