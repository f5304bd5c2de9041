"""Images for the lab, written without a container engine: a tar of files, a configuration, `ctr images import`.

A program comes with the libraries that its loader names. Nothing is pulled: the images carry files of this machine.
"""

import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile

from paths import CACHE, DEBIAN, LAB, LabError, say

MILLRACE, POSTGRES, S3, PAUSE, BUSYBOX = (
    f"localhost/kubelab/{name}:1" for name in ("millrace", "postgres", "s3", "pause", "busybox")
)
# Also a second tag of the program: an upgrade to "another version" that is the same program.
MILLRACE_NEXT = "localhost/kubelab/millrace:2"
# `test` is what the probes of the chart run.
APPLETS = (
    "base64", "cat", "chmod", "find", "head", "kill", "ls", "md5sum", "mkdir", "mount", "rm", "sh", "sha256sum", "sleep",
    "sync", "tail", "tar", "test", "wget",
)
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


class Layer:
    """Files of an image."""

    def __init__(self):
        self.data = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.data, mode="w", format=tarfile.PAX_FORMAT)
        self.seen = set()
        for folder in ("usr/lib", "usr/lib64", "usr/bin", "usr/sbin"):
            self.folder(folder)
        for link in ("lib", "lib64", "bin", "sbin"):
            self.link(link, f"usr/{link}")
        self.folder("tmp", 0o1777)
        self.text("etc/passwd", "root:x:0:0::/:/bin/sh\nmillrace:x:10001:10001::/var/lib/millrace:/bin/sh\n")
        self.text("etc/group", "root:x:0:\nmillrace:x:10001:\n")
        self.text("etc/nsswitch.conf", "hosts: files dns\n")
        self.file(busybox(), "usr/bin/busybox")
        for applet in APPLETS:
            self.link(f"usr/bin/{applet}", "busybox")

    def add(self, entry, content=None):
        if entry.name in self.seen:
            return
        for parent in reversed(pathlib.PurePath(entry.name).parents):
            if str(parent) != ".":
                self.folder(str(parent))
        self.seen.add(entry.name)
        self.tar.addfile(entry, content)

    def folder(self, name, mode=0o755, owner=0):
        if name not in self.seen:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
            self.add(entry)

    def link(self, name, target):
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self.add(entry)

    def text(self, name, text):
        entry = tarfile.TarInfo(name)
        content = text.encode()
        entry.size, entry.mode = len(content), 0o644
        self.add(entry, io.BytesIO(content))

    def file(self, source, name):
        source = pathlib.Path(source)
        entry = tarfile.TarInfo(usr(name))
        entry.size, entry.mode = source.stat().st_size, 0o755 if os.access(source, os.X_OK) else 0o644
        with open(source, "rb") as content:
            self.add(entry, content)

    def program(self, source, name=None):
        """A program or library, with the libraries that it needs."""
        self.file(source, (name or str(source)).lstrip("/"))
        answer = subprocess.run(["ldd", str(source)], capture_output=True, text=True, check=False)
        for library in LIBRARY.findall(answer.stdout):
            self.file(library, library.lstrip("/"))

    def tree(self, source, name=None, without=("__pycache__",), programs=False):
        """A folder; links inside stay links."""
        source = pathlib.Path(source)
        name = usr((name or str(source)).lstrip("/"))
        for folder, folders, files in os.walk(source):
            folders[:] = [entry for entry in folders if entry not in without]
            inner = os.path.relpath(folder, source)
            place = name if inner == "." else f"{name}/{inner}"
            for entry in files + [f for f in folders if os.path.islink(f"{folder}/{f}")]:
                path = f"{folder}/{entry}"
                if os.path.islink(path) and not os.path.isabs(os.readlink(path)):
                    self.link(f"{place}/{entry}", os.readlink(path))
                elif os.path.isfile(path):
                    if programs and (".so" in entry or os.access(path, os.X_OK)):
                        self.program(path, f"{place}/{entry}")
                    else:
                        self.file(path, f"{place}/{entry}")

    def bytes(self):
        self.tar.close()
        return self.data.getvalue()


def usr(name):
    """/lib and its like are links into /usr."""
    return f"usr/{name}" if name.split("/")[0] in ("lib", "lib64", "bin", "sbin") else name


def busybox():
    return next(path for path in (DEBIAN / "bin/busybox", DEBIAN / "usr/bin/busybox") if path.exists())


