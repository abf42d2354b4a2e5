"""A run on preference pairs under every layout has the losses, gradient norms and rewards of one rank, its reference included."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.preference import pair_run, records, write_labelled, write_pairs

FAST = ("dp2", "dense", "dpo")
CASES = [
    FAST,
    ("tp2", "gdn", "ipo"),
    ("pp2", "dense", "dpo"),
    ("pp2 vpp2", "dense", "simpo"),
    ("cp2", "dense", "dpo"),
    ("ep2", "moe", "dpo"),
    ("tp2 cp2", "llava", "orpo"),
    ("cp2 ep2", "omni", "dpo"),
    ("dp2", "dense", "kto"),
    ("pp2 cp2", "dense", "kto"),
    ("tp2 cp2", "gdn", "kto"),
    ("tp2", "dense", "kto"),
    ("ep2", "moe", "kto"),
    ("tp2 cp2", "dense", "reward"),
    ("tp2 pp2", "llava", "reward"),
    ("cp2 ep2", "omni", "reward"),
    ("pp2 vpp2", "gdn", "reward"),
    ("ep2", "moe", "reward"),
]
SAME = (
    "loss",
    "grad_norm",
    "labels",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "pairs",
    "answers",
    "kl",
)


@pytest.mark.parametrize(
    ("parallel", "name", "loss"),
    [pytest.param(*case, marks=[] if case == FAST else pytest.mark.slow) for case in CASES],
)
def test_a_layout_trains_as_one_rank(parallel: str, name: str, loss: str, pool: Pool, tmp_path: Path) -> None:
    model, setting = MODELS[name], PARALLEL[parallel]
    folder = model.write(tmp_path / "model")
    kinds = ("audio", "image", "text") if name == "omni" else ("image", "text")
    data = (write_labelled if loss == "kto" else write_pairs)(tmp_path / "rows.jsonl", 7, kinds)
    common = (
        *data, *model.overrides, f"train.loss={loss}", f"model.init={folder}", "train.steps=3",
        "train.global_batch=2", "train.lr=1e-3", "train.schedule=constant", "packing.align=8", "packing.budget=1024",
        "data.lookahead=4", "train.aux_loss=0",
    )  # fmt: skip
    alone, spread = (tmp_path / name for name in ("alone", "spread"))
    wanted = pool.run(1, pair_run, model.recipe, (*common, f"run.dir={alone}"), timeout=300.0)[0]
    more = (*common, *setting.overrides, f"run.dir={spread}")
    found = pool.run(setting.ranks, pair_run, model.recipe, more, timeout=300.0)[0]
    assert len(found) == len(wanted) == 4  # three steps and the evaluation
    for one, other in zip(found, wanted, strict=True):
        for key in SAME:
            # before the first update, policy and reference differ by rounding alone
            if key in other and (key, other["step"]) != ("rewards/accuracies", 1):
                assert one[key] == pytest.approx(other[key], rel=2e-4, abs=2e-5), key
    assert abs(wanted[2]["rewards/margins"]) > 1e-3, "the updates moved nothing"
    if loss == "dpo" and parallel != FAST[0]:
        resumed(pool, model.recipe, more, setting.ranks, spread)


def resumed(pool: Pool, recipe: str, overrides: tuple[str, ...], ranks: int, folder: Path) -> None:
    """A run that is resumed reads the reference, or computes the same from the weights that it began with."""
    from safetensors.numpy import load_file

    file = folder / "reference.safetensors"
    before: dict[str, Any] = load_file(file)
    written = file.stat().st_mtime_ns
    longer = tuple(one if one != "train.steps=3" else "train.steps=4" for one in overrides)
    kept = pool.run(ranks, pair_run, recipe, longer, timeout=300.0)[0]
    assert file.stat().st_mtime_ns == written
    file.unlink()
    longer = tuple(one if one != "train.steps=4" else "train.steps=5" for one in longer)
    anew = pool.run(ranks, pair_run, recipe, longer, timeout=300.0)[0]
    assert [one["step"] for one in (kept + anew[-2:])][-2:] == [5, 5]
    after = load_file(file)
    for name, values in before.items():
        assert values.shape[1] == 2 and abs(after[name] - values).max() < 1e-5
    assert records(folder)


@pytest.mark.parametrize(
    "loss", ["dpo", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ipo", "simpo", "orpo", "kto", "reward"))]
)
def test_the_policy_has_no_dropout_unless_it_is_kept(loss: str, pool: Pool, tmp_path: Path) -> None:
    model = MODELS["text"]
    folder = model.write(tmp_path / "model")
    common = (
        *(write_labelled if loss == "kto" else write_pairs)(tmp_path / "rows.jsonl", 4, ("text",)), f"train.loss={loss}",
        f"model.init={folder}", "train.steps=2", "train.global_batch=2", "train.lr=1e-2", "train.schedule=constant", "lora.rank=4",
        "packing.budget=1024", "data.lookahead=4",
    )  # fmt: skip

    def losses(*more: str) -> list[float]:
        folder = tmp_path / "-".join(["run", *more])
        found = pool.run(1, pair_run, model.recipe, (*common, *more, f"run.dir={folder}"), timeout=300.0)[0]
        return [one["loss"] for one in found]

    wanted = losses()
    assert losses("lora.dropout=0.5") == wanted
    kept = losses("lora.dropout=0.5", "lora.keep_dropout=true")
    assert kept[0] == wanted[0], "new adapters add nothing yet"
    assert abs(kept[1] - wanted[1]) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("packing.mode=none", "train.micro_batch=2")], ids=["packed", "padded"])
def test_adapters_begin_at_the_reference(mode: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    """New adapters change nothing, so each pair of the first step has the loss of a coin; a run resumed without the file agrees."""
    model = MODELS["dense"]
    folder = model.write(tmp_path / "model")
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 6, ("image", "text")), *mode, "train.loss=dpo", f"model.init={folder}", "lora.rank=4",
        "train.global_batch=2", "train.lr=1e-2", "train.schedule=constant", "packing.budget=1024", "data.lookahead=4",
    )  # fmt: skip
    runs = {}
    for name in ("whole", "cut"):
        overrides = (*common, f"run.dir={tmp_path / name}")
        if name == "cut":
            pool.run(1, pair_run, model.recipe, (*overrides, "train.steps=1"), timeout=300.0)
            (tmp_path / name / "reference.safetensors").unlink()
        runs[name] = pool.run(1, pair_run, model.recipe, (*overrides, "train.steps=3"), timeout=300.0)[0]
    first, *_, last = runs["whole"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and abs(first["rewards/margins"]) < 1e-5
    assert abs(last["rewards/margins"]) > 1e-3, "the updates moved nothing"
    assert runs["cut"][-1]["loss"] == pytest.approx(last["loss"], rel=1e-5)


LORA = ("lora.rank=4", "train.lr=1e-2", "train.schedule=constant", "packing.align=8", "train.aux_loss=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "name"), [("dp2", "dense"), ("tp2 cp2", "dense"), ("pp2 vpp2", "dense"), ("ep2", "moe")]
)
def test_the_model_without_adapters_as_reference(parallel: str, name: str, pool: Pool, tmp_path: Path) -> None:
    """New adapters change nothing, so the base in each step is the run's first weights, under every layout and from another run's file."""
    model, setting = MODELS[name], PARALLEL[parallel]
    folder = model.write(tmp_path / "model")
    common = (
        *write_pairs(tmp_path / "pairs.jsonl", 6, ("image", "text")), *model.overrides, *LORA, "train.loss=dpo", f"model.init={folder}",
        "train.steps=3", "train.global_batch=2", "packing.budget=1024", "data.lookahead=4",
    )  # fmt: skip
    runs = {}
    cases = {
        "start": (1, ()),
        "base": (1, ("train.reference=base",)),
        "spread": (setting.ranks, ("train.reference=base", *setting.overrides)),
        "file": (1, (f"train.reference={tmp_path / 'start' / 'reference.safetensors'}",)),
        "other": (setting.ranks, (f"train.reference={folder}", *setting.overrides)),
    }
    for case, (ranks, more) in cases.items():
        overrides = (*common, *more, f"run.dir={tmp_path / case}")
        runs[case] = pool.run(ranks, pair_run, model.recipe, overrides, timeout=300.0)[0]
    for case in list(cases)[1:]:
        for one, other in zip(runs[case], runs["start"], strict=True):
            for key in SAME:
                if key in other and (key, other["step"]) != ("rewards/accuracies", 1):
                    assert one[key] == pytest.approx(other[key], rel=3e-4, abs=3e-5), (case, key)
    assert abs(runs["start"][2]["rewards/margins"]) > 1e-3, "the updates moved nothing"
    assert not (tmp_path / "base" / "reference.safetensors").exists()
