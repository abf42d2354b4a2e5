"""A task for SkyPilot's managed jobs (`sky jobs launch`), on spot machines: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""

from __future__ import annotations

from pathlib import Path

from zoo.launch.templates.job import CODES, RESTARTS, Job, as_yaml
from zoo.parallel.signals import PREEMPTED
from zoo.types import JsonObject

_WORKING = "~/sky_workdir"  # where SkyPilot puts `workdir`
_LARGE = 80  # GB from which SkyPilot names an A100 by its memory


def write_task(job: Job) -> Path:
    """NAME.sky.yaml, whose run folder lies in a bucket: a machine that is taken leaves nothing else behind."""
    assert job.recipe.run.dir is not None
    parent = Path(job.recipe.run.dir).parent
    mounted = str(parent) if parent.is_absolute() else f"{_WORKING}/{parent}"
    recovery = {"max_restarts_on_errors": RESTARTS, "recover_on_exit_codes": [PREEMPTED]}
    resources: JsonObject = {"image_id": "docker:zoo", "use_spot": True, "job_recovery": recovery}
    if job.recipe.machine.gpus:
        resources["accelerators"] = f"{_accelerator(job)}:{job.ranks_of_node}"
    task = {
        "name": job.label,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": resources,
        "file_mounts": {mounted: {"name": f"{job.label}-runs", "mode": "MOUNT_CACHED"}},
        "run": job.script("$SKYPILOT_NODE_RANK", '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'),
    }
    comments = (
        "sky jobs launch this file. Fill in: image_id (docs/install.md builds one), the bucket's name, and where data come from.",
        f"{CODES}, as any other error does.",
        "A spot machine may be taken without a signal: train.save_minutes bounds what is lost.",
    )
    return job.write(".sky.yaml", as_yaml(comments, task))


def _accelerator(job: Job) -> str:
    """SkyPilot's name of the GPU; where only a memory is known, one to fill in."""
    machine = job.recipe.machine
    if machine.gpu is None:
        return "GPU"
    name = machine.gpu.partition("-")[0].upper()
    return f"{name}-80GB" if name == "A100" and (machine.memory_gb or 0) >= _LARGE else name
