"""Trains a classifier of digits with mpi4py and NumPy, on any number of processes, and resumes after a crash.

python prepare.py
mpirun -n 2 python mpi_allreduce.py

When a process dies, mpirun ends the others. Start it again, with any number of processes: it goes on from the last
checkpoint. The script counts each row that the weights have seen. Set DIE_AT=25 to let one process kill itself at step 25.
"""

import json
import os
import signal

import millrace
import numpy
from mpi4py import MPI

DATASET = "digits-python@v1:/train"
CHECKPOINT = "/mpi/checkpoint.npz"
EPOCHS = 2


def main() -> None:
    rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    # The feed takes its rank from mpirun, too.
    feed = millrace.Feed(DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank="env", columns=["id", "pixels", "label"])
    weights = numpy.zeros((65, 10))
    # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
    seen = numpy.zeros(1797)
    runs, step, is_first = millrace.Volume("runs", create=True), 0, True
    try:
        with runs.open(CHECKPOINT) as file:
            stored = dict(numpy.load(file))
    except millrace.NotFoundError:
        pass
    else:
        step, is_first = int(stored["step"]), False
        weights, seen = stored["weights"], stored["seen"]
        feed.load_state_dict(json.loads(str(stored["feed"])))
    for batch in feed:
        step += 1
        count = numpy.bincount(batch["id"], minlength=1797)
        pixels = numpy.hstack([batch["pixels"] / 16, numpy.ones((len(batch["id"]), 1))])
        odds = numpy.exp(pixels @ weights)
        odds /= odds.sum(axis=1, keepdims=True)
        own = numpy.arange(len(odds)), batch["label"]
        loss = -numpy.log(odds[own]).sum()
        odds[own] -= 1
        # One message for the gradient, the loss and the rows.
        total = numpy.concatenate([(pixels.T @ odds).ravel(), [loss], count])
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)
        slope, loss, count = total[:650].reshape(65, 10), total[650], total[651:]
        weights -= 0.5 * slope / count.sum()
        seen += count
        if step % 10 == 1 and rank == 0:
            print(f"step {step}: loss {loss / count.sum():.3f}", flush=True)
        if step % 10 == 0 and rank == 0:
            with runs.open(CHECKPOINT, "wb") as out:
                numpy.savez(out, step=step, feed=json.dumps(feed.state_dict()), seen=seen, weights=weights)
        if is_first and rank == world - 1 and step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
    assert set(seen[seen > 0]) == {EPOCHS} and (seen > 0).sum() == feed.rows, "a row was lost or repeated"
    if rank == 0:
        print(f"{step} steps; each of {feed.rows} rows counts {EPOCHS} times")


if __name__ == "__main__":
    main()
