"""Tab completion: what a command line may become, how shells take it, and that an answer imports nothing heavy."""

import importlib
import inspect
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.cli.checkpoints.convert import KEYS as CONVERT_KEYS
from zoo.cli.completion import SCRIPTS, SchemaKey, answers, as_typed, schema
from zoo.cli.main import SUBCOMMANDS, main
from zoo.cli.recipes.init import KEYS as INIT_KEYS
from zoo.cli.recipes.new_family import KEYS as FAMILY_KEYS
from zoo.cli.recipes.plan import KEYS as PLAN_KEYS
from zoo.cli.runs.inspect import KEYS as INSPECT_KEYS
from zoo.config.files import size_names
from zoo.config.gpus import GPUS
from zoo.config.layers.keys import keys, sections
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe

BREAKS = " \t\n\"'><=;|&(:"  # bash's COMP_WORDBREAKS, without its @


def test_the_schema_read_as_text_is_the_schema() -> None:
    assert schema() == {
        name: SchemaKey(key.type.startswith("bool"), tuple(key.choices)) for name, key in keys(Recipe).items()
    }
    assert list(schema()) == list(keys(Recipe))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("zoo ", list(SUBCOMMANDS)),
        ("zoo con", ["convert"]),
        ("zoo --v", ["--version"]),
        ("zoo nothing ", []),
        ("zoo completion ", ["bash", "zsh"]),
        ("zoo list ", ["families", "recipes", "hardware", "runs"]),
        ("zoo bench sav", ["saves"]),
        ("zoo train recipe=qwen3_vl_s", ["recipe=qwen3_vl_sft"]),
        ("zoo train --recipe=qwen3_vl_s", ["--recipe=qwen3_vl_sft"]),
        ("zoo train --recipe qwen3_vl_s", ["qwen3_vl_sft"]),
        ("zoo train qwen3_vl_s", ["qwen3_vl_sft"]),
        ("zoo train recipe=llava_sft qwen3_vl_s", []),
        ("zoo train tra", ["train."]),
        ("zoo train --tra", ["--train."]),
        ("zoo train train.exp", ["train.exp_avg_dtype=", "train.exp_avg_sq_dtype="]),
        ("zoo train train.nothing", []),
        ("zoo train packing.mode=", ["packing.mode=thd", "packing.mode=none"]),
        ("zoo train --packing.mode=t", ["--packing.mode=thd"]),
        ("zoo train --packing.mode t", ["thd"]),
        ("zoo train run.resume=", ["run.resume=true", "run.resume=false"]),
        ("zoo train parallel.sp=f", ["parallel.sp=false"]),
        ("zoo train run.dir=", []),
        ("zoo train 'run.dir=a b' engine.backend=t", ["engine.backend=te", "engine.backend=torch"]),
        ("zoo train 'engine.backend=t", ["engine.backend=te", "engine.backend=torch"]),
        ("zoo plan hardware=c", ["hardware=cpu"]),
        ("zoo train --slurm", ["--slurm-template"]),
        ("zoo convert a b over", ["overwrite="]),
        ("zoo convert a b train.", []),
        ("zoo score a b packing.mo", ["packing.mode="]),
        ("zoo show --he", ["--help"]),
    ],
)
def test_answers(line: str, wanted: list[str]) -> None:
    assert answers(line) == wanted


def test_names_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    everywhere = answers("zoo train ")
    assert {f"{section}." for section in sections(Recipe) if section and "." not in section} <= set(everywhere)
    assert {f"{key}=" for key in keys(Recipe) if "." not in key} <= set(everywhere)
    assert answers("zoo show recipe=") == [f"recipe={name}" for name in recipe_names()]
    for recipe, family in (("qwen3_vl_sft", "qwen3_vl"), ("llava_lora", "llava")):
        wanted = [f"size={size}" for size in size_names(family)]
        for named in (f"recipe={recipe}", f"--recipe={recipe}", recipe, f"--recipe {recipe}"):
            assert answers(f"zoo plan {named} size=") == wanted
        assert answers(f"zoo train recipe=my.yaml model.family={family} size=") == wanted
    assert f"hardware=2x8x{next(iter(GPUS))}" in answers("zoo plan hardware=2x8x")


