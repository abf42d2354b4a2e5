"""Two ranks on this machine: interrupted and resumed to the bit, laid out anew, and one of them in trouble."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from support.commands import STEPS, Zoo, events, logged, metrics, summary, text_row, weights, write_rows

pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def straight(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two data-parallel ranks, with fewer packed rows to evaluate than ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    done = zoo.train(folder, "nproc=2")
    assert (done.code, done.err) == (0, ""), done
    assert "| 2 ranks (dp=2) | " in done.out.splitlines()[1]
    steps = [line.split("  ")[0] for line in done.out.splitlines() if line.startswith("step ")]
    assert steps == [f"step {n}/6" for n in range(1, 7)]
    assert summary(folder)["metrics"]["rows"] == 2
    return folder


def test_an_interrupt_ends_all_ranks_and_the_run_goes_on_to_the_bit(zoo: Zoo, straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running = zoo.start_training(folder, "nproc=2")
    running.until(lambda: "step" in events(folder))
    ranks = children(running.pid)
    running.interrupt()
    done = running.ended()
    assert done.code == 130, done
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    at = summary(folder)["steps"]
    assert 0 < at < STEPS and f"stopped at step {at} of 6, saved in " in done.out.splitlines()[-1]

    assert zoo.train(folder, "nproc=2").code == 0
    assert metrics(folder) == metrics(straight)
    assert weights(folder) == weights(straight)


def test_a_run_goes_on_under_another_layout(zoo: Zoo, straight: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(straight, tmp_path / "run"))
    done = zoo.train(folder, "nproc=2", "parallel.ep=2", "train.steps=8")
    assert (done.code, done.err) == (0, ""), done
    assert "| 2 ranks (ep=2 dp=2) | " in done.out
    assert [record["step"] for record in logged(folder)] == list(range(1, 9))


def test_a_bad_row_on_one_rank_ends_both_with_one_sentence(zoo: Zoo, tmp_path: Path) -> None:
    broken = {**text_row(5), "images": ["half.png"]}
    broken["messages"][0]["content"] += "<image>"
    (tmp_path / "half.png").write_bytes(b"\x89PNG")
    # The row is met while a step runs; without a cache each rank reads its own rows again.
    data = write_rows(tmp_path / "rows.jsonl", [*map(text_row, range(40)), broken])
    overrides = ["nproc=2", f"data.train={data}", "data.shuffle=false", "data.lookahead=2", "data.cache_mb=0"]
    message = zoo.refused(*zoo.train_arguments(tmp_path / "run", *overrides, "train.steps=50"))
    assert message.startswith(f"{data}:41: image {tmp_path}/half.png can't be used: ")


def test_a_picture_that_is_cut_off_is_found_out_on_one_rank_and_left_out_on_both(zoo: Zoo, tmp_path: Path) -> None:
    """Its header is whole, so it is planned; both ranks plan anew, as one rank alone does."""
    whole = tmp_path / "whole.png"
    Image.effect_noise((64, 64), 80).save(whole)
    rows = [text_row(number) for number in range(30)]
    for number in (3, 11, 24):
        (tmp_path / f"{number}.png").write_bytes(whole.read_bytes()[:1000])
        rows[number]["images"] = [f"{number}.png"]
        rows[number]["messages"][0]["content"] += "<image>"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / f"run{ranks}"
        options = [f"nproc={ranks}", f"data.train={data}", "data.augment=0", "data.on_error=skip"]
        done = zoo.train(folder, *options, "train.steps=8", "export=false")
        assert (done.code, done.err) == (0, ""), done
        assert summary(folder)["skipped_rows"] == {"corrupt_media": 3}
        bad = (folder / "bad_rows.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["source"] for line in bad) == [f"{data}:{n}" for n in (12, 25, 4)]
        found[ranks] = [(record["real_tokens"], record["labels"]) for record in logged(folder)]
    assert found[1] == found[2]
