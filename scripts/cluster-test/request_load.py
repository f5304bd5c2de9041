"""The load of the step `serving`, run by a pod: `request_load.py HOST PORT PATH`.

Half of the clients open a connection for each request. The others keep theirs, and repeat a request once on a new
connection when a kept one was closed before any answer, as HTTP clients do: `reconnected` counts that. A line of
JSON each second, and a last one after SIGTERM. A request that does not get status 200 with 10 numbers counts as failed, with the reason.
"""

import http.client
import json
import signal
import sys
import threading
import time

HOST, PORT, PATH = sys.argv[1], int(sys.argv[2]), sys.argv[3]
BODY = json.dumps({"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]})
STOP = threading.Event()
LOCK = threading.Lock()
COUNTS = {"done": 0, "reconnected": 0, "errors": {}, "slowest": 0.0}
CLOSED = (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected)
signal.signal(signal.SIGTERM, lambda *_: STOP.set())


def ask(connection):
    connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        return connection, f"status {answer.status}: {content[:80]!r}"
    if len(json.loads(content)["outputs"][0]["data"]) != 10:
        return connection, "another output"
    # A server that drains says so.
    return (None if answer.will_close else connection), None


def ask_again(connection):
    """One request; a second attempt if the server has closed a connection that was kept."""
    is_kept = connection is not None
    connection = connection or http.client.HTTPConnection(HOST, PORT, timeout=60)
    try:
        return ask(connection)
    except CLOSED:
        connection.close()
        if not is_kept:
            raise
    with LOCK:
        COUNTS["reconnected"] += 1
    return ask(http.client.HTTPConnection(HOST, PORT, timeout=60))


def client(keeps):
    connection = None
    while not STOP.is_set():
        began, wrong = time.monotonic(), None
        try:
            connection, wrong = ask_again(connection)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection, wrong = None, f"{type(error).__name__}: {error}"
        if not keeps and connection:
            connection.close()
            connection = None
        with LOCK:
            COUNTS["done"] += 1
            COUNTS["slowest"] = round(max(COUNTS["slowest"], time.monotonic() - began), 2)
            if wrong:
                COUNTS["errors"][wrong] = COUNTS["errors"].get(wrong, 0) + 1
        time.sleep(0.01)


clients = [threading.Thread(target=client, args=(number % 2 == 1,)) for number in range(4)]
for thread in clients:
    thread.start()
while not STOP.wait(1):
    print(json.dumps(COUNTS), flush=True)
for thread in clients:
    thread.join()
print(json.dumps({**COUNTS, "ended": True}), flush=True)
