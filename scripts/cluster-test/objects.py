"""Objects of the cluster, and the calls that make, await and remove them."""

import contextlib
import json
import time

import cluster
import images
from paths import ROOT, LabError

SYSTEM, TENANT = "millrace-system", "vision"
RELEASE = "millrace"
CHART = ROOT / "deploy/helm/millrace"
CSI = "csi.millrace.io"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
PATIENCE = 600


def namespace(name, labels=None):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}


def secret(name, space, **data):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": space}, "stringData": data}


def config_map(name, space, data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": space}, "data": data}


def pod(name, space, image, command, mounts=(), volumes=(), user=1000, env=(), args=(), memory="512Mi", grace=1):
    """A pod that Pod Security's profile *restricted* admits."""
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": space, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never", "enableServiceLinks": False, "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": grace,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "main", "image": image, "imagePullPolicy": "Never", "command": list(command), "args": list(args),
                "env": list(env), "resources": {"limits": {"memory": memory}},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": list(mounts),
            }],
            "volumes": list(volumes),
        },
    }


def claim(name, space, handle, read_only):
    """A static PersistentVolume of the driver, and its claim."""
    mode = ["ReadOnlyMany" if read_only else "ReadWriteMany"]
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {
                "capacity": size, "accessModes": mode, "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "",
                "csi": {"driver": CSI, "volumeHandle": handle, "readOnly": read_only},
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": space},
            "spec": {"accessModes": mode, "storageClassName": "", "volumeName": name, "resources": {"requests": size}},
        },
    ]


def claimed(name, at, read_only):
    """Mount and volume of a pod that uses a claim."""
    return (
        {"name": name, "mountPath": at, "readOnly": read_only},
        {"name": name, "persistentVolumeClaim": {"claimName": name}},
    )


def find(kind, name, space):
    """An object, None where it does not exist."""
    done = cluster.kubectl("-n", space, "get", kind, name, "--ignore-not-found", "--output=json")
    return json.loads(done.stdout) if done.stdout.strip() else None


def listed(kind, space, selector):
    return cluster.get("-n", space, kind, f"--selector={selector}")["items"]


def is_ready(found):
    conditions = found["status"].get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def await_pod(name, space, seconds=PATIENCE):
    """Waits until a pod is ready. The error has its events."""
    def ready():
        found = find("pod", name, space)
        if found and found["status"].get("phase") in ("Failed", "Succeeded"):
            raise SystemExit(f"cluster-test: the pod {name} ended early:\n{logs(name, space)}")
        return found and is_ready(found)

    with explained(name, space):
        cluster.wait(f"the pod {name}", ready, seconds)


def await_end(name, space, seconds=PATIENCE):
    """Waits until a pod has ended with success, and returns its output."""
    def ended():
        phase = (find("pod", name, space) or {"status": {}})["status"].get("phase")
        if phase == "Failed":
            raise SystemExit(f"cluster-test: the pod {name} failed:\n{logs(name, space)}")
        return phase == "Succeeded"

    with explained(name, space):
        cluster.wait(f"the end of the pod {name}", ended, seconds)
    return logs(name, space)


@contextlib.contextmanager
def explained(name, space):
    """Adds the events of an object to an error."""
    try:
        yield
    except LabError as error:
        events = cluster.kubectl("-n", space, "describe", "pod", name, check=False).stdout[-3000:]
        raise LabError(f"{error}\n{events}") from None


def logs(name, space, *arguments):
    return cluster.kubectl("-n", space, "logs", name, *arguments, check=False).stdout


def execute(name, space, *command, timeout=300, check=True):
    return cluster.kubectl("-n", space, "exec", name, "--", *command, timeout=timeout, check=check).stdout


def delete_pod(name, space, seconds=60):
    """Deletes a pod, and returns after how many seconds it was gone."""
    began = time.monotonic()
    cluster.kubectl("-n", space, "delete", "pod", name, "--wait=false")
    cluster.wait(f"the end of the deleted pod {name}", lambda: find("pod", name, space) is None, seconds, 0.1)
    return time.monotonic() - began


def rolled(kind, name, space, seconds=PATIENCE):
    """Waits until the newest template of a DaemonSet or Deployment has replaced all others."""
    cluster.kubectl("-n", space, "rollout", "status", f"{kind}/{name}", f"--timeout={seconds}s", timeout=seconds + 30)


def helm(verb, release, space, values, chart=CHART, image=images.MILLRACE):
    """Installs or upgrades a release of the chart with the images of the lab."""
    repository, tag = image.rsplit(":", 1)
    whole = {"image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}, **values}
    cluster.inside("helm", "-n", space, verb, release, str(chart), "--values=-", text=json.dumps(whole), timeout=300)