def load(inside, tags, layer, entrypoint, user="0", env=(), command=()):
    """Writes an archive as `docker save` does, and gives it to containerd."""
    content = layer.bytes()
    config = json.dumps({
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine], "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Cmd": list(command), "User": user,
                   "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", *env]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(content).hexdigest()]},
        "history": [{"created_by": "kubelab"}],
    }).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": list(tags), "Layers": ["layer.tar"]}]).encode()
    with tempfile.NamedTemporaryFile(dir=LAB, suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for member, data in ((name, config), ("layer.tar", content), ("manifest.json", manifest)):
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        file.flush()
        inside("ctr", "-n", "k8s.io", "images", "import", file.name, timeout=300)


def load_pause(inside):
    layer = Layer()
    layer.text("pause", "trap 'exit 0' TERM INT; while :; do sleep 100000 & wait; done\n")
    load(inside, [PAUSE], layer, ["/bin/sh", "/pause"], user="65535")
    load(inside, [BUSYBOX], Layer(), ["/bin/sh"], user="10001")


def load_all(inside, program, runtime):
    """Images of the program, of PostgreSQL and of the S3 server."""
    for path, what in ((program, "the program"), (runtime, "ONNX Runtime")):
        if not path.is_file():
            raise LabError(f"{what} is not at {path}: name the built file")
    say("making the images")
    load_millrace(inside, program, runtime)
    load_postgres(inside)
    load_s3(inside)


def load_millrace(inside, program, runtime):
    # As deploy/Dockerfile: the stripped program, ONNX Runtime where it looks first, a user without rights.
    layer = Layer()
    with tempfile.TemporaryDirectory(dir=LAB) as folder:
        stripped = f"{folder}/millrace"
        subprocess.run(["strip", "-o", stripped, program], check=True)
        os.chmod(stripped, 0o755)
        layer.program(stripped, "usr/local/bin/millrace")
    layer.program(runtime, "usr/local/bin/onnxruntime/libonnxruntime.so")
    fusermount = shutil.which("fusermount3")
    if fusermount:
        layer.program(fusermount, "usr/bin/fusermount3")
    certificates = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        layer.file(certificates, "etc/ssl/certs/ca-certificates.crt")
    layer.folder("var/lib/millrace", 0o700, 10001)
    load(inside, [MILLRACE, MILLRACE_NEXT], layer, ["/usr/local/bin/millrace"], user="10001:10001", command=["up"],
         env=["MILLRACE_HOME=/var/lib/millrace", "MILLRACE_LOG=info"])


def load_postgres(inside):
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        raise LabError("PostgreSQL is missing: install the package postgresql and run again")
    home = found[-1].parent.parent
    layer = Layer()
    layer.tree(home, programs=True, without=("__pycache__", "bitcode", "pgxs"))
    layer.tree(pathlib.Path("/usr/share/postgresql") / home.name, without=("man", "extension", "tsearch_data"))
    layer.tree("/usr/share/postgresql" + f"/{home.name}/tsearch_data")
    for control in pathlib.Path(f"/usr/share/postgresql/{home.name}/extension").glob("plpgsql*"):
        layer.file(control, str(control).lstrip("/"))
    layer.tree("/usr/share/zoneinfo")
    layer.text("start", f"""set -e
data=/data/postgres
if [ ! -e $data/PG_VERSION ]; then
  printf '%s' "$POSTGRES_PASSWORD" >/tmp/password
  {home}/bin/initdb --pgdata=$data --username=millrace --pwfile=/tmp/password --auth=scram-sha-256 --no-sync --locale=C
  echo 'host all all all scram-sha-256' >>$data/pg_hba.conf
  printf 'CREATE DATABASE meta;\\n' | {home}/bin/postgres --single -D $data postgres
fi
exec {home}/bin/postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/tmp -c fsync=off -c max_connections=200
""")
    load(inside, [POSTGRES], layer, ["/bin/sh", "/start"], user="10001:10001")


def load_s3(inside):
    # moto on Debian's Python. It keeps objects in memory: they end with its pod.
    layer = Layer()
    python = pathlib.Path("/usr/bin/python3").resolve()
    layer.program(python)
    layer.tree(f"/usr/lib/{python.name}", programs=True, without=("__pycache__", "test", "idlelib", "tkinter"))
    layer.tree(CACHE / "moto", "opt/moto", programs=True, without=("__pycache__", "data", "tests", "examples"))
    for service in ("s3",):
        data = CACHE / "moto/botocore/data" / service
        layer.tree(data, f"opt/moto/botocore/data/{service}")
    for name in ("endpoints.json", "partitions.json", "_retry.json", "sdk-default-configuration.json"):
        path = CACHE / "moto/botocore/data" / name
        if path.exists():
            layer.file(path, f"opt/moto/botocore/data/{name}")
    layer.link("usr/bin/python3", python.name)
    start = "import sys; from moto.server import main; main(sys.argv[1:])"
    load(inside, [S3], layer, ["/usr/bin/python3", "-c", start], user="10001:10001",
         command=["--host", "0.0.0.0", "--port", "9000"], env=["PYTHONPATH=/opt/moto", "PYTHONDONTWRITEBYTECODE=1"])
