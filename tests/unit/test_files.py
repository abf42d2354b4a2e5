"""Files are whole or not there, on disks that are really full, read-only or limited; and what is said of them."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.disks import mounted

from zoo.errors import ConfigError, UserError, file_error
from zoo.files import Lines, finite, parse_json, read_json, read_object, replaced, write_atomically


def test_a_full_disk_takes_no_part_of_a_line_or_a_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        lines = Lines(disk / "log.jsonl")
        lines.write("a" * 1000)
        write_atomically(disk / "config.yaml", "first")
        (disk / "rest").write_bytes(bytes(40_000))
        with pytest.raises(OSError, match="No space left") as caught:
            for _ in range(100):
                lines.write("b" * 1000)
        kept = (disk / "log.jsonl").read_text()
        assert kept.endswith("b\n") and {len(line) for line in kept.splitlines()} == {1000}
        found = str(file_error(caught.value))
        assert found.startswith(f"{disk}/log.jsonl: can't be written: no space left on the disk (")
        assert " of 65.5 kB are free); " in found
        with pytest.raises(OSError, match="No space left"):
            write_atomically(disk / "config.yaml", "second" * 10_000)
        assert (disk / "config.yaml").read_text() == "first"
        assert sorted(path.name for path in disk.iterdir()) == ["config.yaml", "log.jsonl", "rest"]
        (disk / "rest").unlink()
        lines.write("c")  # it goes on where it was
        assert (disk / "log.jsonl").read_text() == kept + "c\n"


def test_a_disk_without_inodes_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m,nr_inodes=4") as disk:
        with pytest.raises(OSError) as caught:
            for number in range(10):
                (disk / str(number)).write_text("")
        assert "no more files fit on the disk (its inodes are used up)" in str(file_error(caught.value))


def test_a_read_only_file_system_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        with pytest.raises(OSError) as caught:
            write_atomically(disk / "file", "text")
        said = "can't be written: its file system is read-only; give a place that can be written to"
        assert str(file_error(caught.value)) == f"{disk}/file: {said}"


LIMITED = """
import resource, sys
from pathlib import Path
from zoo.errors import file_error
from zoo.files import Lines
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
lines = Lines(Path(sys.argv[1]))
try:
    for _ in range(100):
        lines.write("x" * 299)
except OSError as error:
    print(file_error(error))
"""


def test_a_limit_on_files_says_so_and_lines_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: can't be written: files may have 5,000 bytes here (ulimit -f); raise that\n"
    assert path.stat().st_size == 4800  # 16 lines


@pytest.mark.parametrize("name", ["ESTALE", "EIO", "ENOTCONN"])
def test_a_file_system_that_is_lost(name: str) -> None:
    number = getattr(errno, name)
    found = str(file_error(OSError(number, os.strerror(number), "/data/run/train.jsonl")))
    assert found.startswith("/data/run/train.jsonl: its file system does not answer (")
    assert str(file_error(OSError(number, os.strerror(number)), "/data/run")).startswith("/data/run: its file")


def test_what_names_no_file_is_no_mistake() -> None:
    assert file_error(OSError(errno.ENOSPC, "No space left on device")) is None
    assert "no permission" in str(file_error(PermissionError(errno.EACCES, "Permission denied", "/x")))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    said = str(file_error(OSError(errno.EMFILE, "Too many open files", "/x")))
    assert said == f"/x: can't be opened: this process may have {limit:,} files open (ulimit -n); raise that"


def test_a_file_takes_its_place_when_all_went_well(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced(path) as partial:
        assert partial.suffix == ".png"
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with replaced(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_json_has_no_word_for_nan() -> None:
    values = {"a": [1.0, float("nan")], "b": float("inf"), "c": "nan"}
    assert finite(values) == {"a": [1.0, None], "b": None, "c": "nan"}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its JSON can't be read"),
        ("{", "its JSON can't be read"),
        ("1" * 5000, "its JSON can't be read"),
        (b"\xff\xfe", "its JSON can't be read"),
        (nested(65), "nested too deeply; at most 64 levels are read"),
        (nested(900), "nested too deeply"),
        (nested(100_000), "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (" " * 2000, "over 1,000 bytes"),
    ],
)
def test_json_of_a_stranger_is_read_or_refused_in_one_sentence(text: str | bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    most = 1000 if said.startswith("over") else 2**24
    with pytest.raises(ConfigError, match=said) as caught:
        read_json(path, most=most, error=ConfigError)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_json_that_is_as_big_and_as_deep_as_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(nested(64))
    assert read_json(path, most=128) == parse_json(nested(64).encode(), "x")
    path.write_text('{"a": 1, "a": {"b": NaN}}')
    assert list(read_object(path)["a"]) == ["b"]
    with pytest.raises(UserError, match="'a' is there twice"):
        read_object(path, unique=True)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    plain = "is no plain file"
    said_of = {
        "pipe": plain,
        "endless": plain,
        "loop": "symbolic links",
        "folder": "directory",
        "nothing": "no such file",
    }
    for name, said in said_of.items():
        with pytest.raises(UserError, match=said) as caught:
            read_json(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")


@pytest.mark.parametrize("text", ["[]", "null", "1", "true", '"{}"'])
def test_an_object_is_wanted(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="wanted a JSON object"):
        read_object(tmp_path / "a.json")
