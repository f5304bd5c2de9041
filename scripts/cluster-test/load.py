"""The load of the step `survival`, run by a pod: `load.py reader|writer|verify`.

A line of JSON each second, and a last one after SIGTERM. Every operation that fails is counted with its errno. Of the
writer, EIO of `write`, `fsync` and `close` counts as reported loss: the server died with data that was not durable.
"""

import errno
import hashlib
import json
import os
import random
import signal
import sys
import time

ROOT = "/data/files"
START = int(time.time())
STOP = []
signal.signal(signal.SIGTERM, lambda *_: STOP.append(True))


class Counts:
    def __init__(self):
        self.done, self.errors, self.lost, self.slowest, self.told = 0, {}, 0, 0.0, 0.0

    def failed(self, what, error):
        key = f"{what}: {errno.errorcode.get(error.errno, error.errno)}"
        self.errors[key] = self.errors.get(key, 0) + 1

    def took(self, began):
        self.slowest = max(self.slowest, time.monotonic() - began)

    def tell(self, **more):
        if more or time.monotonic() - self.told >= 1:
            self.told = time.monotonic()
            line = {"done": self.done, "errors": self.errors, "lost": self.lost, "slowest": round(self.slowest, 2), **more}
            print(json.dumps(line), flush=True)


def bytes_of(name, count):
    """The content of one of the writer's files, as far as `count`."""
    return random.Random(name).randbytes(count)


def reader():
    """Reads through files that stay open and through ones that it opens; compares every byte with the first read."""
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(ROOT) for name in names)
    whole = {path: open(path, "rb").read() for path in paths}
    kept = {path: os.open(path, os.O_RDONLY) for path in paths[::2]}
    draw, counts = random.Random(1), Counts()
    while not STOP:
        path = draw.choice(paths)
        at, began = draw.randrange(len(whole[path]) + 1), time.monotonic()
        try:
            if path in kept and draw.random() < 0.5:
                found = os.pread(kept[path], 65_536, at)
            else:
                with open(path, "rb", buffering=0) as file:
                    found = os.pread(file.fileno(), 65_536, at)
                    # Else the kernel's cache answers all of them.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if found != whole[path][at : at + 65_536]:
                counts.errors["other bytes"] = counts.errors.get("other bytes", 0) + 1
            if draw.random() < 0.05:
                os.listdir(os.path.dirname(path))
        except OSError as error:
            counts.failed("read", error)
        counts.done += 1
        counts.took(began)
        counts.tell()
    counts.tell(ended=True)


def writer():
    """Appends to files, each record followed by fsync; `durable` has how far each file is."""
    draw, counts, durable, number = random.Random(2), Counts(), {}, 0
    while not STOP:
        name, number = f"log-{START}-{number:05}", number + 1
        path = os.path.join(ROOT, "open", name)
        stream, at = bytes_of(name, 1 << 20), 0
        began = time.monotonic()
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except OSError as error:
            counts.failed("open", error)
            continue
        try:
            while at < len(stream) and not STOP:
                began, end = time.monotonic(), min(at + draw.randrange(1, 65_536), len(stream))
                while at < end:
                    at += os.write(file, stream[at:end])
                os.fsync(file)
                durable[name] = at
                counts.done += 1
                counts.took(began)
                counts.tell()
        except OSError as error:
            counts.took(began)
            if error.errno == errno.EIO:
                counts.lost += 1
            else:
                counts.failed("write or fsync", error)
        try:
            os.close(file)
        except OSError as error:
            if error.errno != errno.EIO:
                counts.failed("close", error)
        counts.tell()
    counts.tell(ended=True, durable=durable)


def verify():
    """Compares the durable part of each file with what was written."""
    durable = json.load(open("/load/durable.json"))
    wrong = []
    for name, count in durable.items():
        with open(os.path.join(ROOT, "open", name), "rb") as file:
            found = file.read(count)
        if found != bytes_of(name, 1 << 20)[:count]:
            wrong.append([name, count, len(found), hashlib.md5(found).hexdigest()])
    print(json.dumps({"files": len(durable), "bytes": sum(durable.values()), "wrong": wrong}), flush=True)


{"reader": reader, "writer": writer, "verify": verify}[sys.argv[1]]()
