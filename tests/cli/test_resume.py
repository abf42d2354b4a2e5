"""`zoo train` on an existing run folder: with another recipe, with other rows, with more rows."""

import json
import shutil
from pathlib import Path

import pytest
from support.commands import STEPS, Zoo, logged, summary, text_row, write_rows

from zoo.checkpoint.integrity import write_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has a frozen part, and its rows."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "rows.jsonl", [text_row(number) for number in range(100, 130)])
    done = zoo.train(folder / "run", *arguments(folder), "model.freeze=[language]", "train.steps=2")
    assert done.code == 0, done
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def arguments(folder: Path) -> list[str]:
    return [
        f"data.train={folder}/rows.jsonl", "export=false", "log.tensorboard=false", "log.predictions=0",
        "train.steps=3",
    ]  # fmt: skip


FROZEN = "model.freeze=[language]"


def test_another_recipe_is_refused_or_accepted_and_said(zoo: Zoo, folder: Path) -> None:
    run, checkpoint = folder / "run", folder / "run" / "checkpoints" / "iter_2"
    common = arguments(folder)
    message = zoo.refused(*zoo.train_arguments(run, *common, "train.lr=1e-4", "data.labels=last"))
    assert message == (
        f"{checkpoint} was saved under another recipe (model.freeze: [language] there, [] here; data.labels: assistant "
        "there, last here; train.lr: 0.0012 there, 0.0001 here); take the old values, allow the new ones with "
        "run.accept_changes=[model.freeze,data.labels,train.lr], or use another run.dir"
    )
    assert zoo.refused(*zoo.train_arguments(run, *common, "lora.rank=4", "run.accept_changes=[lora,model]")).endswith(
        f"start from its weights with model.init={checkpoint} in another run.dir"
    )
    arch = "model.arch.thinker_config.text_config.moe_intermediate_size"
    other = [*common, FROZEN, f"{arch}=64", "run.accept_changes=[model.arch]"]
    message = zoo.refused(*zoo.train_arguments(run, *other))
    assert message.startswith(f"{checkpoint} does not hold this model: ") and len(message) < 600

    accepted = [*common, "train.lr=1e-4", "train.exp_avg_dtype=fp8", "run.accept_changes=[train.lr,model]"]
    done = zoo.train(run, *accepted)
    assert (done.code, done.err) == (0, ""), done
    assert "as allowed: model.freeze: [language] there, [] here" in done.out
    assert "as allowed: train.lr: 0.0012 there, 0.0001 here" in done.out
    assert "the optimizer's state is converted" in done.out
    assert "holds: train.exp_avg_dtype: fp32 there, fp8 here" in done.out
    assert "accept_changes:\n  - train.lr\n  - model\n" in (run / "config.yaml").read_text()
    again = zoo.train(run, *accepted, "train.steps=4")
    assert again.code == 0 and "as allowed" not in again.out, "the newest checkpoint has the new recipe"
    assert "converted" not in again.out
    back = zoo.train(run, *common, "train.lr=1e-4", "train.steps=5", "train.log_every=2", "nproc=2")
    assert back.code == 0 and "train.exp_avg_dtype: fp8 there, fp32 here" in back.out
    assert summary(run)["steps"] == 5


def test_other_rows_are_refused_or_accepted_and_more_rows_are_growth(zoo: Zoo, folder: Path) -> None:
    run, rows = folder / "run", folder / "rows.jsonl"
    given = rows.read_text().splitlines()
    command = [*arguments(folder), FROZEN]

    rows.write_text("\n".join([*given[:4], json.dumps(text_row(7)), *given[5:]]) + "\n")
    message = zoo.refused(*zoo.train_arguments(run, *command, "nproc=2"))
    assert message.startswith(
        f"data.train: {rows}: {rows}:5 is not the row that stood there, so the rows are not those of "
    )
    assert "run.accept_changes=[data.train]" in message

    rows.write_text("\n".join([*given, json.dumps(text_row(7))]) + "\n")
    done = zoo.train(run, *command)
    assert (done.code, done.err) == (0, ""), done
    assert f"data.train has grown: {rows} from 30 to 31 rows; " in done.out

    moved = folder / "moved"
    moved.mkdir()
    rows.rename(moved / "other.jsonl")
    command[0] = f"data.train={moved}/other.jsonl"
    done = zoo.train(run, *command, "train.steps=4")
    assert done.code == 0 and "grown" not in done.out and "allowed" not in done.out, done

    fixed = [json.dumps(text_row(8)), *given[1:], json.dumps(text_row(7))]
    (moved / "other.jsonl").write_text("\n".join(fixed) + "\n")
    done = zoo.train(run, *command, "train.steps=5", "run.accept_changes=[data.train]")
    assert done.code == 0 and "they continue at the same place" in done.out, done

    write_rows(moved / "other.jsonl", [text_row(number) for number in range(200, 210)])
    assert ":1 is not the row" in zoo.refused(*zoo.train_arguments(run, *command, "train.steps=6"))
    done = zoo.train(run, *command, "train.steps=6", "run.accept_changes=[data]")
    assert done.code == 0 and "the data start over" in done.out, done
    assert [record["step"] for record in logged(run)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_knows_rows_in_another_form_is_refused(zoo: Zoo, copied: Path) -> None:
    checkpoint = copied / "checkpoints" / f"iter_{STEPS}"
    state = json.loads((checkpoint / "state.json").read_text())
    state["known_rows"]["form"] = 0
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, {})
    wrong = zoo.refused(*zoo.train_arguments(copied, f"train.steps={STEPS + 1}"))
    assert "does not say, in the form that is compared here" in wrong and f"model.init={checkpoint}" in wrong
