"""launch/slurm.sbatch and launch/jobset.yaml: what they run, and what they do as it ends."""

import os
import re
import subprocess

import pytest
import yaml

from experiments import launch
from experiments.cli import STOPPED
from experiments.config import REPOSITORY, Mesh

SLURM = REPOSITORY / "launch/slurm.sbatch"
JOBSET = yaml.safe_load((REPOSITORY / "launch/jobset.yaml").read_text())
MISTAKE = 2  # as experiments.cli exits


def run(command, folder, programs, **environment) -> tuple[int, dict[str, list[str]]]:
    """The exit status of a command, and the words that it gave to programs; these exit as they are told."""
    for name, status in programs.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/{name}.words\nexit {status}\n')
        path.chmod(0o755)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    status = subprocess.run(command, env=os.environ | environment, timeout=30).returncode
    words = {path.stem: path.read_text().splitlines() for path in folder.glob("*.words")}
    return status, words


def parsed(words) -> launch.Launch:
    module, *rest = words[words.index("-m") + 1 :]
    assert module == "experiments.launch"
    return launch.parse(rest)


@pytest.mark.parametrize("status", [0, STOPPED, MISTAKE])
def test_slurm_starts_a_run_and_queues_one_that_was_stopped_again(tmp_path, status):
    command = ["bash", str(SLURM), "configs/dense.py", "--mesh.fsdp", "8"]
    programs = {"srun": status, "scontrol": 0}
    ended, words = run(command, tmp_path, programs, SLURM_JOB_ID="17")
    assert ended == status
    assert words.get("scontrol") == (["requeue", "17"] if status == STOPPED else None)
    found = parsed(words["srun"])
    assert found.resume and found.distributed and found.config.mesh == Mesh(fsdp=8)


def test_slurm_asks_for_a_process_per_gpu_and_for_time_to_save():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "gpus-per-task" not in asked
    assert re.fullmatch(r"TERM@\d+", asked["signal"]) and "requeue" in asked
    assert asked["open-mode"] == "append"  # the log goes on


def test_jobset_starts_a_process_per_pod(tmp_path):
    (job,) = JOBSET["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    status, words = run(container["command"], tmp_path, {"python": STOPPED}, JOB_COMPLETION_INDEX="1")
    assert status == STOPPED
    found, name = parsed(words["python"]), JOBSET["metadata"]["name"]
    assert found.resume and found.process == 1 and not found.distributed
    assert found.processes == spec["parallelism"] == spec["completions"] and job["replicas"] == 1
    assert found.coordinator.partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert JOBSET["spec"]["network"]["enableDNSHostnames"] and spec["completionMode"] == "Indexed"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert found.out.is_relative_to(mounts["runs"])
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}


def test_jobset_begins_again_but_for_mistakes():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    spec, policy = job["template"]["spec"], JOBSET["spec"]["failurePolicy"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    codes, container = rule["onExitCodes"], spec["template"]["spec"]["containers"][0]
    assert rule["action"] == "FailJob" and (codes["operator"], codes["values"]) == ("In", [MISTAKE])
    assert codes["containerName"] == container["name"]
    (ends,) = policy["rules"]
    assert (ends["action"], ends["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # What remains, a stop or a crash, fails the job at once, and all pods are begun again.
    assert spec["backoffLimit"] == 0 and policy["maxRestarts"] > 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 60
