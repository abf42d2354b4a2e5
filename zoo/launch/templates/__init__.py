"""Batch files for schedulers, which run `zoo train` again after exit codes 75, 76 and 137: SLURM, Kubernetes and SkyPilot."""

from zoo.launch.templates.job import Job
from zoo.launch.templates.kubernetes import write_job_set, write_train_job
from zoo.launch.templates.skypilot import write_task
from zoo.launch.templates.slurm import write_script

TEMPLATES = {
    "--slurm-template": (write_script, "sbatch"),
    "--kubernetes-template": (write_train_job, "kubectl apply -f"),
    "--jobset-template": (write_job_set, "kubectl apply -f"),
    "--skypilot-template": (write_task, "sky jobs launch"),
}
"""By flag of `zoo train`: what writes the file, and the command that takes it."""

__all__ = ["TEMPLATES", "Job"]
