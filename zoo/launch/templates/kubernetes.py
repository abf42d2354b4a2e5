"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer v2 with the runtime that it needs, and a plain JobSet.

A pod is a node. Its first failure fails the Job, with the exit code in the Job's message, and the JobSet's failure policy acts
on that: https://kubernetes.io/docs/concepts/workloads/controllers/job (pod failure policy) and
https://jobset.sigs.k8s.io/docs/concepts (failure policy). A TrainJob can't state that policy, so it brings a TrainingRuntime along.
"""

from __future__ import annotations

from pathlib import Path

from zoo.launch.templates.job import CODES, KILLED, RESTARTS, Job, as_yaml
from zoo.parallel.signals import LOST, PREEMPTED
from zoo.types import JsonObject

_WORKING = "/workspace"  # of the Dockerfile
_GRACE = 30  # seconds beyond run.save_within until the kubelet kills
_TRAINER = "trainer.kubeflow.org"
_FILL_IN = (
    "Fill in: image (docs/install.md builds one), and claimName: a volume that all nodes can write, with data and run.dir on it.",
    f"{CODES}; a disrupted pod counts as {PREEMPTED}, and other codes end the job.",
)


def write_train_job(job: Job) -> Path:
    """NAME.trainjob.yaml: a TrainingRuntime with the failure policy, and the TrainJob that trains."""
    named = {"name": job.label}
    template = _job_template(job, _container(job, "$PET_NODE_RANK", "$PET_MASTER_ADDR"))
    template["metadata"] = {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}
    job_set = {"failurePolicy": _FAILURE_POLICY, "replicatedJobs": [{"name": "node", "template": template}]}
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": named | {"labels": {f"{_TRAINER}/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}},
    }
    train_job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": named,
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.label},
            "trainer": {
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_of_node,
                "resourcesPerNode": _resources(job),
            },
        },
    }
    comments = ("For Kubeflow Trainer from 2.2 on: kubectl apply -f this file.", *_FILL_IN)
    return job.write(".trainjob.yaml", as_yaml(comments, runtime, train_job))


def write_job_set(job: Job) -> Path:
    """NAME.jobset.yaml: a JobSet of one Job, whose pods are the nodes."""
    container = _container(job, "$JOB_COMPLETION_INDEX", f"{job.label}-node-0-0.{job.label}")
    container["resources"] = _resources(job)
    template = _job_template(job, container)
    template["spec"] |= {"completions": job.nodes, "parallelism": job.nodes}
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.label},
        "spec": {"failurePolicy": _FAILURE_POLICY, "replicatedJobs": [{"name": "node", "template": template}]},
    }
    comments = ("For a cluster with JobSet: kubectl apply -f this file.", *_FILL_IN)
    return job.write(".jobset.yaml", as_yaml(comments, job_set))


# The reasons are stated beside the patterns: a JobSet that knows no patterns must not restart after a user's mistake.
_FAILURE_POLICY: JsonObject = {
    "maxRestarts": RESTARTS,
    "rules": [
        {
            "name": "Saved",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"exit code {PREEMPTED} ", "condition DisruptionTarget "],
        },
        {"name": "Lost", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "Failed", "action": "FailJobSet"},
    ],
}


def _job_template(job: Job, container: JsonObject) -> JsonObject:
    """A Job whose first failed pod fails it; only failures worth a restart match its pod failure policy."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [PREEMPTED]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [LOST, KILLED]}},
    ]
    volumes: list[JsonObject] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "zoo"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # for NCCL and for workers that decode
    ]
    if job.recipe.run.stage is not None:
        volumes.append({"name": "stage", "emptyDir": {}})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace(_GRACE),
        "containers": [container],
        "volumes": volumes,
    }
    spec = {"completionMode": "Indexed", "backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    return {"spec": {**spec, "template": {"spec": pod}}}


def _container(job: Job, node: str, master: str) -> JsonObject:
    mounts = [{"name": "shared", "mountPath": folder} for folder in job.shared_folders(_WORKING)]
    mounts.append({"name": "memory", "mountPath": "/dev/shm"})
    if job.recipe.run.stage is not None:
        mounts.append({"name": "stage", "mountPath": str(Path(_WORKING) / job.recipe.run.stage)})
    return {
        "name": "node",
        "image": "zoo",
        "command": ["bash", "-c", job.script(node, master)],
        "workingDir": _WORKING,
        "volumeMounts": mounts,
    }


def _resources(job: Job) -> JsonObject:
    """Those of a node; without GPUs a core for each rank."""
    return {"limits": {"nvidia.com/gpu" if job.recipe.machine.gpus else "cpu": job.ranks_of_node}}
