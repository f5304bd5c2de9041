"""Folders of the lab, and how it reports a failure."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Programs, kept between runs. LAB holds one running cluster and goes with it.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "millrace/kube"
BIN = CACHE / "bin"
DEBIAN = CACHE / "debian"
LAB = CACHE / "lab"
LOGS = LAB / "logs"
KUBECONFIG = LAB / "kubeconfig"


class LabError(Exception):
    """What was attempted, what is wrong, what to do."""


def say(text):
    print(f"kubelab: {text}", file=sys.stderr, flush=True)


def tail(path, lines=15):
    """The last lines of a log, for an error."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return f"(no {path.name})"
