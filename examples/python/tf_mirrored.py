"""Trains a classifier of digits with TensorFlow's MultiWorkerMirroredStrategy, and resumes after a crash.

python prepare.py
millrace train --script tf_mirrored.py --framework tensorflow --nproc-per-node 2

The launcher sets TF_CONFIG. When a process dies, it restarts all of them with other ports, and they go on from the last
checkpoint. The script counts each row that the weights have seen. Set DIE_AT=25 to let one process kill itself at step 25.
"""

import json
import os
import signal

import millrace
import millrace.tf
import numpy
import tensorflow as tf

DATASET = "digits-python@v1:/train"
CHECKPOINT = "/tensorflow/checkpoint.npz"
EPOCHS = 2


def main() -> None:
    # The first thing that TensorFlow does: it starts the servers of the cluster.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = strategy.cluster_resolver.task_id
    workers = strategy.num_replicas_in_sync
    feed = millrace.Feed(
        DATASET, batch_rows=64, epochs=EPOCHS, seed=7, rank=task, world=workers, columns=["id", "pixels", "label"]
    )
    random = numpy.random.default_rng(0)
    state = {
        "in": random.normal(0, 0.1, (64, 32)).astype("float32"),
        "in_bias": numpy.zeros(32, "float32"),
        "out": random.normal(0, 0.1, (32, 10)).astype("float32"),
        "out_bias": numpy.zeros(10, "float32"),
        # How often each row is counted in the weights, by its id: the training rows of the first 1,797.
        "seen": numpy.zeros(1797, "int64"),
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
    with strategy.scope():
        weights = {name: tf.Variable(value, name=name) for name, value in state.items()}

    @tf.function(reduce_retracing=True)
    def train_step(batch: dict) -> tuple:
        def replica(batch: dict) -> tuple:
            context = tf.distribute.get_replica_context()
            count = tf.scatter_nd(batch["id"][:, None], tf.ones_like(batch["id"]), [1797])
            count = context.all_reduce("sum", count)
            rows = tf.cast(tf.reduce_sum(count), tf.float32)
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(batch["pixels"] / 16 @ weights["in"] + weights["in_bias"])
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.cast(batch["label"], tf.int64), hidden @ weights["out"] + weights["out_bias"]
                )
                # Gradients are added over processes: each has its part of the mean over the whole batch.
                part = tf.reduce_sum(losses) / rows
            slopes = context.all_reduce("sum", tape.gradient(part, list(weights.values())))
            for weight, slope in zip(weights.values(), slopes):
                weight.assign_sub(0.5 * slope)
            return context.all_reduce("sum", part), count

        loss, count = strategy.run(replica, args=(batch,))
        return strategy.experimental_local_results(loss)[0], strategy.experimental_local_results(count)[0]

    # Each process reads its own part; the strategy must not divide it again.
    batches = strategy.distribute_datasets_from_function(lambda context: millrace.tf.dataset(feed))
    for taken, batch in enumerate(batches, 1):
        loss, count = train_step(batch)
        seen = seen + count.numpy()
        step += 1
        if step % 10 == 1 and task == 0:
            print(f"step {step}: loss {float(loss):.3f}")
        if step % 10 == 0 and task == 0:
            values = {name: weight.numpy() for name, weight in weights.items()}
            with runs.open(CHECKPOINT, "wb") as out:
                # TensorFlow reads ahead: only the number of batches that were trained tells the position.
                numpy.savez(out, step=step, feed=json.dumps(feed.state_after(taken)), seen=seen, **values)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and task == workers - 1 and step == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
    assert set(seen[seen > 0]) == {EPOCHS} and (seen > 0).sum() == feed.rows, "a row was lost or repeated"
    if task == 0:
        print(f"{step} steps; each of {feed.rows} rows counts {EPOCHS} times")


if __name__ == "__main__":
    main()
