"""A cluster with a real kubelet on this machine.

    python3 scripts/kubelab up [--program P --runtime R]    a node; with a program also its images
    python3 scripts/kubelab kubectl ARGUMENT...             also helm, ctr and sh
    python3 scripts/kubelab down
"""

import argparse
import os
import sys

import cluster
from paths import LabError

COMMANDS = ("kubectl", "helm", "ctr", "sh")


def main():
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        process = cluster.start(*sys.argv[1:])
        sys.exit(process.wait())
    parser = argparse.ArgumentParser(prog="kubelab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("up")
    one.add_argument("--program", help="the built millrace")
    one.add_argument("--runtime", default=os.environ.get("ORT_DYLIB_PATH"), help="libonnxruntime.so")
    commands.add_parser("down")
    given = parser.parse_args()
    if getattr(given, "program", None) and not given.runtime:
        parser.error("name ONNX Runtime with --runtime or ORT_DYLIB_PATH")
    try:
        if given.command == "up":
            cluster.up(given.program, given.runtime)
        else:
            cluster.down()
    except LabError as error:
        sys.exit(f"kubelab: {error}")


main()
