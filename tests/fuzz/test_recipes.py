"""Recipes of any kind, files and overrides: each is a recipe or a ConfigError of one sentence, soon, and no tag makes an object."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzzed, mutated, within

from zoo.config.architecture import LISTS, REAL, WHOLE, WHOLES
from zoo.config.compose import load_recipe
from zoo.config.layers.keys import keys, sections
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import UserError

MEMORY_MB = 512
GOOD = [
    b"base: qwen3_vl_sft\ndata:\n  train:\n    - {path: a.jsonl, weight: 0.3, epochs: 2}\n  root: ${oc.env:HOME}\n",
    b"base: llava_sft\nsize: tiny\ntrain: {steps: 3, lr: 1e-4, lr_scale: {vision: 0.1}}\nlora: {rank: 4, targets: [all-linear]}\n",
    b"model:\n  family: qwen3_vl\n  arch: &a {hidden_size: 64, deep: {er: [1, 2.5, null, true]}}\n  freeze: [vision]\nrun: {seed: 0x1F}\n",
    b"<<: {train: {steps: 1}}\nbase: qwen3_omni_sft\nparallel: {tp: 1, plan: [tp, pp]}\ndescription: |\n  words\n",
]
VALUES = [
    "1", "-1", "1e400", ".nan", "0x", "1" * 5000, "null", "~", "{}", "[]", "[1, [2, [3]]]", "{a: {b: c}}", "true", "${", "${}", "${a", "${oc.env:}",
    "${oc.env:HOME}", "${oc.env:NO_SUCH,${oc.env:HOME}}", "${oc.decode:1}", "${oc.create:{}}", "${train.steps}", "${.}", "${..run.seed}", "\\${x}", "$${",
    "!!python/object/apply:os.system [touch zoo_was_here]", "!!python/name:os.system", "!!python/object/new:tuple [[1]]", "!!python/tuple [1]",
    "!!python/object/apply:pathlib.PosixPath [a, b]", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2001-99-99", "!!int x", "!!int ''", "!!float x",
    "!!bool x", "!!omap [a: 1]", "!!map [1]", "!!seq {a: 1}", "!!str [1]", "!x y", "&a [*a]", "*a", "&a {<<: *a}", "{<<: [{a: 1}, {b: 2}]}", "{<<: 1}",
    "{? [1, 2] : 3}", "{? {a: 1} : 3}", "{1: 2, 1.5: 3, true: 4, null: 5}", "[" * 2000, "{a: " * 900, "- " * 800, "? " * 800, "'", '"\\x', '"\\ud800"',
    '"\\0"', "\t", "%YAML 9.9", "---\n---", "a: b: c", "@", "`", "|", ">", "2001-01-01", "1:30", "0b", "0o8", "1_0", "digits:train", "{path: 1}",
    "shard-{0..99999999999}.tar", "???", ".inf", "'-.inf'", "1e18", "1000000000000000000", "9" * 30, "59:59:59", "~x/y", "a\0b", "/dev/zero", "/dev/stdin",
    "\\\\${oc.env:HOME}", "\\\\${oc.create:{a: 1}}", "\\\\\\${", "*", "[[]]", "[{}]", "[{path: a, weight: .nan}]", "{weight: 1}", "{text_config: 1}", "a" * 10_000, "\x85", "é", "👍",
]  # fmt: skip
NAMES = [*keys(Recipe), *sections(Recipe), "base", "size", "hardware", "recipe", "resolved", "description", "data.train[0]", "data.train[0].weight",
         "data.train[99999999999999]", "data.train[0].epochs", "data.train[0].held_out", "data.train[0].seed",
         *(f"model.arch.{part}{key}" for key in (*WHOLE, *REAL, *WHOLES, *LISTS) for part in ("", "text_config.", "thinker_config.text_config.")), "model.arch.vision_config.depth", "train.lr_scale.vision", "train..steps", ".", "a.b.c", "data.train[", "__class__", "train.__init__"]  # fmt: skip
FIXED = {"HOME": "/nowhere"}


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nowhere")
    yield
    assert not (tmp_path / "zoo_was_here").exists()


def check(recipe: str, overrides: list[str]) -> None:
    try:
        with within():
            validate(load_recipe(recipe, overrides), 1)
    except UserError as error:
        assert len(str(error)) <= 2000, str(error)[:3000]
        str(error).encode(errors="surrogateescape")
    except OSError as error:  # the command line says these in a sentence too
        assert error.filename is not None


@fuzzed()
@given(text=mutated(GOOD))
def test_files_of_bytes(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / f"bytes{os.getpid()}.yaml"
    path.write_bytes(text)
    check(str(path), [])


lines = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES))


@fuzzed()
@given(lines=st.lists(lines, min_size=1, max_size=4), base=st.booleans(), nest=st.booleans())
def test_files_of_odd_values(lines: list[tuple[str, str]], base: bool, nest: bool, tmp_path_factory: Any) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / f"values{os.getpid()}.yaml"
    text = "base: qwen3_vl_sft\n" if base else ""
    for name, value in lines:
        *outer, last = name.split(".") if nest else [name]
        text += "".join(f"{' ' * depth}{part}:\n" for depth, part in enumerate(outer))
        text += f"{' ' * len(outer)}{last}: {value}\n"
    path.write_bytes(text.encode(errors="surrogatepass"))
    check(str(path), [])


@fuzzed()
@given(
    overrides=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=12)), max_size=3)
)
def test_overrides(overrides: list[tuple[str, str]]) -> None:
    check("qwen3_vl_sft", [f"{name}={value}" for name, value in overrides])


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("llava_sft", "model.arch={1: 2}"),
        ("llava_sft", "model.arch.text_config={1: 2}"),
        ("internvl_sft", "data.max_pixels=1000"),
        ("glm45v_sft", "model.arch.text_config.rope_parameters.partial_rotary_factor=null"),
        ("qwen3_vl_sft", f"model.arch.text_config.rope_parameters.mrope_section={[1] * 3000}"),
    ],
)
def test_overrides_that_led_to_tracebacks_once(recipe: str, override: str) -> None:
    from zoo.planner.plan import plan

    try:
        plan(load_recipe(recipe, ["size=tiny", "model.init=random", "hardware=4xa100-40", override]))
    except UserError as error:
        assert len(str(error)) < 2000
