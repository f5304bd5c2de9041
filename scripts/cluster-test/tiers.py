"""Step `tiers`: pods of the chart's trainings on fake nodes with cards, by tier and priority.

kwok plays the kubelets of these nodes; API server and scheduler are real. kwok completes the pods of Jobs at once, so the
pods are made here, from the templates of the chart's Jobs.
"""

import json

import cluster
import images
import programs
import stores
from objects import CHART, RESTRICTED, find, namespace, secret
from paths import KUBECONFIG, LOGS, LabError

SPACE, RELEASE = "tiers", "tiers"
FAKE = "kwok.x-k8s.io/node"
A100, T4 = "NVIDIA-A100-SXM4-80GB", "Tesla-T4"
# Name, product and memory of each node with two cards.
CARDS = {"t4-0": (T4, 15360), "t4-1": (T4, 15360), "a100-0": (A100, 81920)}
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
JOB = """name = "digits"
dataset = "records@v1:/train"
features = "pixels"
label = "label"
model = { kind = "mlp", inputs = 64, hidden = [64], classes = 10 }
output = { volume = "models" }
device = "cuda"
"""


def node(name, product, memory):
    resources = {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "2"}
    labels = {"kubernetes.io/os": "linux", "nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(memory)}
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "annotations": {FAKE: "fake"}, "labels": labels},
        "spec": {"taints": [TAINT]}, "status": {"allocatable": resources, "capacity": resources},
    }


def training(tier, priority):
    return {"job": JOB, "gpuTier": tier, "priority": priority, "workers": 2, "tokenSecret": "training-token"}


def values():
    tolerations = [{"key": TAINT["key"], "operator": "Exists", "effect": TAINT["effect"]}]
    repository, tag = images.MILLRACE.rsplit(":", 1)
    return {
        **stores.shared("volumes", "volumes"),
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "gpuTiers": {
            "t4": {"products": [T4], "tolerations": tolerations},
            "large": {"memoryMiB": 40000, "tolerations": tolerations},
        },
        "priorities": {"low": {"value": 100}, "high": {"value": 10000, "preempts": True}},
        "training": {
            "old": training("t4", "low"), "fill": training("large", "low"), "urgent": training("large", "high"),
        },
    }


def rendered():
    """What the pods need of the chart's objects, and the template of the workers of each training."""
    version = f"--kube-version={programs.KUBERNETES}"
    command = ["helm", "-n", SPACE, "template", RELEASE, str(CHART), version, "--values=-"]
    text = cluster.inside(*command, text=json.dumps(values())).stdout
    listed = cluster.kubectl("-n", SPACE, "create", "--dry-run=client", "--output=json", "--filename=-", text=text).stdout
    # One JSON object follows the other.
    decoder, found = json.JSONDecoder(), []
    while listed := listed.strip():
        one, end = decoder.raw_decode(listed)
        found += one["items"] if one["kind"] == "List" else [one]
        listed = listed[end:]
    needed = [one for one in found if one["kind"] in ("PriorityClass", "ServiceAccount")]
    workers = {
        one["metadata"]["labels"]["millrace/training"]: one["spec"]["template"] for one in found
        if one["kind"] == "Job" and one["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    }
    return needed, workers


def made(name, template):
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name, "namespace": SPACE},
        "spec": template["spec"],
    }


def place(name):
    """The node of a running pod, None before."""
    found = find("pod", name, SPACE)
    running = found and found["status"].get("phase") == "Running" and "deletionTimestamp" not in found["metadata"]
    return found["spec"]["nodeName"] if running else None


def start(template, *names):
    """Makes pods, and returns the kinds of their nodes once they run."""
    cluster.apply(*(made(name, template) for name in names))
    return [cluster.wait(f"the pod {name}", lambda name=name: place(name), 60, 0.2).split("-")[0] for name in names]


def refusal(name):
    """Why the scheduler has no node for a pod."""
    def told():
        conditions = find("pod", name, SPACE)["status"].get("conditions") or []
        return next((c["message"] for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), None)

    return cluster.wait(f"the scheduler's refusal of {name}", told, 60, 0.2)


def expect(what, found, expected):
    if found != expected:
        raise LabError(f"{what}: {found} instead of {expected}")


def check(report, workers):
    expect("nodes of low priority on T4", start(workers["old"], *(f"old-{i}" for i in range(4))), ["t4"] * 4)
    expect("nodes of low priority on A100", start(workers["fill"], "fill-0", "fill-1"), ["a100"] * 2)
    report("low priority: 4 workers on the cards of two T4 nodes, 2 on those of one A100 node")
    cluster.apply(made("old-4", workers["old"]))
    report(f"a fifth of low priority waits: {refusal('old-4')}")
    expect("node of high priority", start(workers["urgent"], "urgent-0"), ["a100"])
    left = {name for name in ("fill-0", "fill-1") if place(name)}
    expect("workers of low priority that are left on A100", len(left), 1)
    expect("workers of low priority on T4", sum(place(f"old-{i}") is not None for i in range(4)), 4)
    report("high priority took a card of the A100 node from one of low priority; those on T4 go on")
    # Without its tier the same pod tolerates no card's node and asks for none: the real node takes it.
    bare = json.loads(json.dumps(workers["old"]))
    for key in ("affinity", "tolerations"):
        bare["spec"].pop(key)
    cluster.apply(made("bare", bare))
    if "taint" not in (told := refusal("bare")):
        raise LabError(f"a pod without tolerations was not refused for the taint of the cards: {told}")
    report("a worker without the tier's placement finds no node")


def run(report, _given):
    # Nodes are kept Ready by kwok alone, so it lives as long as the step.
    with open(LOGS / "kwok.log", "wb") as log:
        kwok = cluster.start(
            "kwok", f"--kubeconfig={KUBECONFIG}", "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={FAKE}=fake", stdout=log, stderr=log,
        )
    try:
        cluster.apply(namespace(SPACE, RESTRICTED), *(node(name, *card) for name, card in CARDS.items()))
        cluster.wait("the service account", lambda: find("serviceaccount", "default", SPACE))
        cluster.apply(secret("training-token", SPACE, token="0123456789abcdef0123456789abcdef"))
        needed, workers = rendered()
        cluster.apply(*needed)
        check(report, workers)
    finally:
        # kwok also ends the pods.
        cluster.kubectl("delete", "namespace", SPACE, "--ignore-not-found", "--timeout=60s", check=False)
        cluster.kubectl("delete", "node", *CARDS, "--ignore-not-found", check=False)
        kwok.terminate()
        kwok.wait(30)
