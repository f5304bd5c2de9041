"""Step `serving`: the model server's pods are replaced and scaled under load, and no request fails."""

import io
import json
import pathlib
import subprocess
import tarfile

import cluster
import images
import stores
import training
from objects import (
    CHART, RESTRICTED, await_end, await_pod, config_map, execute, find, helm, listed, logs, namespace, pod, rolled,
)
from paths import LAB, ROOT, LabError

HERE = pathlib.Path(__file__).resolve().parent
# The commit that added the chart.
FIRST = "84d37e74"
SPACE, NAME, LOAD = "serving", "millrace-serving", "load"


def first_chart():
    """The chart of its first commit, unpacked."""
    packed = subprocess.run(
        ["git", "-C", ROOT, "archive", FIRST, CHART.relative_to(ROOT)], capture_output=True, check=False,
    )
    if packed.returncode:
        raise LabError(f"cannot unpack the chart of commit {FIRST}; fetch the whole history: {packed.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(LAB / "first", filter="data")
    return LAB / "first" / CHART.relative_to(ROOT)


def upgrade(verb, replicas, image, chart=CHART):
    serving = {
        "enabled": True, "volume": "served", "replicas": replicas, "drainSeconds": 30,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
    }
    helm(verb, "millrace", SPACE, {**stores.shared("volumes", "volumes"), "serving": serving}, chart, image)


def counts():
    return json.loads(logs(LOAD, SPACE, "--tail=1").splitlines()[-1])


def go_on(why, report):
    """Waits for 100 further requests. None has failed."""
    before = counts()["done"]
    cluster.wait(f"100 requests after {why}", lambda: counts()["done"] >= before + 100)
    found = counts()
    if found["errors"]:
        raise LabError(f"requests failed, {why}: {found}")
    report(f"{why}: {found['done']} requests, 0 failed, slowest {found['slowest']:.1f} s")


def servers():
    return {found["metadata"]["uid"] for found in listed("pods", SPACE, "app.kubernetes.io/component=serving")}


def run(report, _given):
    training.dataset("serving-records", ["served"])
    job = training.job("served", "workers = 1\n", dataset="serving-records").replace(f"{training.EPOCHS}", "3")
    stores.millrace("train", stores.put("served.toml", job.encode()))
    cluster.apply(namespace(SPACE, RESTRICTED))
    cluster.wait("the service account", lambda: find("serviceaccount", "default", SPACE))
    cluster.apply(*stores.secrets(SPACE), config_map("load", SPACE, {"load.py": (HERE / "request_load.py").read_text()}))
    upgrade("install", 2, images.MILLRACE, first_chart())
    rolled("deployment", NAME, SPACE)
    cluster.apply(pod(
        LOAD, SPACE, images.S3,
        ["/usr/bin/python3", "/load/load.py", NAME, "8000", f"/v2/models/{training.NAME}/infer"],
        [{"name": "load", "mountPath": "/load"}], [{"name": "load", "configMap": {"name": "load"}}],
    ))
    await_pod(LOAD, SPACE)
    cluster.wait("the first requests", lambda: logs(LOAD, SPACE))
    go_on("two replicas of the chart's first commit", report)
    upgrade("upgrade", 2, images.MILLRACE)
    rolled("deployment", NAME, SPACE)
    go_on("upgrade to this chart", report)
    for why, replicas, image in (
        ("another image by helm upgrade", 2, images.MILLRACE_NEXT), ("three replicas", 3, images.MILLRACE_NEXT),
        ("one replica", 1, images.MILLRACE_NEXT),
    ):
        old = servers()
        upgrade("upgrade", replicas, image)
        rolled("deployment", NAME, SPACE)
        replaced = replicas == 2
        cluster.wait("the end of the old pods", lambda old=old, count=replicas, replaced=replaced: (
            len(servers()) == count and not (replaced and old & servers())))
        go_on(why, report)
    execute(LOAD, SPACE, "kill", "-TERM", "1")
    await_end(LOAD, SPACE)
    if counts()["errors"]:
        raise LabError(f"requests failed: {counts()}")
