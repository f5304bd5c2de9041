"""Step `survival`: mounts whose servers are killed and whose DaemonSets are rolled while pods read and write."""

import contextlib
import json
import os
import pathlib
import signal

import cluster
import images
import volumes
from objects import (
    RELEASE, SYSTEM, TENANT, await_end, await_pod, claimed, config_map, delete_pod, execute, helm, listed, logs, pod, rolled,
)
from paths import LabError

HERE = pathlib.Path(__file__).resolve().parent
LOADS = {"reader": ("snapshot", True), "writer": ("live", False)}


def load(name, mode, claim, read_only, **more):
    mount, volume = claimed(claim, "/data", read_only)
    return pod(
        name, TENANT, images.S3, ["/usr/bin/python3", "/load/load.py", mode],
        [mount, {"name": "load", "mountPath": "/load"}], [volume, {"name": "load", "configMap": {"name": "load"}}], **more,
    )


def publications():
    """The driver's records of the pods' mounts, by volume id."""
    found = (json.loads(path.read_text()) for path in volumes.records())
    return {record["volume_id"]: record for record in found}


def started(process):
    """The start of a process, as the kernel counts it: the same number in all namespaces."""
    stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    return int(stat.rsplit(")", 1)[1].split()[19])


def server(record):
    """The process that serves a mount, as the machine numbers it; None when it does not run."""
    if not record["server"]:
        return None
    for process in cluster.members():
        with contextlib.suppress(OSError, StopIteration):
            lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
            inner = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
            if int(inner) == record["server"]["pid"] and started(process) == record["server"]["started"]:
                return process
    return None


def counts(name):
    # The runtime cuts a line into entries of 16 KiB, of which `kubectl` makes the line again. The last line names all files.
    lines = logs(name, TENANT, "--tail=64").splitlines()
    return json.loads(lines[-1]) if lines else {"done": 0, "errors": {}, "lost": 0, "slowest": 0}


def move_on(why):
    """Waits until each load has done something that began after this call."""
    for name in LOADS:
        before = counts(name)["done"]
        cluster.wait(f"operations of the {name} after {why}", lambda: counts(name)["done"] > before + 2, 300, 0.2)


def kill(volume_id):
    """Kills the server of a mount; the wait ends when another one is recorded and runs."""
    record = cluster.wait(f"the server of {volume_id}", lambda: (
        (found := publications().get(volume_id)) and server(found) and found), 300, 0.2)
    os.kill(server(record), signal.SIGKILL)

    def next_one():
        found = publications().get(volume_id)
        return found and found["server"] != record["server"] and server(found)

    cluster.wait(f"the next server of {volume_id}", next_one, 300, 0.2)


def check(when):
    """No operation has failed."""
    found = {name: counts(name) for name in LOADS}
    for name, count in found.items():
        if count["errors"]:
            raise LabError(f"{name}, {when}: operations failed: {count}")
    if found["reader"]["lost"]:
        raise LabError(f"reader, {when}: {found['reader']}")
    return found


def told(found):
    read, written = found["reader"], found["writer"]
    return (f"{read['done']} reads and {written['done']} fsynced writes, 0 errors; {written['lost']} writes reported lost; "
            f"slowest {max(read['slowest'], written['slowest']):.1f} s")


def roll(what, names, change, report):
    """Replaces the pods of DaemonSets under load: nothing fails, and nothing is lost."""
    old, lost = {uid for name in names for uid in pods(name)}, counts("writer")["lost"]
    change()
    for name in names:
        rolled("daemonset", name, SYSTEM)
    cluster.wait(f"the end of the old pods of {names}", lambda: not old & {uid for name in names for uid in pods(name)})
    move_on(what)
    found = check(what)
    report(f"{what}: {told(found)}")
    if found["writer"]["lost"] > lost:
        raise LabError(f"{what}: {found['writer']['lost'] - lost} writes were lost, and a planned handover commits them")


def restart(name):
    return lambda: cluster.kubectl("-n", SYSTEM, "rollout", "restart", f"daemonset/{name}")


def upgrade():
    helm("upgrade", RELEASE, SYSTEM, volumes.values(), image=images.MILLRACE_NEXT)


def pods(name):
    component = "csi-holder" if name == volumes.HOLDER else "csi-node"
    found = listed("pods", SYSTEM, f"app.kubernetes.io/component={component}")
    return {one["metadata"]["uid"] for one in found}


def run(report, given):
    text = (HERE / "load.py").read_text()
    cluster.apply(config_map("load", TENANT, {"load.py": text}))
    cluster.apply(*(load(name, name, *of) for name, of in LOADS.items()))
    for name in LOADS:
        await_pod(name, TENANT)
    move_on("the start")
    ids = [f"{volumes.VOLUME}@{volumes.SNAPSHOT}", volumes.VOLUME]
    for number in range(1, given.kills + 1):
        for volume_id in ids:
            kill(volume_id)
        move_on(f"kill {number}")
        check(f"after kill {number} of each server")
        if number in (1, given.kills) or number % 10 == 0:
            report(f"{number} kills of each server: {told(check('kills'))}")
    roll("the DaemonSet of drivers rolled", [volumes.NODE], restart(volumes.NODE), report)
    roll("the DaemonSet of holders rolled", [volumes.HOLDER], restart(volumes.HOLDER), report)
    roll("both rolled at once by `helm upgrade`", [volumes.NODE, volumes.HOLDER], upgrade, report)
    for volume_id in ids:
        kill(volume_id)
    move_on("a kill below the new holder")
    report(f"one more kill of each server, under the new holder: {told(check('the new holder'))}")
    ended = {}
    for name in LOADS:
        # It then tells its last numbers.
        execute(name, TENANT, "kill", "-TERM", "1")
        await_end(name, TENANT)
        ended[name] = counts(name)
    check("the end")
    durable = json.dumps(ended["writer"]["durable"])
    for name in LOADS:
        delete_pod(name, TENANT)
    cluster.apply(config_map("load", TENANT, {"load.py": text, "durable.json": durable}))
    cluster.apply(load("verify", "verify", "live", True))
    found = json.loads(await_end("verify", TENANT).splitlines()[-1])
    if found["wrong"]:
        raise LabError(f"fsynced data is not there: {found['wrong']}")
    delete_pod("verify", TENANT)
    if volumes.mounts() or volumes.records():
        raise LabError(f"no pod has a volume, and these are mounted: {volumes.mounts()}")
    report(f"all {found['bytes']:,} fsynced bytes of {found['files']} files are intact in a new mount; no mount is left")

