"""SLURM's variables read as torchrun's."""

import pytest

from zoo.config.compose import load_recipe
from zoo.errors import ConfigError
from zoo.launch import prepare
from zoo.launch.slurm import first_host, join_slurm


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
