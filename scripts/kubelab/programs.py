"""The programs of the lab: Kubernetes and its tools built with Go, the rest out of Debian's packages.

All of them stay in the cache. Debian's packages are unpacked there, not installed, so that no service starts.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile

from paths import BIN, CACHE, DEBIAN, HERE, LabError, say

KUBERNETES = "v1.34.1"
NAMES = ["kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet"]
TOOLS = {
    "helm": "helm.sh/helm/v3/cmd/helm@v3.18.4",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.7.0",
}
PACKAGES = ["busybox-static", "containerd", "containernetworking-plugins", "etcd-server", "runc"]
# Programs of the machine, and the packages that have them.
MACHINE = {
    "conntrack": "conntrack", "dpkg-deb": "dpkg", "ip": "iproute2", "iptables": "iptables", "nsenter": "util-linux",
    "strip": "binutils", "unshare": "util-linux",
}
MOTO = "moto[s3,server]==5.2.1"


def run(*command, log=None, **more):
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more)
    if answer.returncode:
        raise LabError(f"`{' '.join(map(str, command))}` ended with {answer.returncode}:\n{answer.stdout[-3000:]}")
    return answer.stdout


def pinned(path, pin):
    """Whether the program is there, built from the same sources."""
    mark = path.with_name(path.name + ".pin")
    return path.exists() and mark.exists() and mark.read_text() == pin


def keep(path, pin, build):
    """Builds into a scratch name beside the program, then renames: a stopped build leaves nothing that is used."""
    if pinned(path, pin):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        made = build(folder)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(made, path)
        path.with_name(path.name + ".pin").write_text(pin)


def go(folder, *arguments, cwd=None):
    if not shutil.which("go"):
        raise LabError("building the programs of Kubernetes needs Go 1.26: install it and run again")
    environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"}
    run("nice", "-n", "19", "go", *arguments, cwd=cwd, env=environment)


def kubernetes(folder):
    say(f"building Kubernetes {KUBERNETES} at low priority: 10 to 30 minutes, once")
    version = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    go(folder, "build", "-p", "2", "-trimpath", "-ldflags", version, "-o", f"{folder}/kube", ".", cwd=HERE / "kube")
    return f"{folder}/kube"


def tool(name, module):
    def build(folder):
        say(f"building {name} at low priority: a few minutes, once")
        go(folder, "install", "-p", "2", "-ldflags", "-s -w", module)
        return f"{folder}/{name}"

    return build


def debian(folder):
    say(f"unpacking {', '.join(PACKAGES)} out of Debian's packages")
    run("apt-get", "-qq", "download", *PACKAGES, cwd=folder)
    os.mkdir(f"{folder}/root")
    for package in os.listdir(folder):
        if package.endswith(".deb"):
            run("dpkg-deb", "--extract", f"{folder}/{package}", f"{folder}/root")
    return f"{folder}/root"


def moto(folder):
    say("fetching moto, the S3 server of the lab")
    run("/usr/bin/python3", "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target", f"{folder}/moto", MOTO)
    return f"{folder}/moto"


def prepare():
    """Builds and fetches what is missing."""
    missing = sorted({package for name, package in MACHINE.items() if not shutil.which(name, path=search())})
    if missing:
        raise LabError(f"programs are missing: install the packages {' '.join(missing)} and run again")
    sources = b"".join((HERE / "kube" / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    keep(BIN / "kube", hashlib.sha256(sources).hexdigest(), kubernetes)
    for name in NAMES:
        link = BIN / name
        if not link.is_symlink():
            link.symlink_to("kube")
    for name, module in TOOLS.items():
        keep(BIN / name, module, tool(name, module))
    keep(DEBIAN, " ".join(PACKAGES), debian)
    keep(CACHE / "moto", MOTO, moto)


def search():
    """The PATH of the lab: its own programs first."""
    unpacked = [f"{DEBIAN}/{folder}" for folder in ("usr/bin", "usr/sbin", "bin")]
    return ":".join([str(BIN), *unpacked, os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
