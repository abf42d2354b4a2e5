"""Batch files: their fields by the published models of Kubeflow Trainer, JobSet and SkyPilot, and their scripts, run with stand-ins."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.errors import UserError
from zoo.launch.templates import TEMPLATES, Job

ARGUMENTS = ["recipe=qwen3_vl_sft", "size=4b", "hardware=2x8xh100", "data.train=[a b.jsonl]"]


def job(*more: str, arguments: list[str] = ARGUMENTS) -> Job:
    recipe = load_recipe(arguments[0].partition("=")[2], [*arguments[1:], "train.global_batch=16", *more])
    ranks = recipe.machine.nodes * (recipe.machine.gpus or 2)
    return Job.from_recipe(validate(recipe, ranks), [*arguments, *more], ranks)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(flag: str, *more: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(TEMPLATES[f"--{flag}-template"][0](job(*more)).read_text()))


def job_set_spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec = documents[0]["spec"]
    return spec["template"]["spec"] if documents[0]["kind"] == "TrainingRuntime" else spec


def test_the_batch_script() -> None:
    path = TEMPLATES["--slurm-template"][0](job())
    assert path == Path("qwen3_vl_sft-4b.sbatch")
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    for wanted in ("nodes=2", "ntasks-per-node=8", "gpus-per-node=8"):
        assert f"#SBATCH --{wanted}" in lines
    assert "#SBATCH --signal=B:USR1@120" in lines and "#SBATCH --requeue" in lines
    assert not any("OMP_NUM_THREADS" in line for line in lines), "ranks beside GPUs take one thread"
    assert not any("rclone" in line for line in lines), "run.dir is a folder of its own"
    assert (
        'srun --kill-on-bad-exit=0 --wait=60 "${container[@]}" zoo train '
        "recipe=qwen3_vl_sft size=4b hardware=2x8xh100 'data.train=[a b.jsonl]' &"
    ) in lines
    with pytest.raises(UserError, match="is there already"):
        TEMPLATES["--slurm-template"][0](job())


def test_the_grace_period_is_that_of_the_recipe() -> None:
    assert "#SBATCH --signal=B:USR1@311\n" in TEMPLATES["--slurm-template"][0](job("run.save_within=300.5")).read_text()
    for flag in ("kubernetes", "jobset"):
        spec = job_set_spec(written(flag, "run.save_within=300.5"))
        (replicated,) = spec["replicatedJobs"]
        assert replicated["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 331


def checked(model: str, document: dict[str, Any]) -> None:
    """Assert that a model of kubeflow-trainer-api takes a document, and has a field for each of its keys."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    assert getattr(models, model).from_dict(document).to_dict() == document


def test_the_models_refuse_what_they_do_not_know() -> None:
    (document,) = written("jobset")
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 0
    with pytest.raises(AssertionError):
        checked("JobsetV1alpha2JobSet", document)
    with pytest.raises(ValueError, match="maxRestarts"):
        checked("JobsetV1alpha2JobSet", {"spec": {"failurePolicy": {"maxRestarts": "three"}}})


