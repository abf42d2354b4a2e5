"""A short soak: memory, open files and processor time of a run stay constant after its first steps."""

from pathlib import Path

import pytest

from benchmarks.soak import SoakOptions, run, table

SMALL = (
    "model.arch.text_config.num_hidden_layers=1",
    "model.arch.vision_config.depth=1",
    "model.arch.vision_config.deepstack_visual_indexes=[0]",
    "hardware=cpu",
)


@pytest.mark.slow(minutes=2)
def test_nothing_grows_in_300_steps(tmp_path: Path) -> None:
    """Limits are wide: the machine does other things, too. benchmarks/README.md has the long run."""
    report = run(SoakOptions(steps=300, every=25, after=100, folder=str(tmp_path / "soak")), SMALL)
    assert report.events["save"] >= 11 and report.events["eval"] >= 11
    assert len(report.steps_ms) == 300
    assert report.memory.first > 100 and report.memory.share < 0.06, table(report)
    assert report.files.first > 3 and report.files.share < 0.1, table(report)
    assert report.step_ms.share < 1.0, table(report)
    assert (tmp_path / "soak" / "soak.png").stat().st_size > 10_000
    assert table(report).startswith("300 steps of qwen3_vl_sft tiny on 1 rank(s) in ")
