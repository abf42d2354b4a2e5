"""YAML of strangers: bounded in depth, count and size, without objects, and no message says what stood in a file."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import within

from zoo.config.compose import load_recipe, save_recipe
from zoo.config.layers.reader import MOST_DEPTH, UnreadableError, read_yaml
from zoo.errors import ConfigError, UserError

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10))
BOMBS = {
    "brackets": "base: llava_sft\nmodel: " + "[" * 50_000 + "]" * 50_000,
    "open brackets": "[" * 500_000,
    "mappings": "{a: " * 50_000 + "}" * 50_000,
    "lines": "- " * 50_000,
    "question marks": "? " * 50_000,
    "laughs": LAUGHS,
    "merges": MERGES,
    "one long text": f"a: &a {'x' * 500_000}\nb: [{','.join(['*a'] * 9000)}]\n",
    "itself": "a: &a [*a]\n",
    "values": "a: [" + "1," * 300_000 + "]",
    "base 60": "run: {seed: !!int " + ":".join(["59"] * 100_000) + "}",
    "hexadecimal": "run: {seed: 0x" + "f" * 500_000 + "}",
    "digits": "run: {seed: " + "9" * 500_000 + "}",
    "anchors": "a: [" + "&a 1," * 100_000 + "]",
    "size": "a: 1\n" * 300_000,
}  # fmt: skip
SECRET = "hunter2"
FOREIGN = {
    "passwd": f"root:x:0:0:{SECRET}:/root:/bin/bash\ndaemon:x:1:1:{SECRET}:/usr/sbin:/usr/sbin/nologin\n",
    "env": f"PASSWORD={SECRET}\nOTHER={SECRET}\n",
    "values": f"password: {SECRET}\n",
    "netrc": f"machine example.org login me password {SECRET}\n",
    "odd keys": f"the password is {SECRET}: 1\n",
    "tag": f"a: !{SECRET} b\n",
    "alias": f"a: *{SECRET}\n",
    "int": f"a: !!int {SECRET}\n",
    "twice": f"{SECRET}: 1\n{SECRET}: 2\n",
    "quote": f"a: '{SECRET}\n",
    "list": f"- {SECRET}\n",
    "key": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n",
    "directive": f"%{SECRET} 1\n---\na: 1\n",
}


def refusal(path: Path | str, *overrides: str) -> str:
    with within(5), pytest.raises(UserError) as caught:
        load_recipe(str(path), overrides)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    return message


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_would_become_much(name: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BOMBS[name])
    assert refusal(tmp_path / "r.yaml").startswith(f"{tmp_path}/r.yaml")


@pytest.mark.parametrize("name", BOMBS)
def test_an_override_that_would_become_much(name: str) -> None:
    assert refusal("llava_sft", f"model.arch={BOMBS[name]}").startswith("model.arch=")


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_something_else_is_not_shown(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(FOREIGN[name])
    (tmp_path / "mine.yaml").write_text(f"base: {tmp_path}/other\n")
    for message in (
        refusal(tmp_path / "mine.yaml"),
        refusal(f"{tmp_path}/other"),
        refusal("llava_sft", f"size={tmp_path}/other"),
        refusal("llava_sft", f"hardware={tmp_path}/other"),
    ):
        assert SECRET not in message and f"{tmp_path}/other" in message


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    os.symlink("loop.yaml", "loop.yaml")
    os.symlink(".", "here")
    Path("folder.yaml").mkdir()
    Path("base.yaml").write_text("base: ./here/base.yaml\n")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket.yaml")
    places = ("pipe.yaml", "folder.yaml", "socket.yaml", "/dev/zero", "/dev/tty", "/proc/self/mem", "here/base.yaml", "loop.yaml")  # fmt: skip
    for place in (*places, "~nobody_of_that_name/r.yaml", "a\0b/r.yaml", "x" * 5000 + ".yaml"):
        try:
            refusal(place)
        except OSError as error:  # the command line says these in a sentence
            assert error.filename is not None
    listening.close()


def test_values_are_those_of_yaml() -> None:
    text = """
base: &b {x: 1, y: 1e-4, z: .5, on: yes, off: no, none: ~, empty: }
more: {<<: *b, x: 2}
texts: [1:30, '59:59', 2001-01-01, "1", =, !!str 5, 1.2.3, 0x, "a\\nb"]
numbers: [0x1F, 0b11, 017, 1_000, -3, +4, -1.5e+3, 2e5, !!float 1]
"""
    base = {"x": 1, "y": 1e-4, "z": 0.5, True: True, False: False, "none": None, "empty": None}
    assert read_yaml(text) == {
        "base": base,
        "more": {**base, "x": 2},
        "texts": ["1:30", "59:59", "2001-01-01", "1", "=", "5", "1.2.3", "0x", "a\nb"],
        "numbers": [31, 3, 15, 1000, -3, 4, -1500.0, 200000.0, 1.0],
    }
    assert read_yaml("") is None
    assert read_yaml("\ufeffa: 1") == {"a": 1}
    deepest = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    read_yaml(deepest)
    with pytest.raises(UnreadableError, match=f"over {MOST_DEPTH}"):
        read_yaml(f"[{deepest}]")


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!set", "!!binary", "!x"]
)
def test_tags_make_nothing(tag: str) -> None:
    with pytest.raises(UnreadableError, match="a tag"):
        read_yaml(f"a: {tag} b")


@pytest.mark.slow
def test_programs_give_values_of_the_same_bounds() -> None:
    recipe = load_recipe("llava_sft")
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    itself: dict[str, Any] = {}
    itself["it"] = itself
    for value in (deep, itself, [1] * 100_000, {"a": [deep]}):
        for key in ("model.arch", "model.arch.x", "data.train"):
            with within(5), pytest.raises(ConfigError):
                recipe.replace({key: value})
    for key in ("a." * 5000, ".", "", 3, None):
        with pytest.raises(ConfigError):
            recipe.replace({key: 1})  # type: ignore[dict-item]
    for overrides in ([3], [None], ["x"], "x", [b"train.steps=1"]):
        with pytest.raises(ConfigError):
            load_recipe("llava_sft", overrides)  # type: ignore[arg-type]
    assert load_recipe("llava_sft", "train.steps=3").train.steps == 3


def test_backslashes_do_not_bring_references_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("ODD", r"\${oc.env:SECRET}")
    monkeypatch.setenv("SLASH", "a\\")
    expected = {
        r"${oc.env:ODD}": r"\${oc.env:SECRET}", r"\${oc.env:SECRET}": "${oc.env:SECRET}",
        r"\\\${oc.env:SECRET}": r"\${oc.env:SECRET}", r"\\${oc.env:SLASH}": "\\a\\",
        r"${oc.env:SLASH}\${oc.env:SECRET}": "a\\${oc.env:SECRET}", r"a\b": r"a\b",
    }  # fmt: skip
    for text, value in expected.items():
        recipe = load_recipe("llava_sft", [f"run.dir={text}", f"model.arch.x={text}"])
        save_recipe(recipe, tmp_path / "config.yaml")
        for found in (recipe, recipe.replace({}), load_recipe(tmp_path / "config.yaml")):
            assert (found.run.dir, found.model.arch["x"]) == (value, value)
