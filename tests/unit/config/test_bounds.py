"""Every number of a recipe has bounds, whichever way it comes in, and what is outside of them is one sentence."""

import json
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from benchmarks.balance import BalanceOptions
from benchmarks.convert import ConvertOptions
from benchmarks.packing_report import PackingOptions
from benchmarks.save_rates import SaveRateOptions
from benchmarks.soak import SoakOptions
from zoo.bench.data import DataBenchOptions
from zoo.bench.training.train import TrainBenchOptions
from zoo.cli.checkpoints.verify import _number
from zoo.cli.recipes.show import _schema, _schema_entries
from zoo.config.compose import load_recipe
from zoo.config.entries import MEDIA_KEYS, DataEntry, parse_entry
from zoo.config.layers.keys import keys, show_value
from zoo.config.layers.tree import schema_tree, set_key
from zoo.config.schema import ModelConfig, Recipe, TrainConfig
from zoo.errors import ConfigError, UserError
from zoo.tools.convert import size_in_bytes
from zoo.tools.verify import verify

NUMBERS = [key for key, entry in keys(Recipe).items() if "int" in entry.type or "float" in entry.type]
SIGNED = {"rl.rewards"}  # a weight below zero makes a reward a penalty
SENSELESS = [float("inf"), float("-inf"), float("nan"), -1, 10**18, 10**5000, -(10**400)]


def test_the_walk_meets_the_numbers() -> None:
    """So the tests below can't pass for want of keys."""
    assert {"run.seed", "train.lr", "train.lr_scale", "engine.threads", "data.augment", "nproc"} <= set(NUMBERS)
    assert len(NUMBERS) > 50


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_bounds_that_hold_its_default(key: str) -> None:
    bounds, default = keys(Recipe)[key].bounds, keys(Recipe)[key].default
    assert bounds is not None
    listed = default if isinstance(default, list) else [default]
    assert default is None or (not default and default != 0) or all(map(bounds.hold, listed))
    assert (bounds.least is None) != (bounds.above is None)
    assert (bounds.most is None) != (bounds.below is None)
    top = bounds.most if bounds.most is not None else bounds.below
    assert top is not None and top <= 10**10


def given(key: str, value: Any) -> Any:
    """What is typed for one number of the key."""
    kind = keys(Recipe)[key].type
    return {"language": value} if kind.startswith("dict") else [value] if kind.startswith("list") else value


def test_senseless_numbers_are_refused_by_every_key() -> None:
    tree = schema_tree(Recipe)
    for key, value in product(NUMBERS, SENSELESS):
        if key in SIGNED and value == -1:
            continue
        for typed in (value, show_value(value)) if abs(value) < 1e20 else (value,):
            with pytest.raises(ConfigError) as caught:
                set_key(tree, key, given(key, typed), "")
            message = str(caught.value)
            assert message.startswith(f"{key}=") and str(keys(Recipe)[key].bounds) in message
            assert "\n" not in message and len(message) < 500


def test_zero_is_refused_where_it_is_outside() -> None:
    tree = schema_tree(Recipe)
    for key in NUMBERS:
        bounds = keys(Recipe)[key].bounds
        assert bounds is not None
        if bounds.hold(0):
            set_key(tree, key, given(key, 0), "")
        else:
            with pytest.raises(ConfigError, match="wanted a"):
                set_key(tree, key, given(key, 0), "")


@pytest.mark.parametrize(
    "override",
    ["train.lr=.inf", "train.lr=1e400", "train.lr='.inf'", "data.augment=2", "engine.threads=100000000",
     "engine.threads='100000000'", "train.global_batch=1000000000000", "run.seed=0xffffffffffffffffff", "train.steps=1e18",
     "train.lr_scale.vision=.nan", "hardware=999999x8xh200", "hardware=8x999999xh200"],
)  # fmt: skip
def test_overrides(override: str) -> None:
    with pytest.raises(ConfigError, match=r": wanted a .* from 0 to|: wanted a .* from 1 to"):
        load_recipe("qwen3_vl_sft", [override])


def test_a_recipe_that_was_built_by_hand() -> None:
    recipe = Recipe(size="tiny", model=ModelConfig(family="qwen3_vl"), train=TrainConfig(steps=1, lr=float("inf")))
    with pytest.raises(ConfigError, match=r"^train.lr=inf: wanted a number from 0 to 100$"):
        load_recipe(recipe)


def test_the_schema_shows_them() -> None:
    assert f"{'':<22} from 0 to 4,294,967,295" in _schema().splitlines()
    entry = next(one for one in json.loads(json.dumps(_schema_entries())) if one["key"] == "train.beta1")
    assert entry["bounds"] == {"least": 0, "above": None, "most": None, "below": 1}


def numbers(of: Any) -> list[str]:
    """Fields of a dataclass that hold a number, or several."""
    return [item.name for item in fields(of) if "int" in str(item.type) or "float" in str(item.type)]


def test_every_number_of_a_data_entry_has_bounds() -> None:
    assert numbers(DataEntry) == ["weight", "epochs", "held_out", "seed", *MEDIA_KEYS]
    for name, value in product(numbers(DataEntry), SENSELESS):
        whole = name in ("seed", *MEDIA_KEYS) and name != "video_fps"
        if whole and isinstance(value, float):
            continue  # another type, refused as that
        for entry in ({"path": "x", name: value}, DataEntry(path="x", **{name: value})):
            with pytest.raises(ConfigError) as caught:
                parse_entry(entry, "data.train")
            message = str(caught.value)
            assert message.startswith(f"data.train: {name}=") and ": wanted a number " in message
            assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    "options_type",
    [BalanceOptions, ConvertOptions, DataBenchOptions, SaveRateOptions, SoakOptions, TrainBenchOptions, PackingOptions],
)
def test_every_number_of_a_bench_has_bounds(options_type: Any) -> None:
    options = options_type()
    assert numbers(options)
    for name, value in product(numbers(options), [-1, 10**18, 10**5000, -(10**400)]):
        several = isinstance(getattr(options, name), tuple)
        with pytest.raises(UserError, match=f"^{name}=.*: wanted a whole number") as caught:
            replace(options, **{name: (1, value) if several else value})
        assert len(str(caught.value)) < 500


def test_a_tolerance_is_a_number_that_decides() -> None:
    for text in ("nan", "inf", "-1", "x", "1e9"):
        with pytest.raises(UserError, match=r"^tolerance=.*: wanted a number from 0"):
            verify("nowhere", "nowhere", tolerance=_number("tolerance", text))
    assert _number("tolerance", "1e-3") == 1e-3


def test_a_shard_is_not_of_endless_size() -> None:
    with pytest.raises(UserError, match="wanted a number of bytes, or a size such as 5GB"):
        size_in_bytes("9" * 400 + "GB", "max_shard_size")
    assert size_in_bytes("200 MB", "max_shard_size") == 200 * 10**6
