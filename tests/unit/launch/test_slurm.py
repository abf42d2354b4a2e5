"""SLURM's variables read as torchrun's, and the batch script that is written for it."""

from pathlib import Path

import pytest

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError, UserError
from zoo.launch import prepare
from zoo.launch.slurm import first_host, join_slurm, write_template


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"), ("gpu[003-006,009],login", "gpu003"), ("node-a1,node-a2", "node-a1"),
        ("rack2-[12,14-15]-ib", "rack2-12-ib"), (" localhost", "localhost"),
    ],
)  # fmt: skip
def test_the_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def slurm(**more: str) -> dict[str, str]:
    found = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    return {**found, "SLURM_JOB_NODELIST": "gpu[07-10]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "4", **more}


def test_a_task_is_a_rank() -> None:
    environ = slurm()
    assert join_slurm(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["5", "16", "1", "4", "gpu07", "23456"]


def test_what_is_set_already_stays() -> None:
    environ = slurm(MASTER_ADDR="10.0.0.1", MASTER_PORT="5000")
    assert join_slurm(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "5000")
    torchrun = slurm(RANK="0", WORLD_SIZE="2")
    assert not join_slurm(torchrun)
    assert torchrun["WORLD_SIZE"] == "2"


def test_one_task_or_none_is_no_group() -> None:
    assert not join_slurm(slurm(SLURM_NTASKS="1"))
    assert not join_slurm({"SLURM_JOB_ID": "1"})


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_PROCID=x: wanted a whole number$"):
        join_slurm(slurm(SLURM_PROCID="x"))


def test_a_batch_step_says_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    environ = slurm(SLURM_PROCID="0")
    del environ["SLURM_STEP_ID"]
    assert join_slurm(environ)
    assert "waiting for the others, which srun starts" in capsys.readouterr().err


def test_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["recipe=qwen3_vl_sft", "size=4b", "hardware=2x8xh100", "data.train=[a b.jsonl]"]
    recipe = load_recipe(arguments[0].partition("=")[2], [*arguments[1:], "train.global_batch=16"])
    path = write_template(validate(recipe, 16), arguments, 16)
    assert path == Path("qwen3_vl_sft-4b.sbatch")
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    for wanted in ("nodes=2", "ntasks-per-node=8", "gpus-per-node=8"):
        assert f"#SBATCH --{wanted}" in lines
    assert "#SBATCH --signal=B:USR1@120" in lines and "#SBATCH --requeue" in lines
    assert not any("OMP_NUM_THREADS" in line for line in lines), "ranks beside GPUs take one thread"
    assert (
        "srun --kill-on-bad-exit=0 --wait=60 zoo train "
        "recipe=qwen3_vl_sft size=4b hardware=2x8xh100 'data.train=[a b.jsonl]' &"
    ) in lines
    with pytest.raises(UserError, match="is there already"):
        write_template(validate(recipe, 16), arguments, 16)


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ("2x8xh100", "hardware=2x8xh100: its 2 nodes need a launcher: `zoo train --slurm-template` writes"),
        ("8xh100", "hardware=8xh100: a node of it has 8 GPUs and 0 can be seen here; hardware=auto takes"),
    ],
)
def test_a_run_is_not_started_on_another_machine(hardware: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "gpu_count", lambda: 0)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError) as caught:
        prepare.prepare(load_recipe("qwen3_vl_sft", ["size=tiny", f"hardware={hardware}"]))
    assert str(caught.value).startswith(said)