@pytest.mark.parametrize("verb", SUBCOMMANDS)
def test_a_verbs_own_keys_and_options_are_offered(verb: str) -> None:
    known = {"convert": CONVERT_KEYS, "init": INIT_KEYS, "inspect": INSPECT_KEYS, "plan": PLAN_KEYS}
    own = (known | {"new-family": FAMILY_KEYS}).get(verb, ())
    own = {*own} - {"shard_size"}  # which is called max_shard_size now
    assert {f"{key}=" for key in own} <= set(answers(f"zoo {verb} "))
    source = inspect.getsource(importlib.import_module(SUBCOMMANDS[verb][0]))
    flags = re.findall(r'"(--[\w-]+)"', " ".join(re.findall(r"split_flags\(\w+, (\(.*?\))\)", source)))
    assert set(flags) <= set(answers(f"zoo {verb} --"))


def test_yaml_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my recipes"
    folder.mkdir()
    (folder / "notes.txt").touch()
    (folder / "omni.yaml").write_text("model:\n  family: qwen3_omni\n")
    assert answers("zoo train recipe=my") == ["recipe=my recipes/"]
    line = r"zoo train recipe=my\ recipes/"
    assert answers(line) == ["recipe=my recipes/omni.yaml"]
    assert as_typed(answers(line), line, BREAKS) == [r"my\ recipes/omni.yaml"]
    assert as_typed(answers(line), line) == ["recipe=my recipes/omni.yaml"]
    sizes = answers("zoo train 'recipe=my recipes/omni.yaml' size=")
    assert sizes == [f"size={size}" for size in size_names("qwen3_omni")]


def test_bash_takes_what_stands_behind_its_last_break() -> None:
    line = "zoo train recipe=qwen3_vl_s"
    assert as_typed(["recipe=qwen3_vl_sft"], line, BREAKS) == ["qwen3_vl_sft"]
    assert as_typed(["recipe=qwen3_vl_sft"], line, " ") == ["recipe=qwen3_vl_sft"]
    assert as_typed(["train.lr="], "zoo train train.l", BREAKS) == ["train.lr="]


def test_an_answer_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from zoo.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(bool({'torch', 'omegaconf', 'yaml', 'numpy', 'logging'} & set(sys.modules)))"
    )
    for line in ("zoo train recipe=qwen3_vl_sft size=", "zoo plan hardware=8x", "zoo train train."):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, "completion", "answer", line], capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == answers(line)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < 0.5, f"{spent:.2f} s of CPU; some 0.07 on a quiet machine"


def test_scripts_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == f"{script}\n"
    for arguments in ([], ["fish"], ["bash", "zsh"]):
        assert main(["completion", *arguments]) == 2
        assert capsys.readouterr().err == "zoo: error: zoo completion: name the shell: zoo completion bash | zsh\n"


@pytest.fixture
def with_zoo(tmp_path: Path) -> dict[str, str]:
    """An environment in which `zoo` is this checkout's."""
    program = tmp_path / "bin" / "zoo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zoo "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("zoo tr", ["train"]),
        ("zoo train recipe=qwen3_vl_s", ["qwen3_vl_sft"]),
        ("zoo train recipe=qwen3_vl_sft size=3", ["30b-a3b", "32b"]),
        ("zoo train train.lr", ["train.lr=", "train.lr_scale="]),
        ("zoo train packing.mode=", ["thd", "none"]),
        ("zoo train run.dir=", []),
    ],
)
def test_bash_completes(line: str, wanted: list[str], with_zoo: dict[str, str]) -> None:
    """Real bash with the variables that it sets at a Tab; `=` is a word of COMP_WORDS there."""
    words = " ".join(re.findall(r"=|[^\s=]+", line))
    code = (
        f"source <(zoo completion bash); complete -p zoo; COMP_LINE='{line}' COMP_POINT={len(line)}; "
        f'COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); compopt() {{ echo "$@"; }}; '
        '_zoo zoo; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False, env=with_zoo)
    assert done.stderr == ""
    declared, *found = [text for text in done.stdout.splitlines() if text]
    assert declared == "complete -o bashdefault -o default -F _zoo zoo"
    assert found == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script(with_zoo: dict[str, str]) -> None:
    code = "source <(zoo completion zsh); whence -w _zoo; print $_comps[zoo]"
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=False, env=with_zoo)
    assert done.stdout == "_zoo: function\n_zoo\n", done.stderr
