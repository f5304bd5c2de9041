"""The chart on the real kubelet of scripts/kubelab: volumes in pods, survival, training, serving, upgrade, tiers.

    python3 scripts/cluster-test --program P --runtime R [--kills N] [--keep] [STEP...]

Starts a new lab, runs the steps in their order, prints a line for each result, and ends the lab. All images are made from
files of this machine. Without PostgreSQL's programs, root or the other needs of scripts/kubelab it fails and says so.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "kubelab"))

import cluster  # noqa: E402
import serving  # noqa: E402
import stores  # noqa: E402
import survival  # noqa: E402
import tiers  # noqa: E402
import training  # noqa: E402
import volumes  # noqa: E402
from objects import SYSTEM  # noqa: E402
from paths import LabError  # noqa: E402

STEPS = {
    "volumes": volumes.run, "survival": survival.run, "training": training.run, "serving": serving.run,
    "tiers": tiers.run,
}


def stopped(*_):
    raise SystemExit("cluster-test: stopped by a signal")


def explain():
    """What a reader needs after a failure."""
    print(cluster.kubectl("get", "pods", "-A", "--output=wide", check=False).stdout, file=sys.stderr)
    for name in (volumes.HOLDER, volumes.NODE):
        text = cluster.kubectl("-n", SYSTEM, "logs", f"daemonset/{name}", "--tail=40", check=False).stdout
        print(f"--- {name}\n{text}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(
        prog="cluster-test", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--program", required=True, help="the built millrace")
    parser.add_argument("--runtime", default=os.environ.get("ORT_DYLIB_PATH"), help="libonnxruntime.so")
    parser.add_argument("--kills", type=int, default=10, help="kills of each mount's server (default: 10)")
    parser.add_argument("--keep", action="store_true", help="leave the lab up; `scripts/kubelab down` ends it")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"default: all of {', '.join(STEPS)}")
    given = parser.parse_args()
    if not given.runtime:
        parser.error("name ONNX Runtime with --runtime or ORT_DYLIB_PATH")
    unknown = sorted(set(given.steps) - set(STEPS))
    if unknown:
        parser.error(f"no step has the name {unknown[0]}; the steps are {', '.join(STEPS)}")
    chosen = [name for name in STEPS if name in (given.steps or STEPS)]
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    began = time.monotonic()
    try:
        cluster.down()
        cluster.up(given.program, given.runtime)
        stores.start("volumes", "volumes")
        for name in chosen:
            STEPS[name](lambda text, name=name: print(f"{time.monotonic() - began:5.0f} s  {name}: {text}", flush=True), given)
            print(f"{time.monotonic() - began:5.0f} s  {name}: PASSED", flush=True)
    except LabError as error:
        # Without a lab there is nothing to show.
        with contextlib.suppress(LabError):
            explain()
        sys.exit(f"cluster-test: {error}")
    finally:
        if not given.keep:
            cluster.down()


main()
