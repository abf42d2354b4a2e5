"""A batch script for SLURM's sbatch, in a container of Pyxis and on a mounted object store where these are filled in."""

from __future__ import annotations

import shlex
from pathlib import Path

from zoo.launch.templates.job import KILLED, RESTARTS, Job
from zoo.parallel.signals import LOST, PREEMPTED

_GRACE = 10  # seconds beyond run.save_within until the time is over


def write_script(job: Job) -> Path:
    """NAME.sbatch: a task for each rank. With run.stage it can mount an object store for run.dir."""
    recipe = job.recipe
    folders = ",".join(f"{folder}:{folder}" for folder in job.shared_folders("/")[1:])
    if recipe.run.stage is not None:
        folders = ",".join(filter(None, (folders, f"{recipe.run.stage}:{recipe.run.stage}")))
    mount, unmount = "", ""
    if recipe.run.stage is not None:
        parent = shlex.quote(str(Path(recipe.run.dir or ".").parent))
        mount, unmount = _MOUNT.format(parent=parent), _UNMOUNT
    gpus = f"#SBATCH --gpus-per-node={job.ranks_of_node}\n" if recipe.machine.gpus else ""
    threads = "" if gpus else 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"\n'
    text = _TEMPLATE.format(
        name=job.name, nodes=job.nodes, each=job.ranks_of_node, gpus=gpus, threads=threads, command=job.command, grace=job.grace(_GRACE),
        folders=f",{folders}" if folders else "", mount=mount, unmount=unmount, preempted=PREEMPTED, lost=LOST, killed=KILLED, restarts=RESTARTS,
    )  # fmt: skip
    return job.write(".sbatch", text)


_TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name=zoo-{name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={each}
{gpus}#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# So many seconds before the time is over this script gets a signal; ranks end their step, save (run.save_within) and leave.
#SBATCH --signal=B:USR1@{grace}

# A rank is a task. The folder must be one that all nodes see; the job resumes from its newest checkpoint.
# Add what your cluster wants (--partition, --account), and make the environment with zoo available:
# source .venv/bin/activate

set -u
# Or fill in a container with zoo, as Pyxis names it (registry#zoo:tag or a .sqsh file); data outside this folder need a mount.
IMAGE=
container=()
[ "$IMAGE" ] && container=(--container-image="$IMAGE" --container-mounts="$PWD:$PWD{folders}" --container-workdir="$PWD")
{mount}{threads}
# Ranks leave by themselves when one of them does: srun waits a minute for them before it ends the rest.
srun --kill-on-bad-exit=0 --wait=60 "${{container[@]}}" {command} &
ranks=$!
trap 'signalled=1; kill -USR1 $ranks' USR1 TERM
signalled=1
while [ "$signalled" ]; do  # a signal ends a wait, not what it waits for
    signalled=
    wait $ranks
    code=$?
done
{unmount}
# {preempted}: saved on a signal. {lost}, and {killed} by srun: a rank died, hangs or was killed; not for ever, it may be the run's fault.
if [ $code -eq {preempted} ] || {{ [ $code -eq {lost} -o $code -eq {killed} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; }}; then
    echo "zoo: exit code $code: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

# rclone keeps what is not uploaded yet on the node's disk, so the mount ends when its queue is empty.
_MOUNT = """\
# The object store that run.dir lies on, as rclone names it (remote:bucket/folder), to be mounted on each node.
BUCKET=
each="srun --overlap --ntasks-per-node=1 --ntasks=$SLURM_JOB_NUM_NODES"
if [ "$BUCKET" ]; then
    mkdir -p {parent}
    $each rclone mount "$BUCKET" {parent} --vfs-cache-mode writes --vfs-write-back 1s --rc --rc-no-auth &
    mounts=$!
    $each timeout 60 bash -c 'until mountpoint -q {parent}; do sleep 1; done' || exit 1
fi
"""
_UNMOUNT = """\
if [ "$BUCKET" ]; then
    $each timeout 90 bash -c 'while rclone rc vfs/stats | grep -q "uploads.*: [1-9]"; do sleep 1; done'
    kill $mounts
    wait $mounts
fi
"""
