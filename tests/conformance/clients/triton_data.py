"""tritonclient against a running server: system shared memory, streams and classes, over gRPC and HTTP."""
import asyncio
import json
import os
import queue
import sys

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio
import tritonclient.http as http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

grpc_url, http_url, model, records = sys.argv[1:5]
rows = [json.loads(line) for line in open(records)]
pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
labels = np.array([row["label"] for row in rows])


def refused(call, text):
    try:
        call()
    except InferenceServerException as error:
        assert text in error.message(), error
        return error.status()
    raise AssertionError(f"expected an error with {text!r}")


def shared_memory(module, client, reference):
    """Inputs and outputs in regions, each alone and both; what comes back beside them; what is refused."""
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    kind = module.__name__.rsplit(".", 1)[-1]
    key = f"/millrace-{os.getpid()}-{kind}"
    size_in, size_out = pixels.nbytes, reference.nbytes
    given = shm.create_shared_memory_region("given", key + "-in", size_in + 64, create_only=True)
    taken = shm.create_shared_memory_region("taken", key + "-out", size_out + 16, create_only=True)
    try:
        shm.set_shared_memory_region(given, [pixels], offset=64)
        client.register_system_shared_memory("given", key + "-in", size_in, offset=64)
        client.register_system_shared_memory("taken", key + "-out", size_out + 16)
        refused(lambda: client.register_system_shared_memory("given", key + "-in", 1), "registered already")
        status = client.get_system_shared_memory_status()
        names = {region["name"] for region in status} if kind == "http" else set(status.regions)
        assert names == {"given", "taken"}, status

        placed_in = module.InferInput("input", list(pixels.shape), "FP32")
        placed_in.set_shared_memory("given", size_in)
        sent = module.InferInput("input", list(pixels.shape), "FP32")
        sent.set_data_from_numpy(pixels)
        placed_out = module.InferRequestedOutput("logits")
        placed_out.set_shared_memory("taken", size_out, offset=16)
        answer = client.infer(model, [placed_in], outputs=[module.InferRequestedOutput("logits")])
        assert np.array_equal(answer.as_numpy("logits"), reference)
        for source in [placed_in, sent]:
            shm.set_shared_memory_region(taken, [np.zeros_like(reference)], offset=16)
            answer = client.infer(model, [source], outputs=[placed_out], request_id="r")
            output = answer.get_output("logits")
            parameters = output["parameters"] if kind == "http" else output.parameters
            assert "shared_memory_region" in parameters, output
            found = shm.get_contents_as_numpy(taken, np.float32, list(reference.shape), offset=16)
            assert np.array_equal(found, reference)

        small = module.InferRequestedOutput("logits")
        small.set_shared_memory("taken", size_out - 4)
        refused(lambda: client.infer(model, [sent], outputs=[small]), "shared_memory_byte_size")
        beyond = module.InferInput("input", list(pixels.shape), "FP32")
        beyond.set_shared_memory("given", size_in, offset=4)
        refused(lambda: client.infer(model, [beyond]), "not inside")
        client.unregister_system_shared_memory("given")
        refused(lambda: client.infer(model, [placed_in]), "not registered")
        client.unregister_system_shared_memory()
        assert not (client.get_system_shared_memory_status() if kind == "http"
                    else client.get_system_shared_memory_status().regions)
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(taken)


def classes(module, client, reference):
    given = module.InferInput("input", list(pixels.shape), "FP32")
    given.set_data_from_numpy(pixels)
    wanted = module.InferRequestedOutput("logits", class_count=3)
    best = client.infer(model, [given], outputs=[wanted]).as_numpy("logits")
    assert best.shape == (len(rows), 3), best.shape
    texts = [[text.decode() if isinstance(text, bytes) else text for text in row] for row in best]
    order = np.argsort(-reference, axis=1, kind="stable")[:, :3]
    assert [[int(text.split(":")[1]) for text in row] for row in texts] == order.tolist()
    values = np.array([[float(text.split(":")[0]) for text in row] for row in texts], dtype=np.float32)
    assert np.array_equal(values, np.take_along_axis(reference, order, axis=1))


def row_input(index, width=64):
    given = grpc.InferInput("input", [1, width], "FP32")
    given.set_data_from_numpy(pixels[index : index + 1, :width].copy())
    return [given]


def stream(client, reference):
    """Every row as a request of its own, some of them wrong, and the answers in their order."""
    answers = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for index in range(len(rows)):
        width = 63 if index % 50 == 7 else 64
        client.async_stream_infer(
            model, row_input(index, width), request_id=str(index), enable_empty_final_response=index % 2 == 0
        )
    for index in range(len(rows)):
        result, error = answers.get(timeout=60)
        if index % 50 == 7:
            assert "shape" in error.message(), error
            continue
        assert error is None, error
        response = result.get_response()
        assert response.id == str(index), response.id
        assert response.parameters["triton_final_response"].bool_param
        assert np.allclose(result.as_numpy("logits"), reference[index : index + 1], atol=1e-5)
    client.stop_stream()
    assert answers.empty()
    # Given up with answers outstanding: the client hears of it, the server goes on.
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for index in range(200):
        client.async_stream_infer(model, row_input(index), request_id=str(index))
    client.stop_stream(cancel_requests=True)
    assert client.is_server_ready()


async def stream_aio(reference):
    async with aio.InferenceServerClient(grpc_url) as client:

        async def requests():
            for index in range(100):
                yield {"model_name": model, "inputs": row_input(index), "request_id": str(index)}

        index = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            assert result.get_response().id == str(index)
            assert np.allclose(result.as_numpy("logits"), reference[index : index + 1], atol=1e-5)
            index += 1
        assert index == 100, index


with grpc.InferenceServerClient(grpc_url) as over_grpc, http.InferenceServerClient(http_url) as over_http:
    whole = grpc.InferInput("input", list(pixels.shape), "FP32")
    whole.set_data_from_numpy(pixels)
    reference = over_grpc.infer(model, [whole]).as_numpy("logits")
    assert (reference.argmax(1) == labels).mean() >= 0.95
    for module, client in [(grpc, over_grpc), (http, over_http)]:
        shared_memory(module, client, reference)
        classes(module, client, reference)
    stream(over_grpc, reference)
    asyncio.run(stream_aio(reference))
print(f"{len(rows)} rows through shared memory, streams and classes")
