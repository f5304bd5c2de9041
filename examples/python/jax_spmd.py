"""Trains a classifier of digits with JAX, on any number of processes, and resumes after a crash.

python prepare.py
millrace train --script jax_spmd.py --nproc-per-node 2 --grace 5

Each global batch is one array over the devices of all processes. When a process dies, the launcher restarts all of them;
JAX does not end at SIGTERM, so --grace says how long the survivors may take. They go on from the last checkpoint. The script
counts each row that the weights have seen. Set DIE_AT=25 to let one process kill itself at step 25.
"""

import json
import os
import signal

import jax
import jax.numpy as jnp
import millrace
import millrace.jax
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATASET = "digits-python@v1:/train"
CHECKPOINT = "/jax/checkpoint.npz"
STEPS = 45


def loss_of(weights: dict, pixels: jax.Array, label: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(pixels / 16 @ weights["in"] + weights["in_bias"])
    odds = jax.nn.log_softmax(hidden @ weights["out"] + weights["out_bias"])
    return -jnp.mean(odds[jnp.arange(len(label)), label])


@jax.jit
def train_step(weights: dict, seen: jax.Array, batch: dict) -> tuple:
    loss, slopes = jax.value_and_grad(loss_of)(weights, batch["pixels"], batch["label"])
    weights = jax.tree.map(lambda value, slope: value - 0.5 * slope, weights, slopes)
    return weights, seen.at[batch["id"]].add(1), loss


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A process that waits for others longer than this ends, and the launcher starts a new round.
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", world, rank, initialization_timeout=60
    )
    mesh = Mesh(numpy.array(jax.devices()), ("rows",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Full batches without end: every device has the same number of rows.
    feed = millrace.Feed(
        DATASET, batch_rows=64, epochs=None, seed=7, rank=rank, world=world, columns=["id", "pixels", "label"]
    )
    random = numpy.random.default_rng(0)
    state = {
        "in": random.normal(0, 0.1, (64, 32)).astype("float32"),
        "in_bias": numpy.zeros(32, "float32"),
        "out": random.normal(0, 0.1, (32, 10)).astype("float32"),
        "out_bias": numpy.zeros(10, "float32"),
        # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
        "seen": numpy.zeros(1797, "int32"),
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
    # All processes have the same values.
    weights = {name: jax.device_put(value, everywhere) for name, value in state.items()}
    seen = weights.pop("seen")
    batches = millrace.jax.arrays(feed, sharding=NamedSharding(mesh, PartitionSpec("rows")))
    while step < STEPS:
        weights, seen, loss = train_step(weights, seen, next(batches))
        step += 1
        if step % 10 == 1 and rank == 0:
            print(f"step {step}: loss {float(loss):.3f}")
        if (step % 10 == 0 or step == STEPS) and rank == 0:
            state = {name: numpy.asarray(value) for name, value in {**weights, "seen": seen}.items()}
            with runs.open(CHECKPOINT, "wb") as out:
                numpy.savez(out, step=step, feed=json.dumps(feed.state_dict()), **state)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and rank == world - 1 and step == int(os.environ.get("DIE_AT", "0")):
            # JAX computes behind the loop.
            jax.block_until_ready(seen)
            os.kill(os.getpid(), signal.SIGKILL)
    total = numpy.asarray(seen)
    total = total[total > 0]
    assert len(total) == feed.rows and total.sum() == step * 64, "a row was lost"
    # The last batch has begun another epoch.
    assert total.max() - total.min() <= 1, "a row was repeated before its epoch"
    if rank == 0:
        print(f"{step} steps; each of {feed.rows} rows counts {total.min()} to {total.max()} times")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
