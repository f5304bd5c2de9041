"""PostgreSQL and the S3 server of the lab, and a pod with the program beside them."""

import json
import sys

import cluster
import images
from objects import SYSTEM, await_pod, config_map, execute, namespace, pod, secret
from paths import LAB

PASSWORD, KEY = "lab-password", "lab-key-of-the-store"
HOST = f"{SYSTEM}.svc.cluster.local"
TOOLS = "tools"


def shared(schema, prefix):
    """Values of the chart that say where metadata and file data are."""
    return {
        "database": {
            "url": f"postgres://millrace@postgres.{HOST}:5432/meta", "schema": schema,
            "passwordSecret": {"name": "millrace-database"},
        },
        "store": {
            "url": f"s3://millrace/{prefix}",
            "options": {"endpoint": f"http://s3.{HOST}:9000", "allow_http": "true", "region": "us-east-1"},
            "credentialsSecret": {"name": "millrace-bucket"},
        },
    }


def secrets(space):
    return [
        secret("millrace-database", space, password=PASSWORD),
        secret("millrace-bucket", space, **{"access-key-id": "lab", "secret-access-key": KEY}),
    ]


def service(name, port):
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": SYSTEM},
        "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
    }


def configuration(schema, prefix):
    values = shared(schema, prefix)
    options = "\n".join(f'{key} = "{value}"' for key, value in values["store"]["options"].items())
    return f"""[datafs]
meta_url = "{values["database"]["url"]}"
meta_schema = "{schema}"
store_url = "{values["store"]["url"]}"
[datafs.store_options]
{options}
"""


def start(schema, prefix):
    """Starts the stores, makes the bucket, and starts the pod `tools` with a home on both."""
    data = {"name": "data", "mountPath": "/data"}
    empty = {"name": "data", "emptyDir": {}}
    env = [
        {"name": "PGPASSWORD", "value": PASSWORD}, {"name": "AWS_ACCESS_KEY_ID", "value": "lab"},
        {"name": "AWS_SECRET_ACCESS_KEY", "value": KEY}, {"name": "MILLRACE_HOME", "value": "/data/home"},
        {"name": "MILLRACE_CONFIG", "value": "/config/millrace.toml"},
    ]
    cluster.apply(namespace(SYSTEM))
    cluster.wait(
        "the service account of the namespace",
        lambda: cluster.kubectl("-n", SYSTEM, "get", "serviceaccount", "default").returncode == 0,
    )
    cluster.apply(
        *secrets(SYSTEM), service("postgres", 5432), service("s3", 9000),
        pod("postgres", SYSTEM, images.POSTGRES, ["/bin/sh", "/start"], [data], [empty], user=10001,
            env=[{"name": "POSTGRES_PASSWORD", "value": PASSWORD}], memory="1Gi"),
        {**pod("s3", SYSTEM, images.S3, [], user=10001, memory="4Gi")},
        config_map("tools", SYSTEM, {"millrace.toml": configuration(schema, prefix)}),
        pod(TOOLS, SYSTEM, images.MILLRACE, ["sleep", "1000000"],
            [data, {"name": "config", "mountPath": "/config"}],
            [empty, {"name": "config", "configMap": {"name": "tools"}}], user=10001, env=env, memory="2Gi"),
    )
    for name in ("postgres", "s3", TOOLS):
        await_pod(name, SYSTEM)
    address = cluster.get("-n", SYSTEM, "service", "s3")["spec"]["clusterIP"]
    put = (
        "import urllib.request as r; r.urlopen(r.Request("
        f"'http://{address}:9000/millrace', method='PUT', headers={{'Authorization': 'AWS lab:lab'}}), timeout=10)"
    )
    cluster.wait("the bucket", lambda: cluster.inside(sys.executable, "-c", put).returncode == 0)
    # PostgreSQL accepts connections some time after its pod has started.
    cluster.wait("an answer of the metadata", lambda: millrace("volume", "list", "--json") is not None)


def millrace(*arguments, timeout=300, check=True):
    """Runs the program in the pod `tools`."""
    return execute(TOOLS, SYSTEM, "millrace", *arguments, timeout=timeout, check=check)


def digest(spec):
    """The SHA-256 of a file of a volume."""
    millrace("cp", spec, "/data/read")
    text = execute(TOOLS, SYSTEM, "sha256sum", "/data/read")
    execute(TOOLS, SYSTEM, "rm", "/data/read")
    return text.split()[0]


def put(name, content):
    """Writes a file into `/data` of the pod `tools`. Long input of `kubectl exec` arrives cut off."""
    uid = cluster.get("-n", SYSTEM, "pod", TOOLS)["metadata"]["uid"]
    path = LAB / "var-lib/kubelet/pods" / uid / "volumes/kubernetes.io~empty-dir/data" / name
    path.write_bytes(content)
    path.chmod(0o644)
    return f"/data/{name}"


def rows(*arguments):
    """JSON lines of the program."""
    return [json.loads(line) for line in millrace(*arguments, "--json").splitlines()]
