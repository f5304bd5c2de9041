"""tritonclient: 24 clients ask models whose rows depend on each other, and each gets the answer of a single request."""
import sys
import threading

import numpy as np
import tritonclient.grpc as grpc

url, models = sys.argv[1], sys.argv[2:]
CLIENTS, REQUESTS = 24, 20


def request(model, metadata, number):
    """The same rows for the same number, of very different magnitudes from number to number."""
    rng = np.random.default_rng(number)
    (given,) = metadata.inputs
    shape = [1 + number % 2, *(extent if extent > 0 else 3 for extent in given.shape[1:])]
    values = (rng.random(shape) * [0.01, 1.0, 300.0][number % 3]).astype(np.float32)
    tensor = grpc.InferInput(given.name, shape, "FP32")
    tensor.set_data_from_numpy(values)
    return [tensor]


def answer(client, model, metadata, number):
    result = client.infer(model, request(model, metadata, number))
    return [result.as_numpy(output.name) for output in metadata.outputs]


def same(found, expected, exact):
    if exact or found.dtype.kind not in "f":
        return np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")
    return np.allclose(found, expected, rtol=1e-4, atol=1e-5 * (1 + np.abs(expected).max()))


def at_once(work):
    failures = []

    def run(number):
        try:
            with grpc.InferenceServerClient(url) as client:
                work(number, client)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


dependent = 0
with grpc.InferenceServerClient(url) as alone:
    for model in models:
        independent = model.startswith("independent_")
        config = alone.get_model_config(model).config
        rows = config.parameters["rows"].string_value
        assert config.HasField("dynamic_batching") == independent, (model, rows)
        assert rows.startswith("independent" if independent else "dependent: "), (model, rows)
        metadata = alone.get_model_metadata(model)
        expected = {
            number: answer(alone, model, metadata, number)
            for client in range(CLIENTS)
            for number in range(client, client + REQUESTS)
        }

        def work(number, client):
            for asked in range(number, number + REQUESTS):
                for found, wanted in zip(answer(client, model, metadata, asked), expected[asked]):
                    assert same(found, wanted, exact=not independent), (model, asked, found, wanted)

        at_once(work)
        dependent += not independent
print(f"{dependent} dependent models answered {CLIENTS} clients as one")
