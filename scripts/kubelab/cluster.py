"""Starts and ends the lab, and runs commands in it.

Every state of the lab that a killed script can leave is one process with its namespaces, a control group and a folder.
`down` removes them in this order, and `up` begins with a `down` unless the lab is whole.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import images
import programs
from paths import CACHE, DEBIAN, HERE, KUBECONFIG, LAB, LOGS, LabError, say, tail

GROUP = "millrace-kubelab"
GROUPS = pathlib.Path("/sys/fs/cgroup")


@contextlib.contextmanager
def alone():
    """One script at a time changes the lab."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lab.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError("another `kubelab` starts or ends the lab right now: wait for it and run again") from None
        yield


def first():
    """The first process of the lab, None when it does not run.

    Control groups tell it. The command lines of /proc do not: reading that of a stuck process never returns.
    """
    for process in members(deep=False):
        with contextlib.suppress(OSError):
            status = pathlib.Path(f"/proc/{process}/status").read_text()
            spaces = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(spaces) > 1 and spaces[-1] == "1":
                return process
    return None


def environment():
    # A proxy of the machine must not stand between the programs and the cluster.
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return {**kept, "PATH": programs.search(), "KUBECONFIG": str(KUBECONFIG), "KUBELAB_DEBIAN": str(DEBIAN)}


def inside(*command, text=None, check=True, timeout=120):
    """Runs a command in the namespaces of the lab."""
    process = first()
    if process is None:
        raise LabError("the lab does not run: start it with `kubelab up`")
    entered = ["nsenter", "-t", str(process), "-m", "-n", "-p", "-C", "--wd=/", "--", *map(str, command)]
    try:
        done = subprocess.run(
            entered, input=text, capture_output=True, text=True, timeout=timeout, env=environment(), check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(map(str, command))}` did not end within {timeout} s") from None
    if check and done.returncode:
        raise LabError(f"`{' '.join(map(str, command))}` ended with {done.returncode}: {done.stderr or done.stdout}")
    return done


def start(*command, **more):
    """Starts a command in the namespaces of the lab and returns its process."""
    process = first()
    entered = ["nsenter", "-t", str(process), "-m", "-n", "-p", "-C", "--wd=/", "--", *map(str, command)]
    return subprocess.Popen(entered, env=environment(), text=True, **more)


def kubectl(*arguments, text=None, check=True, timeout=120):
    return inside("kubectl", *arguments, text=text, check=check, timeout=timeout)


def get(*arguments):
    """The JSON of `kubectl get`."""
    return json.loads(kubectl("get", *arguments, "--output=json").stdout)


def apply(*objects, server_side=False):
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    kubectl("apply", "--filename=-", *(["--server-side"] if server_side else []), text=text)


def wait(what, found, seconds=300, pause=1.0):
    """Calls `found` until it returns a value. An error after `seconds` says what did not come."""
    end, last = time.monotonic() + seconds, ""
    while True:
        try:
            value = found()
            if value:
                return value
        except LabError as error:
            last = f"; the last error: {error}"
        ended = LAB / "ended"
        if ended.exists():
            name = ended.read_text().split()[0]
            raise LabError(f"waiting for {what}: {ended.read_text().strip()}\n{tail(LOGS / (name + '.log'))}")
        if time.monotonic() > end:
            raise LabError(f"{what} did not come within {seconds} s{last}")
        time.sleep(pause)


def groups():
    """Control groups of the lab: one per hierarchy."""
    return [folder / GROUP for folder in GROUPS.iterdir() if (folder / "cgroup.procs").exists()]


def enter_groups():
    """Of the process that is about to become the lab; called between fork and exec."""
    for group in groups():
        group.mkdir(exist_ok=True)
        for name in ("cpuset.mems", "cpuset.cpus"):
            if (group / name).exists():
                (group / name).write_text((group.parent / name).read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))


def remove_groups():
    for group in groups():
        for folder, _, _ in os.walk(group, topdown=False):
            for _ in range(50):
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    # The kernel still counts a process that has just ended.
                    time.sleep(0.1)


def members(deep=True):
    """Processes in the control groups of the lab; not `deep`: without those of pods."""
    found = set()
    for group in groups():
        for folder in [group, *(group.glob("**/") if deep else [])]:
            with contextlib.suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return found


def remove():
    """Ends whatever runs of the lab and removes what it left."""
    end = time.monotonic() + 60
    # The first process takes all others of its namespace along.
    while remaining := members():
        for process in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > end:
            raise LabError(f"processes {sorted(remaining)} do not end; look at /proc/PID/stack, then run `kubelab down`")
        time.sleep(0.1)
    remove_groups()
    mounted = [line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    if any(place.startswith(f"{LAB}/") for place in mounted):
        raise LabError(f"a folder below {LAB} is still mounted: unmount it, then run `kubelab down`")
    shutil.rmtree(LAB, ignore_errors=True)
    if LAB.exists():
        shutil.rmtree(LAB)


def check_machine():
    if os.geteuid() != 0:
        raise LabError("a kubelet needs root: run it as root")
    if not (GROUPS / "memory/cgroup.procs").exists():
        raise LabError("this machine has no control groups of version 1, and with others the lab was never tried")


def whole():
    """Whether the lab is up, started to the end by an earlier script."""
    return (LAB / "up").exists() and first() is not None and not (LAB / "ended").exists()


def up(program=None, runtime=None):
    check_machine()
    programs.prepare()
    with alone():
        if whole():
            say("the lab is up already")
        else:
            remove()
            bring_up()
        if program:
            images.load_all(inside, pathlib.Path(program), pathlib.Path(runtime))


def bring_up():
    began = time.monotonic()
    LAB.mkdir(parents=True, mode=0o700)
    with open(LAB / "node.log", "wb") as log:
        subprocess.Popen(
            ["unshare", "--mount", "--net", "--pid", "--cgroup", "--uts", "--fork", "--kill-child", "--",
             "nice", "-n", "5", sys.executable, str(HERE / "node.py"), str(LAB)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment(), start_new_session=True,
            preexec_fn=enter_groups,
        )
    wait("the first process of the lab", lambda: first() or (LAB / "node.log").stat().st_size, 60, 0.1)
    if first() is None:
        raise LabError(f"the first process of the lab ended:\n{tail(LAB / 'node.log')}")

    def started():
        if first() is None:
            raise SystemExit(f"kubelab: the first process of the lab ended:\n{tail(LAB / 'node.log')}")
        return (LAB / "started").exists()

    wait("the API server (its log is kube-apiserver.log)", started, 300)
    wait("containerd", lambda: inside("ctr", "version").returncode == 0, 120)
    images.load_pause(inside)

    def ready():
        conditions = get("node", "lab")["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    wait("the node's condition Ready (its log is kubelet.log)", ready, 300)
    wait("the service account `default`", lambda: kubectl("get", "serviceaccount", "default").returncode == 0, 120)
    (LAB / "up").write_text("")
    say(f"the node is Ready after {time.monotonic() - began:.0f} s")


def down():
    with alone():
        remove()
        say("the lab is down")
