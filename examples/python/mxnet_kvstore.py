"""Trains a classifier of digits with MXNet's parameter server, on any number of processes, and resumes after a crash.

python prepare.py
millrace train --script mxnet_kvstore.py --framework mxnet --nproc-per-node 2 --servers 1

The launcher sets DMLC_* and starts a scheduler and servers with this script; the import of MXNet keeps them until the workers
are done. When a process dies, the launcher restarts all of them, and they go on from the last checkpoint. The script counts
each row that the weights have seen. Set DIE_AT=25 to let one process kill itself at step 25.
"""

import json
import os
import signal

import millrace
import mxnet
import numpy

DATASET = "digits-python@v1:/train"
CHECKPOINT = "/mxnet/checkpoint.npz"
EPOCHS = 2


def main() -> None:
    store = mxnet.kv.create("dist_sync")
    rank, world = store.rank, store.num_workers
    feed = millrace.Feed(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank=rank, world=world, columns=["id", "pixels", "label"]
    )
    random = numpy.random.default_rng(0)
    state = {
        "in": random.normal(0, 0.1, (64, 32)).astype("float32"),
        "in_bias": numpy.zeros(32, "float32"),
        "out": random.normal(0, 0.1, (32, 10)).astype("float32"),
        "out_bias": numpy.zeros(10, "float32"),
        # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
        "seen": numpy.zeros(1797, "float32"),
    }
    runs, step = millrace.Volume("runs", create=True), 0
    try:
        with runs.open(CHECKPOINT) as file:
            stored = dict(numpy.load(file))
    except millrace.NotFoundError:
        pass
    else:
        step = int(stored.pop("step"))
        feed.load_state_dict(json.loads(str(stored.pop("feed"))))
        state = stored
    seen = state.pop("seen")
    weights = {name: mxnet.nd.array(value) for name, value in state.items()}
    for weight in weights.values():
        weight.attach_grad()
    # Without an optimizer, the server keeps the sum of what the workers have pushed last.
    sums = {**weights, "count": mxnet.nd.zeros(1798)}
    for key, value in sums.items():
        store.init(key, value)

    def total_of(key: str, value: mxnet.nd.NDArray) -> mxnet.nd.NDArray:
        store.push(key, value)
        total = mxnet.nd.zeros(value.shape)
        store.pull(key, out=total)
        return total

    for batch in feed:
        step += 1
        # The rows of this part by id, and its loss.
        count = numpy.bincount(batch["id"], minlength=1798).astype("float32")
        pixels, label = mxnet.nd.array(batch["pixels"] / 16), mxnet.nd.array(batch["label"])
        with mxnet.autograd.record():
            hidden = mxnet.nd.relu(mxnet.nd.dot(pixels, weights["in"]) + weights["in_bias"])
            odds = mxnet.nd.log_softmax(mxnet.nd.dot(hidden, weights["out"]) + weights["out_bias"])
            losses = -mxnet.nd.pick(odds, label).sum()
        losses.backward()
        count[1797] = losses.asscalar()
        count = total_of("count", mxnet.nd.array(count)).asnumpy()
        rows = float(count[:1797].sum())
        for name, weight in weights.items():
            weight -= 0.5 / rows * total_of(name, weight.grad)
        seen = seen + count[:1797]
        if step % 10 == 1 and rank == 0:
            print(f"step {step}: loss {count[1797] / rows:.3f}")
        if step % 10 == 0 and rank == 0:
            values = {name: weight.asnumpy() for name, weight in weights.items()}
            with runs.open(CHECKPOINT, "wb") as out:
                numpy.savez(out, step=step, feed=json.dumps(feed.state_dict()), seen=seen, **values)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and rank == world - 1 and step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
    assert set(seen[seen > 0]) == {EPOCHS} and (seen > 0).sum() == feed.rows, "a row was lost or repeated"
    if rank == 0:
        print(f"{step} steps; each of {feed.rows} rows counts {EPOCHS} times")


if __name__ == "__main__":
    main()
