"""Ranks under SLURM: its variables translated to those of torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping

from zoo.errors import ConfigError

_PORTS = 20000  # a job's port is one of so many, from as many on
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
