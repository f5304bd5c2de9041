"""Step `training`: a Job whose workers share only PostgreSQL and S3, and come and go, against a run of one worker."""

import json
import re

import cluster
import stores
from objects import RESTRICTED, find, helm, listed, logs, namespace, secret
from paths import ROOT, LabError

SPACE, NAME = "training", "digits"
RECORDS = ROOT / "examples/digits/digits.jsonl"
STEP = re.compile(r"/(\d{12})$")
# The run must outlast the events below on an idle machine.
EPOCHS = 3000
# Numbers of workers, one after the other.
CHANGES = (4, 1, 2)
SMALL = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}


def job(volume, more="", dataset="records"):
    return f"""name = "{NAME}"
dataset = "{dataset}@v1:/train"
features = "pixels"
label = "label"
model = {{ kind = "mlp", inputs = 64, hidden = [64], classes = 10 }}
output = {{ volume = "{volume}" }}
batch_rows = 64
virtual_shards = 6
epochs_max = {EPOCHS}
checkpoint_every_steps = 500
{more}"""


def dataset(name, volumes):
    """Records of a topic in a volume, with a snapshot, and volumes for models."""
    path = stores.put("digits.jsonl", RECORDS.read_bytes())
    stores.millrace("produce", name, path)
    stores.millrace("ingest", "--topic", name, "--volume", name, "--path", "train")
    stores.millrace("snapshot", "create", f"{name}@v1")
    for volume in volumes:
        stores.millrace("volume", "create", volume)


def upgrade(verb, workers):
    training = {NAME: {
        "job": job("models"), "workers": workers, "standbys": 1, "tokenSecret": "training-token", "resources": SMALL,
        "coordinatorResources": SMALL,
    }}
    helm(verb, "training", SPACE, {**stores.shared("volumes", "volumes"), "training": training})


def pods(part):
    found = listed("pods", SPACE, f"app.kubernetes.io/component={part}")
    return {pod["metadata"]["name"]: pod for pod in found}


def running(part):
    def runs(pod):
        return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]

    return {name for name, pod in pods(part).items() if runs(pod)}


def step():
    """The newest checkpoint's step, 0 without one."""
    found = stores.millrace("ls", "-r", "models:/checkpoints", check=False)
    return max((int(match[1]) for line in found.splitlines() if (match := STEP.search(line))), default=0)


def go_on(why, report):
    """Waits for a checkpoint that is newer than this call."""
    before = step()
    cluster.wait(f"a checkpoint after {why}", lambda: step() > before, 300)
    if all(is_complete(name) for name in jobs()):
        raise LabError(f"the training ended before {why}: give it more epochs")
    report(f"{why}: goes on, with a checkpoint of step {step()}")


def kill(name):
    """SIGKILL for the only process of a pod."""
    container = pods("worker")[name]["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    cluster.inside("ctr", "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container)


def jobs():
    return [found["metadata"]["name"] for found in listed("jobs", SPACE, f"millrace/training={NAME}")]


def is_complete(name):
    conditions = find("job", name, SPACE)["status"].get("conditions") or []
    if any(c["type"] == "Failed" and c["status"] == "True" for c in conditions):
        raise SystemExit(f"cluster-test: the job {name} failed: {conditions}")
    return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)


def leader():
    """The coordinator that listens, None while none or several say so."""
    found = [name for name in running("coordinator") if "workers of other machines join with" in logs(name, SPACE)]
    return found[0] if len(found) == 1 else None


def bundle(volume):
    names = stores.millrace("ls", f"{volume}:/models/{NAME}/1").splitlines()
    return {name.split()[-1]: stores.digest(f"{volume}:/models/{NAME}/1/{name.split()[-1]}") for name in names}


def run(report, _given):
    dataset("records", ["reference", "models"])
    cluster.apply(namespace(SPACE, RESTRICTED))
    cluster.wait("the service account", lambda: find("serviceaccount", "default", SPACE))
    cluster.apply(*stores.secrets(SPACE), secret("training-token", SPACE, token="0123456789abcdef0123456789abcdef"))
    path = stores.put("plain.toml", job("reference", "workers = 1\n").encode())
    plain = json.loads(stores.millrace("train", path, "--json", timeout=600).splitlines()[-1])
    report(f"one worker: {plain['steps']} steps in {plain['seconds']:.0f} s, sha256 {plain['model_sha256'][:16]}")
    upgrade("install", 3)
    cluster.wait("three workers", lambda: len(running("worker")) == 3)
    go_on("three workers and two coordinators started", report)
    victim = sorted(running("worker"))[0]
    kill(victim)
    cluster.wait("the replacement of the killed worker", lambda: len(running("worker") - {victim}) == 3)
    go_on("a worker was killed and replaced", report)
    for workers in CHANGES:
        upgrade("upgrade", workers)
        cluster.wait(f"{workers} workers", lambda workers=workers: len(running("worker")) == workers)
        go_on(f"helm upgrade to {workers} worker{'s' * (workers > 1)}", report)
    chosen = cluster.wait("a leading coordinator", leader)
    cluster.kubectl("-n", SPACE, "delete", "pod", chosen, "--wait=false")
    cluster.wait("another leading coordinator", lambda: (found := leader()) and found != chosen)
    go_on("the leading coordinator's pod was deleted", report)
    cluster.wait("the end of the training", lambda: all(is_complete(name) for name in jobs()), 900)
    expected, found = bundle("reference"), bundle("models")
    report(f"both Jobs are complete; files of the bundle: {', '.join(sorted(found))}")
    if found["model.onnx"] != expected["model.onnx"]:
        raise LabError(f"the model differs from that of one worker: {found} and {expected}")
    same = sorted(name for name in found if found[name] == expected.get(name))
    report(f"equal bit for bit to the run of one worker: {', '.join(same)}")