@pytest.mark.parametrize("more", [(), ("run.dir=/shared/runs/a_B.c", "run.stage=/local/stage")])
def test_manifests_are_as_kubernetes_takes_them(more: tuple[str, ...]) -> None:
    runtime, train_job = written("kubernetes", *more)
    (job_set,) = written("jobset", *more)
    for document, model in (
        (runtime, "TrainerV1alpha1TrainingRuntime"), (train_job, "TrainerV1alpha1TrainJob"), (job_set, "JobsetV1alpha2JobSet"),
    ):  # fmt: skip
        checked(model, document)
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    for documents in ([runtime], [job_set]):
        (replicated,) = job_set_spec(documents)["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert replicated["name"] == container["name"] == "node"  # as Kubeflow's runtimes have them
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert mounted == (
            ["/workspace", "/shared", "/dev/shm", "/local/stage"] if more else ["/workspace", "/dev/shm"]
        )
    assert job_set["metadata"]["name"] == ("zoo-a-b-c" if more else "zoo-qwen3-vl-sft-4b")


def outcome(documents: list[dict[str, Any]], code: int | None) -> str:
    """What JobSet does when a pod ends with `code`, or is disrupted (None), as its documentation and that of Jobs have it."""
    spec = job_set_spec(documents)
    (replicated,) = spec["replicatedJobs"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(replicated["template"]["spec"]["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", []):
            why = f"Container node for pod default/x-node-0-0-abcde failed with exit code {code}"
        elif code is None and "onPodConditions" in rule:
            why = "Pod default/x-node-0-0-abcde has condition DisruptionTarget"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{why} matching FailJob rule at index {index}"
        break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(pattern in message for pattern in patterns):
            return rule["action"]
    raise AssertionError("no rule")


@pytest.mark.parametrize("flag", ["kubernetes", "jobset"])
def test_exit_codes_decide_about_restarts(flag: str) -> None:
    documents = written(flag)
    assert job_set_spec(documents)["failurePolicy"]["maxRestarts"] == 3
    assert outcome(documents, 75) == outcome(documents, None) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(documents, 76) == outcome(documents, 137) == "RestartJobSet"
    assert outcome(documents, 2) == outcome(documents, 1) == "FailJobSet"


def test_a_task_of_skypilot() -> None:
    (task,) = written("skypilot", "run.dir=out/x")
    assert task["resources"]["accelerators"] == "H100:8" and task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert task["file_mounts"] == {"~/sky_workdir/out": {"name": "zoo-x-runs", "mode": "MOUNT_CACHED"}}
    names = {"8xa100": "A100-80GB:8", "2x4xa100-40": "A100:4", "1xl40s": "L40S:1"}
    for hardware, name in names.items():
        Path("qwen3_vl_sft-4b.sky.yaml").unlink(missing_ok=True)
        one = job(arguments=["recipe=qwen3_vl_sft", "size=4b", f"hardware={hardware}"])
        path = TEMPLATES["--skypilot-template"][0](one)
        assert yaml.safe_load(path.read_text())["resources"]["accelerators"] == name


def test_skypilot_takes_its_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    (task,) = written("skypilot")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    (mount,) = task["file_mounts"].values()
    jsonschema.validate(mount, schemas.get_storage_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"num_node": 2}, schemas.get_task_schema())


def tool(name: str, text: str) -> None:
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def started(script: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", "-c", script], env=env, stdout=pipe, stderr=pipe, text=True)


def node_script(each: int, nodes: int = 2) -> str:
    one = job(arguments=["recipe=qwen3_vl_sft", "size=4b", f"hardware={nodes}x{each}xh100"])
    return one.script("$THIS_NODE", "first.host")


def test_a_node_starts_its_ranks() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    tool("zoo", f'echo "$*" {" ".join(f"${name}" for name in names)} > rank$RANK')
    run = started(node_script(4), THIS_NODE="1")
    assert (run.communicate(timeout=30), run.returncode) == (("", ""), 0)
    for rank in range(4, 8):
        words = Path(f"rank{rank}").read_text().split()
        assert words[-6:] == [str(rank), str(rank - 4), "8", "4", "first.host", "29500"]
        assert words[:2] == ["train", "recipe=qwen3_vl_sft"]
    assert node_script(4, nodes=1) == "exec zoo train recipe=qwen3_vl_sft size=4b hardware=1x4xh100\n"


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0, 0, 0), 0), ((76, 1, 76, 0), 1), ((76,) * 4, 76), ((76, 76, "KILL", 76), 137), ((75,) * 4, 75)],
)
def test_a_node_ends_with_the_code_of_the_rank_that_failed(codes: tuple[int | str, ...], code: int) -> None:
    cases = "\n".join(f"{rank}) {f'exit {one}' if one != 'KILL' else 'kill -9 $$'};;" for rank, one in enumerate(codes))
    tool("zoo", f"case $RANK in {cases}\nesac")
    run = started(node_script(4), THIS_NODE="0")
    run.communicate(timeout=30)
    assert run.returncode == code


def test_a_node_passes_a_signal_on_and_waits_for_the_save() -> None:
    tool("zoo", "trap 'sleep 1; touch saved$RANK; exit 75' TERM\ntouch ready$RANK\nwhile :; do sleep 0.05; done")
    run = started(node_script(2), THIS_NODE="0")
    deadline = time.monotonic() + 30
    while not all(Path(f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=30)
    assert run.returncode == 75 and Path("saved0").exists() and Path("saved1").exists()


def test_a_container_and_a_mounted_store_in_a_batch_script() -> None:
    """What SLURM would be asked for; `rclone` and `srun` write down how they are called."""
    text = TEMPLATES["--slurm-template"][0](job("run.dir=mnt/x", "run.stage=/local/stage")).read_text()
    shown = 'line=; for word; do line+="${word@Q} "; done; echo "$line" >> calls'  # tasks write side by side
    tool("srun", f'{shown}\nwhile [[ $1 == --* ]]; do shift; done\n[[ $1 == rclone ]] && exec sleep 60\nexec "$@"')
    tool("zoo", "exit 0")
    tool("mountpoint", "grep -q \"'rclone' 'mount'\" calls")
    tool("rclone", "[ -e asked ] || echo '\"uploadsQueued\": 2,'; touch asked")
    filled = text.replace("IMAGE=\n", "IMAGE=reg#zoo:1\n").replace("BUCKET=\n", "BUCKET=s3:b/runs\n")
    assert filled.count("reg#zoo:1") == filled.count("s3:b/runs") == 1
    began = time.monotonic()
    run = started(filled, SLURM_JOB_NUM_NODES="2")
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, time.monotonic() - began > 1) == (0, True), errors  # it has waited for the upload
    calls = Path("calls").read_text().splitlines()  # the mount runs beside the others
    (mount,) = [call for call in calls if "'rclone' 'mount'" in call]
    assert "'s3:b/runs' 'mnt' '--vfs-cache-mode' 'writes'" in mount
    wait, train, flush = [call for call in calls if call is not mount]
    assert "mountpoint -q mnt" in wait and "vfs/stats" in flush
    here = Path.cwd()
    assert f"'--container-image=reg#zoo:1' '--container-mounts={here}:{here},/local/stage:/local/stage'" in train
    Path("calls").unlink()
    run = started(text, SLURM_JOB_NUM_NODES="2")
    run.communicate(timeout=60)
    (train,) = Path("calls").read_text().splitlines()
    assert "container" not in train


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_by_shellcheck() -> None:
    path, node = TEMPLATES["--slurm-template"][0](job("run.stage=/local/stage")), Path("node.sh")
    node.write_text("#!/bin/bash\n" + node_script(8))
    ignored = "SC2086,SC2166,SC2034"  # lists of processes are meant to be split
    done = subprocess.run(
        ["shellcheck", f"-e{ignored}", "-fjson", path, node], capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout) == []
