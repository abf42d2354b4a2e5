"""A run over a hundred kinds of broken rows, with decoding workers: it skips them, counts them and lists them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from support.broken_rows import broken_rows
from support.commands import Zoo, events, summary, text_row, write_rows


@pytest.mark.filterwarnings("ignore")
def test_a_run_skips_a_hundred_kinds_of_broken_rows(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    broken = broken_rows(folder)
    data = folder / "rows.jsonl"
    good = json.dumps(text_row(8)).encode()
    data.write_bytes(b"".join(row.line + b"\n" + good + b"\n" for row in broken.values()))
    held_out = write_rows(tmp_path / "heldout.jsonl", [text_row(9)])
    run = tmp_path / "run"
    done = zoo.train(
        run,
        *(f"data.train={data}", f"data.eval={held_out}", "data.on_error=skip", "data.outside_root=false"),
        # Under augment every row is encoded before it is planned, so that all of them are seen.
        *("data.augment=0.1", "data.workers=1", "train.steps=null", "train.epochs=1", "export=false"),
    )
    assert (done.code, done.err) == (0, ""), done
    counts = Counter(row.cause for row in broken.values())
    assert summary(run)["skipped_rows"] == counts and sum(counts.values()) >= 100
    assert "rows left out: " in done.out and f"{counts['corrupt_media']} corrupt_media" in done.out
    listed = [json.loads(line) for line in (run / "bad_rows.jsonl").read_text().splitlines()]
    assert len(listed) == len(broken) and Counter(entry["cause"] for entry in listed) == counts
    assert "rows_left_out" in events(run)
    records = map(json.loads, (run / "train.jsonl").read_text().splitlines())
    reported = [record["counts"] for record in records if record.get("event") == "rows_left_out"]
    assert reported[-1] == counts
