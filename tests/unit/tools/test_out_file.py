"""`out=` of generate, eval and score, on disks that are really full: the former file stays, and rows that were done are kept."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.disks import mounted
from support.tiny_qwen3 import write_tiny_qwen3

import zoo
from zoo.cli.main import main
from zoo.errors import UserError
from zoo.tools.out_file import out_file

COUNT = 12
TOO_LONG = 2000  # times, for the model
CALLS = {
    "generate": ("text", ["max_new_tokens=3", "batch=2", "packing.budget=2048"]),
    "eval": ("finish", ["max_new_tokens=3", "batch=2", "packing.budget=2048"]),
    "score": ("logprobs", ["packing.budget=2048"]),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in range(COUNT)))
    return path


def row(number: int, times: int = 4) -> dict[str, Any]:
    asked = f"Say {number}, and keep in mind that this is a longer question. " * times
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{number}. " * 100}]}


def command(verb: str, weights: Path, rows: Path, out: Path) -> list[str]:
    return [verb, str(weights), f"rows={rows}", f"out={out}", *CALLS[verb][1]]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("verb", CALLS)
def test_a_full_disk_leaves_the_former_file_and_the_rows_that_were_done(
    verb: str, weights: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(verb, weights, rows, tmp_path / "whole.jsonl")) == 0
    whole = read(tmp_path / "whole.jsonl")
    assert len(whole) == COUNT and CALLS[verb][0] in whole[0]
    assert [path.name for path in tmp_path.iterdir()] == ["whole.jsonl"]
    with mounted(tmp_path / "disk", "size=1m") as disk:
        out = disk / "rows.jsonl"
        out.write_text("former\n")
        filling = (tmp_path / "whole.jsonl").stat().st_size // 8192 + 1
        (disk / "other").write_bytes(bytes(2**20 - 4096 * (1 + filling)))  # not for all rows
        capsys.readouterr()
        assert main(command(verb, weights, rows, out)) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        kept = disk / "rows.unfinished.jsonl"
        done = read(kept)
        assert said.startswith("zoo: error: ") and "no space left on the disk" in said
        assert said.endswith(f"; the {len(done)} rows that were done are in {kept}")
        assert out.read_text() == "former\n" and 0 < len(done) <= COUNT
        by_source = {entry["source"]: entry for entry in whole}
        for entry in done:
            assert entry[CALLS[verb][0]] == by_source[entry["source"]][CALLS[verb][0]]


def test_rows_that_were_done_are_kept_whatever_ends_the_call(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "bad.jsonl", tmp_path / "new" / "out.jsonl"
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in range(6)) + json.dumps(row(COUNT, TOO_LONG)))
    assert main(command("generate", weights, path, out)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.endswith(f"; the 6 rows that were done are in {out.with_name('out.unfinished.jsonl')}")
    assert main(command("generate", weights, path, out)) == 2  # which lets the first ones be
    assert capsys.readouterr().err.strip().endswith("out.unfinished-2.jsonl")
    assert main([*command("generate", weights, path, out), "data.on_error=skip"]) == 0
    names = ["out.jsonl", "out.unfinished-2.jsonl", "out.unfinished.jsonl"]
    assert sorted(file.name for file in out.parent.iterdir()) == names
    assert read(out) == read(out.with_name(names[2]))


def test_a_place_that_can_not_be_written_to_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    places = {"": "wanted the name of a file", str(tmp_path): "it is a folder", f"{tmp_path}/file/a": "File exists"}
    for place, message in places.items():
        for verb in CALLS:
            assert main([verb, "nowhere", "rows=nothing", f"out={place}"]) == 2
            said = capsys.readouterr().err
            assert message in said and said.count("\n") == 1
    with mounted(tmp_path / "disk", "ro") as disk:
        assert main(["score", "nowhere", "rows=nothing", f"out={disk}/a"]) == 2
        assert "its file system is read-only" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "file"]


def test_links_lead_to_the_file_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("former")
    (tmp_path / "link").symlink_to("real.jsonl")
    with out_file(tmp_path / "link") as file:
        file.write([{"source": "\udcff"}])
    assert (tmp_path / "link").is_symlink() and read(tmp_path / "real.jsonl") == [{"source": "\udcff"}]
    code = "from zoo.tools.out_file import out_file\nwith out_file('/dev/stdout') as f: f.write([{'a': 1}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == '{"a": 1}\n'


def test_one_rank_of_several_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with out_file(tmp_path / "a.jsonl") as file:
        assert file.kept is not None  # as on the first rank
        file.write([{}])
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_several_ranks_keep_the_rows_of_all(weights: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 3, "batch": 2, "out": out}
    found = zoo.generate(weights, rows, ["nproc=2", "packing.budget=2048"], **options)
    assert read(out) == found and len(found) == COUNT
    with rows.open() as file:
        bad = tmp_path / "bad.jsonl"
        bad.write_text(file.read() + json.dumps(row(COUNT, TOO_LONG)))
    with pytest.raises(UserError, match="rows that were done are in") as caught:
        zoo.generate(weights, bad, ["nproc=2", "packing.budget=2048"], **options)
    kept = read(tmp_path / "out.unfinished.jsonl")
    assert f"the {len(kept)} rows" in str(caught.value) and len(kept) >= COUNT // 2
    wanted = {entry["source"].rpartition(":")[2]: entry["token_ids"] for entry in found}
    assert all(wanted[entry["source"].rpartition(":")[2]] == entry["token_ids"] for entry in kept)


@pytest.mark.slow
def test_ranks_with_fewer_groups_of_rows_than_others_keep_them_too(weights: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 3, "batch": 4}  # three groups
    found = zoo.generate(weights, rows, ["nproc=2", "packing.budget=2048"], out=out, **options)
    assert read(out) == found
    assert [row["source"].rpartition(":")[2] for row in found] == [str(number) for number in range(1, COUNT + 1)]


def test_numbers_of_rows_are_whole_and_from_one() -> None:
    takers = {"batch": (zoo.generate, zoo.evaluate), "max_rows": (zoo.generate, zoo.evaluate, zoo.score)}
    for name, value in itertools.product(takers, (0, -1, 1.5, True, "3", 2.0)):
        for function in takers[name]:
            with pytest.raises(UserError, match=f"^{name}=.*: wanted a whole number from 1$"):
                function("nowhere", "rows.jsonl", **{name: value})
    with pytest.raises(UserError, match="anls"):
        zoo.evaluate("nowhere", "rows.jsonl", metrics="wer, anl")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        zoo.evaluate("nowhere", "rows.jsonl", metrics="wer, anls")
