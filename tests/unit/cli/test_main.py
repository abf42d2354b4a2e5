"""The command line: what it prints, and that a user's mistake is one line on stderr and exit code 2."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.cli.checkpoints.generate import _for_terminal
from zoo.cli.main import SUBCOMMANDS, main
from zoo.config import compose, validate
from zoo.config.checks import engine
from zoo.config.files import root_recipes
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.launch import launcher, prepare
from zoo.logging.result import TrainResult

NAME = "qwen3_omni_sft"
RECIPES = ", ".join(root_recipes())


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compose, validate, engine, prepare):
        monkeypatch.setattr(module, "gpu_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("zoo: error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("zoo: error: ").strip()


def test_help_imports_no_torch() -> None:
    code = "import sys; from zoo.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules or 'omegaconf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: zoo VERB")


def test_version_and_help_of_each_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zoo {zoo.__version__}\n"
    for verb in SUBCOMMANDS:
        assert main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: zoo {verb}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "trian: no such verb; nearest: zoo train"),
        (["--verison"], "--verison: no such option; nearest: zoo --version"),
        (["show", "--shema"], "--shema: no such option; nearest: --schema"),
        (["list", "--jsn"], "--jsn: no such option; nearest: --json"),
        (["list", "qwen3_v"], "qwen3_v: no such family, recipe or GPU; nearest: qwen3_vl, qwen35_vl, qwen3"),
        (["list", "demo", "all"], "all: zoo list takes one name, or runs and a folder"),
        (["bench"], "zoo bench: name what to measure: zoo bench train | data | saves"),
        (["bench", "paking"], "paking: name what to measure: zoo bench train | data | saves"),
        (["bench", "data", "sample=4"], "sample: no such key; nearest: samples"),
        (["score", "RUN", "digits:heldout", "max_row=1"], "max_row: no such key; nearest: max_rows"),
        (["verify", "A", "B", "--tolerence=1"], "tolerence: no such key; nearest: tolerance"),
        (["verify", "A", "B", "tolerance=1"],
         "tolerance= goes with rows=, whose log-probabilities it bounds; leave it out, or give rows=FILE"),
        (["verify", "A", "served=http://host", "limt=1"], "limt: no such key; nearest: limit"),
        (["eval", "RUN", "rows.jsonl", "metric=exact"], "metric: no such key; nearest: metrics"),
        (["bench", "data", "rows=two"], "rows=two: an integer wanted"),
        (["bench", "data", "steps=0"], "steps=0: wanted a whole number from 1 to 1,000,000"),
        (["bench", "saves", f"recipe={NAME}"],
         "zoo bench saves: takes run=FOLDER alone; a disk and saves of a new model are measured by "
         "`python -m benchmarks.save_rates`, run in a clone of zoo"),
        (["bench", "data", "--jsn"], "--jsn: no such option; nearest: --json"),
        (["train"], f"no recipe is given: zoo train recipe=NAME; recipes: {RECIPES}; zoo list shows all"),
        (["train", "qwen3_omni_stf"],
         "recipe=qwen3_omni_stf: no such recipe; nearest: qwen3_omni_sft, qwen25_omni_sft, qwen3_omni_dpo"),
        (["train", "mine.yaml"], "recipe=mine.yaml: no such file; recipes by name: zoo list"),
        (["train", f"recipe={NAME}", "--train.lr", "--nproc=1"], "--train.lr: the value is missing; write train.lr=VALUE"),
        (["train", f"recipe={NAME}", "--train.lr", "nproc=1"], "--train.lr: the value is missing; write train.lr=VALUE"),
        (["train", NAME, "other"], "other: an override is written key=value, such as train.steps=100"),
        (["train", f"recipe={NAME}", "--stepz"], "--stepz: no such option; nearest: train.steps=VALUE"),
        (["train", f"recipe={NAME}", "nproc=1", "parallel.tp=3"],
         "parallel.tp=3 * pp=1 * cp=1 = 3 does not divide the 1 rank of the run; 1 would, or nproc=3"),
        (["show", "recipe=nope"], "recipe=nope: no such recipe; `zoo list` shows them"),
    ],
)  # fmt: skip
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert refused(capsys, *arguments) == message


def test_an_unknown_family_and_a_missing_file_are_mistakes_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(capsys, "train", f"recipe={NAME}", "model.family=x").startswith("model.family: no family 'x'")

    def missing(_: Recipe, **options: Any) -> TrainResult:
        raise FileNotFoundError(2, "No such file or directory", "rows.jsonl")

    monkeypatch.setattr(launcher, "launch", missing)
    assert main(["train", f"recipe={NAME}"]) == 2
    assert capsys.readouterr().err == "zoo: error: rows.jsonl: no such file or folder\n"


@pytest.mark.parametrize("recipe", [[f"recipe={NAME}"], [f"--recipe={NAME}"], ["--recipe", NAME], [NAME]])
def test_train_says_what_it_will_do_and_hands_on_the_recipe(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recipe] = []

    def fake(recipe: Recipe, *, in_process: bool, announce: Callable[[Recipe, int], object]) -> TrainResult:
        planned, ranks = prepare.prepare(recipe, in_process=in_process)
        announce(planned, ranks)
        seen.append(planned)
        return TrainResult(steps=1, losses=[1.0], checkpoint=None, run_dir="x")

    monkeypatch.setattr(launcher, "launch", fake)
    assert main(["train", *recipe, "nproc=2", "--parallel.ep=2", "train.steps=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "zoo: qwen3_omni tiny, random weights | trains on digits:train | numbers: zoo train --help",
        "zoo: recipe qwen3_omni_sft | size tiny (no GPU is here; published: size=30b-a3b) | weights random | "
        "evaluates on digits:heldout | 2 ranks (ep=2 dp=2) | runs/qwen3_omni_sft-tiny",
    ]
    assert lines[2:4] == ["", "Next:"]
    assert any(" report x " in line for line in lines[4:])
    assert seen[0].train.steps == 3


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], "trains on digits:train (image, audio) | "),
        (["data.train=[/a/very/long/folder/of/rows.jsonl,b.jsonl]"], "trains on rows.jsonl and 1 more | "),
        ([f"data.train=[{'r' * 200}.jsonl,b,c]", f"model.init=some/{'m' * 90}"], "... and 2 more | "),
        (["data.train=[{path: 'digits:train', kinds: [audio_in_video, multi_audio, multi_image, text]}]"], "..."),
    ],
)
def test_the_first_line_of_a_run_is_short(overrides: list[str], wanted: str) -> None:
    from zoo.cli.runs.train import _first_line

    recipe = compose.load_recipe("demo", [text for text in overrides if "model.init" not in text])
    for text in overrides:
        if text.startswith("model.init"):
            recipe = recipe.replace({"model.init": text.partition("=")[2]})
    line = _first_line(recipe)
    assert wanted in line and line.endswith("numbers: zoo train --help")
    assert len(line) < 120


@pytest.mark.parametrize(
    "written",
    [["--train.lr", "1e-4"], ["--train.lr=1e-4"], ["train.lr=1e-4"], ["--run.dir", "out", "--train.lr", "1e-4"]],
)
def test_options_with_a_space(written: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: {NAME}\n")
    for recipe in (["--recipe", NAME], [NAME], [str(mine)]):
        assert main(["show", *written, *recipe, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["recipe"]["train"]["lr"] == 1e-4
    assert main(["show", NAME, "--train.lr", "-1"]) == 2
    assert "train.lr=-1: wanted a number from 0 to 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "code", "err"),
    [
        (TrainResult(steps=1, losses=[], checkpoint="c", run_dir="x", interrupted=True), 130, ""),
        (launcher.WorkerError(7), 7, "zoo: a rank of the run failed with exit code 7\n"),
        (KeyboardInterrupt(), 130, "zoo: interrupted\n"),
        (launcher.WorkerError(2), 2, ""),
    ],
)
def test_exit_codes_of_a_run(
    end: TrainResult | BaseException,
    code: int,
    err: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fake(_: Recipe, **options: Any) -> TrainResult:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(launcher, "launch", fake)
    assert main(["train", f"recipe={NAME}"]) == code
    assert capsys.readouterr().err == err


@pytest.mark.parametrize("verb", ["train", "generate", "eval", "score"])
def test_a_task_of_slurm_is_a_rank_for_the_whole_command(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in ours:  # set and deleted, so that they are gone again behind the test
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    for name, value in {"PROCID": "1", "NTASKS": "2", "LOCALID": "1", "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main([verb, "recipe=nosuch"]) == 2
    assert capsys.readouterr().err.startswith("zoo: error (rank 1): ")


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("zoo.tools.score", "score", ["score", "there", "rows.jsonl"]),
        ("zoo.tools.evaluate", "evaluate", ["eval", "there", "rows.jsonl"]),
        ("zoo.tools.generate", "generate", ["generate", "there", "rows.jsonl"]),
    ],
)
def test_a_rank_that_fails_is_a_line_and_its_exit_code(
    module: str,
    name: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    code = 7

    def fail(*_: Any, **options: Any) -> Any:
        raise launcher.WorkerError(code)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(module), name, fail)
    assert main(arguments) == 7
    assert capsys.readouterr().err.endswith("zoo: a rank of the run failed with exit code 7\n")
    code = 137  # what the launcher has said already
    assert main(arguments) == 137
    assert "exit code" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "finish", "wanted"),
    [
        ([5, 6], "stop", ""),
        ([5, 6, 7, 8], "length", "zoo: the answer is cut after 4 tokens (max_new_tokens)\n"),
        ([5, *[9] * 63], "length", "only repeats itself"),
        ([5, 6] * 30, "length", "only repeats itself"),
        (list(range(60)), "length", "(max_new_tokens)\n"),
    ],
)
def test_an_answer_without_an_end_is_said(
    tokens: list[int], finish: str, wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"text": "00", "token_ids": tokens, "finish": finish}
    monkeypatch.setattr(importlib.import_module("zoo.tools.generate"), "generate", lambda *_, **options: [answer])
    assert main(["generate", "there", "What?"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "00\n" and wanted in printed.err
    assert ("zoo: " in printed.err) == bool(wanted)


def test_other_ranks_print_no_headline_and_say_who_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fake(recipe: Recipe, *, in_process: bool, announce: Callable[[Recipe, int], object]) -> TrainResult:
        announce(*prepare.prepare(recipe, in_process=in_process))
        return TrainResult(steps=1, losses=[], checkpoint=None, run_dir="x")

    monkeypatch.setattr(launcher, "launch", fake)
    assert main(["train", f"recipe={NAME}"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["train", f"recipe={NAME}", "lr=1"]) == 2
    assert capsys.readouterr().err.startswith("zoo: error (rank 1): lr: ")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "qwen3_omni " in printed and "tiny, 30b-a3b" in printed
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["families"]["qwen3_omni"]["sizes"] == ["tiny", "30b-a3b"]
    assert found["recipes"][NAME]["description"]
    assert "cpu" in found["hardware"]


def test_show_prints_yaml_that_resolves_to_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", f"recipe={NAME}", "train.steps=7", "data.train=[a.jsonl, b.jsonl]"]) == 0
    printed = capsys.readouterr().out
    assert "#   train.steps: 7 (default null)\n" in printed
    assert "#   data.train: [a.jsonl, b.jsonl] (default [digits:train])\n" in printed
    (tmp_path / "shown.yaml").write_text("resolved: true\n" + printed, encoding="utf-8")
    shown = compose.load_recipe(tmp_path / "shown.yaml")
    assert shown == compose.load_recipe(NAME, ["train.steps=7", "data.train=[a.jsonl, b.jsonl]"])


def test_show_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--schema"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:5] == ["train.steps", "int", "or", "null", "null"] for line in lines)


@pytest.mark.parametrize("guise", [AttributeError, UserError, OSError])
def test_ctrl_c_in_the_guise_of_a_library_s_error(
    guise: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OmegaConf, for one, makes others of what is raised within it."""

    def disguise(arguments: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise guise("'NoneType' object has no attribute") from None
        return 0

    monkeypatch.setattr("zoo.cli.recipes.list.run", disguise)
    before = signal.getsignal(signal.SIGINT)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "zoo: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_no_code_of_a_terminal_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["verify", "a\x1b[2Jb\nc"]) == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and printed.endswith("\n")
    answer = "one\ttwo\nthree \x1b]0;title\x07"
    assert _for_terminal(answer) == answer, "into a pipe it goes unchanged"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _for_terminal(answer) == "one\ttwo\nthree \\x1b]0;title\\x07"
