"""Ranks under SLURM: its variables translated to those of torchrun, and a batch script that starts the ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from zoo.config.schema import Recipe
from zoo.errors import ConfigError, UserError
from zoo.files import write_atomically
from zoo.parallel.signals import LOST, PREEMPTED

_PORTS = 20000  # a job's port is one of so many, from as many on
_PLAIN = re.compile(r"[\w./:=@%+,-]+")  # a word of a shell that needs no quotes
_NAMES = {"SLURM_PROCID": "RANK", "SLURM_NTASKS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK"}


def join_slurm(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set torchrun's variables where SLURM has started this process as one of several tasks; return whether it has.

    RANK, WORLD_SIZE and LOCAL_RANK are SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. MASTER_ADDR is the first host of
    SLURM_JOB_NODELIST, and MASTER_PORT follows from the job's id. Variables of torchrun that are set already are kept.

    Raises:
        ConfigError: a variable of SLURM can't be read.
    """
    if "RANK" in environ or not all(name in environ for name in _NAMES) or environ["SLURM_NTASKS"] == "1":
        return False
    numbers = {ours: _number(theirs, environ) for theirs, ours in _NAMES.items()}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = first_host(nodes) if nodes else "127.0.0.1"
    job = _number("SLURM_JOB_ID", environ) if "SLURM_JOB_ID" in environ else 0
    environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(_PORTS + job % _PORTS))
    if "SLURM_NNODES" in environ:
        each = numbers["WORLD_SIZE"] // max(1, _number("SLURM_NNODES", environ))
        environ.setdefault("LOCAL_WORLD_SIZE", str(max(1, each)))
    if numbers["RANK"] == 0 and "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        print(
            f"zoo: SLURM says {numbers['WORLD_SIZE']} tasks: waiting for the others, which srun starts", file=sys.stderr
        )
    environ.update({name: str(value) for name, value in numbers.items()})
    return True


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it: `gpu[003-006,9],login` is gpu003 first."""
    match = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?", nodes.strip())
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes}: no host can be read there; set MASTER_ADDR")
    return "".join(part for part in match.groups() if part)


def _number(name: str, environ: MutableMapping[str, str]) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: wanted a whole number")
    return int(text)


def write_template(recipe: Recipe, arguments: Sequence[str], ranks: int) -> Path:
    """Write a batch script that runs `zoo train` with these arguments on the recipe's machine; returns where.

    Raises:
        UserError: a file of that name exists.
    """
    assert recipe.run.dir is not None  # derived by validate
    name = Path(recipe.run.dir).name
    path = Path(f"{name}.sbatch")
    if path.exists():
        raise UserError(f"{path} is there already; move it away, or give another run.dir")
    nodes = recipe.machine.nodes
    each = ranks // nodes
    gpus = f"#SBATCH --gpus-per-node={each}\n" if recipe.machine.gpus else ""
    threads = "" if gpus else 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"\n'
    quoted = (text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'" for text in arguments)
    text = _TEMPLATE.format(
        name=name, nodes=nodes, each=each, gpus=gpus, threads=threads, command=" ".join(quoted), preempted=PREEMPTED, lost=LOST
    )  # fmt: skip
    write_atomically(path, text)
    return path


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
# Two minutes before the time is over this script gets a signal; ranks end their step, save (run.save_within) and leave.
#SBATCH --signal=B:USR1@120

# A rank is a task. The folder must be one that all nodes see; the job resumes from its newest checkpoint.
# Add what your cluster wants (--partition, --account), and make the environment with zoo available:
# source .venv/bin/activate

set -u
{threads}
# Ranks leave by themselves when one of them does: srun waits a minute for them before it ends the rest.
srun --kill-on-bad-exit=0 --wait=60 zoo train {command} &
ranks=$!
trap 'signalled=1; kill -USR1 $ranks' USR1 TERM
signalled=1
while [ "$signalled" ]; do  # a signal ends a wait, not what it waits for
    signalled=
    wait $ranks
    code=$?
done

# {preempted}: saved on a signal. {lost}, and 137 by srun: a rank died, hangs or was killed; not for ever, it may be the run's fault.
if [ $code -eq {preempted} ] || {{ [ $code -eq {lost} -o $code -eq 137 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]; }}; then
    echo "zoo: exit code $code: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
