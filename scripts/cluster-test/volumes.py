"""Step `volumes`: claims on a volume and on a snapshot, in pods without privilege."""

import hashlib
import io
import pathlib
import random
import tarfile
import time

import cluster
import images
import stores
from objects import (
    CSI, RELEASE, RESTRICTED, SYSTEM, TENANT, await_pod, claim, claimed, delete_pod, execute, find, helm,
    namespace, pod, rolled,
)
from paths import LAB, LabError

VOLUME, SNAPSHOT = "digits", "monday"
DELETED_MAX = 5.0
# Of the driver: the chart of the lab has no sidecars, so its controller stays at home.
VALUES = {"csi": {
    "enabled": True, "controller": {"replicas": 0}, "storageClasses": {},
    "node": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}},
}}
NODE, HOLDER = f"{RELEASE}-csi-node", f"{RELEASE}-csi-holder"


def files():
    """Names and bytes of the files: empty, small, unaligned, and larger than a block of the store."""
    draw = random.Random(11)
    sizes = [0, 1, 4095, 4096, 65_537, 1 << 20, (9 << 20) + 7] + [draw.randrange(1, 200_000) for _ in range(25)]
    return {f"folder-{number % 4}/file-{number}": draw.randbytes(size) for number, size in enumerate(sizes)}


def sums(text):
    """The output of `md5sum`: digests by name."""
    return {name.removeprefix("./"): digest for digest, name in (line.split(maxsplit=1) for line in text.splitlines())}


def fill(content):
    """Writes files to the volume and takes the snapshot; then changes the volume."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o644, 10001, 10001
            tar.addfile(entry, io.BytesIO(data))
    path = stores.put("files.tar", archive.getvalue())
    unpack = f"mkdir -p /data/files/open && tar x -C /data/files -f {path} && chmod 0777 /data/files/open"
    execute(stores.TOOLS, SYSTEM, "sh", "-c", unpack)
    stores.millrace("volume", "create", VOLUME)
    stores.millrace("cp", "-r", "/data/files", f"{VOLUME}:/files")
    stores.millrace("snapshot", "create", f"{VOLUME}@{SNAPSHOT}")
    execute(stores.TOOLS, SYSTEM, "sh", "-c", "echo later >/data/later")
    stores.millrace("cp", "/data/later", f"{VOLUME}:/files/later")


def mounts():
    """Paths of volumes that are mounted below the kubelet's folder."""
    table = cluster.inside("cat", "/proc/self/mounts").stdout
    found = (line.split()[1:3] for line in table.splitlines())
    return [path for path, kind in found if kind == "fuse.millrace" and path.startswith("/var/lib/kubelet/")]


def install():
    """Installs the chart with the driver, and waits until the kubelet knows it."""
    helm("install", RELEASE, SYSTEM, values())
    for name in (HOLDER, NODE):
        rolled("daemonset", name, SYSTEM)

    def registered():
        drivers = (find("csinode", "lab", SYSTEM) or {"spec": {}})["spec"].get("drivers") or []
        return any(driver["name"] == CSI for driver in drivers)

    cluster.wait("the registration of the driver with the kubelet", registered)
    holder, driver = (daemon(name)["spec"]["template"]["spec"]["containers"][0] for name in (HOLDER, NODE))
    if driver["securityContext"].get("privileged") or not holder["securityContext"]["privileged"]:
        raise LabError("the chart was to make the holder privileged and the driver not")


def values():
    return {**stores.shared("volumes", "volumes"), **VALUES}


def daemon(name):
    return find("daemonset", name, SYSTEM)


def reader(name, of, read_only):
    """A pod that waits with a claim mounted."""
    mount, volume = claimed(of, "/data", read_only)
    return pod(name, TENANT, images.BUSYBOX, ["sleep", "1000000"], [mount], [volume], grace=1)


def run(report, _given):
    content = files()
    fill(content)
    report(f"{len(content)} files, {sum(map(len, content.values())):,} bytes in volume {VOLUME}, snapshot {SNAPSHOT}")
    install()
    cluster.apply(namespace(TENANT, RESTRICTED))
    cluster.wait("the service account", lambda: find("serviceaccount", "default", TENANT))
    cluster.apply(*claim("live", TENANT, VOLUME, False), *claim("snapshot", TENANT, f"{VOLUME}@{SNAPSHOT}", True))
    began = time.monotonic()
    cluster.apply(reader("at-live", "live", False), reader("at-snapshot", "snapshot", True))
    for name in ("at-live", "at-snapshot"):
        await_pod(name, TENANT)
    report(f"two pods of the profile restricted run after {time.monotonic() - began:.1f} s")
    written = {f"files/{name}": hashlib.md5(data).hexdigest() for name, data in content.items()}
    later = {"files/later": hashlib.md5(b"later\n").hexdigest()}
    for name, expected in (("at-live", written | later), ("at-snapshot", written)):
        found = sums(execute(name, TENANT, "sh", "-c", "cd /data && find . -type f -exec md5sum {} +"))
        if found != expected:
            wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
            raise LabError(f"the pod {name} reads other files than were written: {wrong[:10]}")
        report(f"{name}: md5 of all {len(found)} files equal")
    execute("at-live", TENANT, "sh", "-c", "echo hello >/data/files/open/hello && sync /data/files/open/hello")
    if read(f"{VOLUME}:/files/open/hello") != "hello\n":
        raise LabError("what the pod wrote is not in the volume")
    refused = cluster.kubectl("-n", TENANT, "exec", "at-snapshot", "--", "sh", "-c", "echo x >/data/files/later", check=False)
    if refused.returncode == 0 or "Read-only file system" not in refused.stderr:
        raise LabError(f"a write to the snapshot was to fail with EROFS: {refused.stderr}")
    report("a write from the pod is in the volume; a write to the snapshot fails with EROFS")
    for name in ("at-live", "at-snapshot"):
        before = len(mounts())
        seconds = delete_pod(name, TENANT)
        if len(mounts()) != before - 1:
            raise LabError(f"the pod {name} is gone and {mounts()} are mounted")
        if seconds > DELETED_MAX:
            raise LabError(f"the pod {name} was deleted after {seconds:.1f} s, and {DELETED_MAX} s is the limit")
        report(f"{name}: deleted after {seconds:.1f} s, its mount is gone")
    left = records()
    if left:
        raise LabError(f"no pod has a volume, and the driver has records of {left}")


def read(spec):
    """A small file of a volume."""
    stores.millrace("cp", spec, "/data/read")
    text = execute(stores.TOOLS, SYSTEM, "cat", "/data/read")
    execute(stores.TOOLS, SYSTEM, "rm", "/data/read")
    return text


def records():
    """The driver's records of published volumes."""
    folder = pathlib.Path(LAB / "var-lib/millrace-csi/csi/published")
    return sorted(folder.glob("*.json"))
