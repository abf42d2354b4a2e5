"""Overrides that are a program's objects: each becomes its plain value, or one sentence that names its key."""

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import zoo
from zoo.config.layers.layer import combined
from zoo.errors import ConfigError, UserError


class Choice(Enum):
    MUON = "muon"
    THREE = 3


class Number(IntEnum):
    THREE = 3


class Raises:
    """An object whose methods do what no object should."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def _raise(self, *_: object) -> NoReturn:
        raise self.error

    __repr__ = __bool__ = __eq__ = __str__ = _raise
    __hash__ = object.__hash__


class RaisesPath(Raises):
    __fspath__ = Raises._raise


class RaisesArray(Raises):
    tolist = Raises._raise


class RaisesMapping(dict[str, Any]):
    def items(self) -> NoReturn:
        raise RuntimeError("no items")


class Noisy:
    def __repr__(self) -> str:
        return "two\nlines \x1b[31m" + "x" * 10**6


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
PLAIN: list[tuple[str, Any, Any]] = [
    *(("train.steps", value, 3) for value in (torch.tensor(3), np.int64(3), np.array(3), Number.THREE, Choice.THREE)),
    *(("train.steps", value, 3) for value in (Decimal(3), Fraction(3), b"3", np.str_("3"), torch.ones(3).sum().int())),
    *(("train.lr", value, 0.5) for value in (torch.tensor(0.5), np.float32(0.5), Decimal("0.5"), Fraction(1, 2))),
    ("train.lr", torch.nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16)), 0.5),
    *(("train.optimizer", value, "muon") for value in (Choice.MUON, b"muon", np.str_("muon"), Path("muon"))),
    *(("run.dir", value, "a/b") for value in (Path("a/b"), b"a/b", np.str_("a/b"))),
    *(("export", value, False) for value in (np.bool_(False), torch.tensor(False))),
    *(("model.freeze", value, ["vision"]) for value in (("vision",), {"vision"}, deque(["vision"]), np.array(["vision"]))),
    ("model.freeze", {"vision": 1}.keys(), ["vision"]),
    ("train", OrderedDict(lr=np.float64(0.5)), 0.5),
    ("data.train", {"path": Path("a.jsonl"), "weight": np.float64(2)}, [{"path": "a.jsonl", "weight": 2.0}]),
]  # fmt: skip
BAD: list[tuple[Any, Any]] = [
    *(("train.steps", value) for value in (torch.tensor([3, 4]), torch.zeros(3, device="meta"), np.arange(10**6), Choice.MUON)),
    *(("train.steps", value) for value in (Raises(RuntimeError()), Raises(SystemExit(3)), RaisesPath(ValueError()), Noisy())),
    *(("train.steps", value) for value in (RaisesArray(OSError()), Decimal("nan"), 3 + 0j, object(), int, lambda: 3, torch.int64)),
    *(("train.steps", value) for value in ((_ for _ in "a"), range(3), 10**5000, CYCLE, {"a": CYCLE}, float("nan"))),
    *(("train", value) for value in (RaisesMapping(), {Raises(RuntimeError()): 1}, {"steps": Noisy()}, {("a", "b"): 1}, 3)),
    *(("data.train", value) for value in (Raises(RuntimeError()), [Raises(RuntimeError())], {"path": Raises(RuntimeError())}, 3, [b"a"])),
    *((key, 1) for key in (Raises(RuntimeError()), None, 3, b"train.steps", ("train", "steps"), Noisy())),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "plain"), PLAIN)
def test_an_object_becomes_its_plain_value(key: str, value: Any, plain: Any) -> None:
    recipe = zoo.load_recipe("qwen3_vl_sft", {"size": "tiny", key: value})
    read = attrgetter(key)(recipe)
    read = read.lr if key == "train" else read
    assert read == plain and type(read) is type(plain)
    assert attrgetter(key)(recipe.replace({"run.seed": 1, key: value})) == attrgetter(key)(recipe)


def refused(call: Callable[[Mapping[Any, Any]], object], wrong: Any, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        call({wrong: value})
    message = str(caught.value)
    assert len(message) <= 1500 and message.isprintable(), message
    if isinstance(wrong, str) and "holds itself" not in message:
        assert message.startswith(wrong), message


@pytest.mark.parametrize("number", range(len(BAD)))
def test_an_object_that_stands_for_none_is_one_sentence(number: int) -> None:
    recipe = zoo.load_recipe("qwen3_vl_sft", {"size": "tiny"})
    refused(lambda overrides: zoo.load_recipe("qwen3_vl_sft", overrides), *BAD[number])
    refused(recipe.replace, *BAD[number])
    refused(lambda overrides: zoo.load_recipe("qwen3_vl_sft", combined(["train.lr=1"], overrides)), *BAD[number])


@pytest.mark.parametrize("name", ["train", "plan", "Engine", "evaluate", "generate", "score", "top_tokens"])
def test_every_function_that_takes_overrides_reads_them_so(name: str, tmp_path: Path) -> None:
    arch = zoo.load_recipe("qwen3_vl_sft", {"size": "tiny"}).model.arch
    (tmp_path / "config.json").write_text(json.dumps(arch), encoding="utf-8")
    calls: dict[str, Callable[[Mapping[Any, Any]], object]] = {
        "train": lambda overrides: zoo.train("qwen3_vl_sft", overrides),
        "plan": lambda overrides: zoo.plan("qwen3_vl_sft", overrides=overrides),
        "Engine": lambda overrides: zoo.Engine.open("qwen3_vl_sft", overrides),
        "evaluate": lambda overrides: zoo.evaluate(tmp_path, "digits:heldout", overrides),
        "generate": lambda overrides: zoo.generate(tmp_path, "digits:heldout", overrides),
        "score": lambda overrides: zoo.score(tmp_path, "digits:heldout", overrides),
        "top_tokens": lambda overrides: zoo.top_tokens(tmp_path, "digits:heldout", tmp_path / "out", overrides),
    }
    for key, value in BAD:
        refused(calls[name], key, value)
    with pytest.raises(ConfigError, match=r"parallel.tp=3"):
        calls[name](
            {"nproc": np.int64(1), "parallel": {"tp": torch.tensor(3)}}
            | ({"size": "tiny"} if name[0] in "tpE" and name != "top_tokens" else {})
        )
