"""Process 1 of the lab: it prepares its mounts and its network, starts the daemons and reaps what ends.

`python3 node.py LAB` inside fresh namespaces for mounts, network, processes and control groups (`cluster.py` starts it
so). Everything that the lab makes lives in these: when this process ends, the kernel ends all others and takes
mounts and network devices away.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

LAB = pathlib.Path(sys.argv[1])
HERE = pathlib.Path(__file__).resolve().parent
NODE = "lab"
ADDRESS, PODS, SERVICES = "10.200.0.2", "10.201.0.0/16", "10.202.0.0/16"
API = f"https://{ADDRESS}:6443"
DOMAIN = "cluster.local"
# The kubelet sets these of the machine; here it sees them set.
SYSCTLS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000,
}


def run(*command):
    subprocess.run(command, check=True)


def mounts():
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    for place in ("/var/lib", "/var/log"):
        own = LAB / place.strip("/").replace("/", "-")
        own.mkdir(exist_ok=True)
        run("mount", "--bind", own, place)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    for name, value in SYSCTLS.items():
        fake = LAB / "sysctl" / name
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(f"{value}\n")
        if pathlib.Path("/proc/sys", name).exists():
            run("mount", "--bind", fake, f"/proc/sys/{name}")
    # Of the control groups, the lab sees its own alone.
    hierarchies = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    for _, place, kind, options, *_ in hierarchies:
        if kind in ("cgroup", "cgroup2"):
            chosen = [word for word in options.split(",") if word not in ("rw", "relatime", "nosuid", "nodev", "noexec")]
            run("umount", place)
            run("mount", "-t", kind, *(["-o", ",".join(chosen)] if kind == "cgroup" else []), kind, place)
    # Mounts of pods reach the node and other pods, as `mountPropagation` says.
    run("mount", "--make-rshared", "/")


def network():
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "lab0", "type", "veth", "peer", "name", "lab1")
    run("ip", "address", "add", f"{ADDRESS}/24", "dev", "lab0")
    run("ip", "link", "set", "lab0", "up")
    run("ip", "link", "set", "lab1", "up")
    # The API server looks for the address of a default route.
    run("ip", "route", "add", "default", "via", ADDRESS, "dev", "lab0")
    pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def configurations():
    folder = LAB / "etc"
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    (folder / "tokens.csv").write_text("lab,lab,1,system:masters\n")
    run("openssl", "genrsa", "-out", folder / "accounts.key", "2048")
    user = {"name": "lab", "user": {"token": "lab"}}
    cluster = {"name": "lab", "cluster": {"server": API, "insecure-skip-tls-verify": True}}
    context = {"name": "lab", "context": {"cluster": "lab", "user": "lab"}}
    (LAB / "kubeconfig").write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "users": [user], "clusters": [cluster], "contexts": [context],
        "current-context": "lab",
    }))
    (folder / "resolv.conf").write_text(f"nameserver {ADDRESS}\n")
    # A route for each pod through the node, so that every packet passes the rules of the Services.
    (folder / "cni/10-lab.conflist").write_text(json.dumps({
        "cniVersion": "0.4.0", "name": "lab", "plugins": [{
            "type": "ptp", "mtu": 1400,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }],
    }))
    (folder / "kubelet.yaml").write_text(json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [],
        "clusterDNS": [ADDRESS], "clusterDomain": DOMAIN, "resolvConf": str(folder / "resolv.conf"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failSwapOn": False, "makeIPTablesUtilChains": False, "localStorageCapacityIsolation": False,
        "featureGates": {"KubeletInUserNamespace": True}, "maxOpenFiles": 20000, "oomScoreAdj": 0,
        "imageGCHighThresholdPercent": 100, "imageMinimumGCAge": "24h", "readOnlyPort": 0,
        "nodeStatusUpdateFrequency": "5s", "syncFrequency": "10s",
        "evictionHard": {name: "0%" for name in ("nodefs.available", "imagefs.available", "nodefs.inodesFree")}
        | {"memory.available": "10Mi"},
    }))
    (folder / "proxy.yaml").write_text(json.dumps({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
        "clientConnection": {"kubeconfig": str(LAB / "kubeconfig")}, "clusterCIDR": PODS, "hostnameOverride": NODE,
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }))
    plugins = os.environ["KUBELAB_DEBIAN"] + "/usr/lib/cni"
    (folder / "containerd.toml").write_text(f"""version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/kubelab/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
""")


def daemons():
    """Name and command of each daemon, in the order of their start."""
    etc, config = LAB / "etc", LAB / "kubeconfig"
    yield "etcd", ["etcd", f"--data-dir={LAB}/etcd", "--unsafe-no-fsync", "--logger=zap"]
    yield "kube-apiserver", [
        "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--service-account-key-file={etc}/accounts.key",
        f"--service-account-signing-key-file={etc}/accounts.key", "--service-account-issuer=https://kubernetes.default.svc",
        f"--token-auth-file={etc}/tokens.csv", "--authorization-mode=RBAC", f"--service-cluster-ip-range={SERVICES}",
        f"--cert-dir={LAB}/certificates", f"--bind-address={ADDRESS}", f"--advertise-address={ADDRESS}",
        # The name of the node is in no DNS.
        "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
    ]
    yield "containerd", ["containerd", "--config", str(etc / "containerd.toml")]
    yield "kube-controller-manager", [
        "kube-controller-manager", f"--kubeconfig={config}", f"--service-account-private-key-file={etc}/accounts.key",
        f"--root-ca-file={LAB}/certificates/apiserver.crt", "--leader-elect=false", "--secure-port=0",
        # A node of the lab is busy, not dead.
        "--node-monitor-grace-period=120s",
    ]
    yield "kube-scheduler", ["kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0"]
    yield "kube-proxy", ["kube-proxy", f"--config={etc}/proxy.yaml"]
    yield "names", [sys.executable, str(HERE / "names.py"), API, ADDRESS, DOMAIN]
    yield "kubelet", [
        "kubelet", f"--kubeconfig={config}", f"--config={etc}/kubelet.yaml", f"--hostname-override={NODE}",
        f"--node-ip={ADDRESS}", f"--cert-dir={LAB}/certificates", "--node-labels=kubelab/real=true",
    ]


def api_ready():
    done = subprocess.run(
        ["kubectl", "get", "--raw", "/readyz"], env={**os.environ, "KUBECONFIG": str(LAB / "kubeconfig")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )
    return done.returncode == 0


def reap(running, options):
    """Collects an ended process and records a daemon; `up` and the tests report it."""
    pid, status = os.waitpid(-1, options)
    if pid in running:
        with open(LAB / "ended", "a") as file:
            file.write(f"{running.pop(pid)} ended with status {os.waitstatus_to_exitcode(status)}\n")


def main():
    mounts()
    network()
    configurations()
    logs = LAB / "logs"
    logs.mkdir(exist_ok=True)
    running = {}
    for name, command in daemons():
        # Those that follow end when they find no API server. The caller of `up` bounds this wait.
        while name == "kube-controller-manager" and not api_ready():
            reap(running, os.WNOHANG)
            time.sleep(0.5)
        with open(logs / f"{name}.log", "wb") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=LAB)
        running[child.pid] = name
    (LAB / "started").write_text("")
    while True:
        reap(running, 0)


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.signal(signal.SIGINT, lambda *_: os._exit(0))
main()
