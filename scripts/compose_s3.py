#!/usr/bin/env python3
"""The stand-in of an S3 server for scripts/compose-test: moto, whose objects survive the end of its process.

    compose_s3.py FOLDER PORT

moto keeps objects in memory. Every request that changes something is appended to FOLDER/requests before its answer, and a
start repeats these requests on a local port before the server listens for others. Uploads in parts are not repeated: their
numbers differ in each process.
"""

import os
import pathlib
import signal
import sys
import threading

# The first process of a container ignores signals that it does not handle.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
requests = folder / "requests"
requests.touch()
os.environ["MOTO_RECORDER_FILEPATH"] = str(requests)

from moto import moto_api  # noqa: E402
from moto.moto_api._internal.recorder.models import Recorder  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

lock = threading.Lock()
record = Recorder._record_request


def record_change(self, request, body=None):
    """Records a request that changes something; requests of other threads do not mix with it."""
    if request.method in ("PUT", "POST", "DELETE"):
        with lock:
            record(self, request, body)


Recorder._record_request = record_change
replay = ThreadedMotoServer(ip_address="127.0.0.1", port=port + 1, verbose=False)
replay.start()
moto_api.recorder.replay_recording(target_host=f"http://127.0.0.1:{port + 1}")
replay.stop()
moto_api.recorder.start_recording()
print("repeated", len(requests.read_text().splitlines()), "requests", flush=True)
ThreadedMotoServer(ip_address="0.0.0.0", port=port, verbose=False).start()
threading.Event().wait()
