"""tritonclient's asyncio clients, gRPC and HTTP: what is served, inference side by side, shared memory, errors."""
import asyncio
import json
import os
import sys

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

grpc_url, http_url, model, records = sys.argv[1:5]
rows = [json.loads(line) for line in open(records)]
pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
labels = np.array([row["label"] for row in rows])


async def refused(call, *texts):
    try:
        await call
    except InferenceServerException as error:
        said = f"{error.status()} {error.message()}"
        assert any(text in said for text in texts), said
    else:
        raise AssertionError(f"accepted, where {texts} was to be said")


async def told(client, options):
    assert await client.is_server_live() and await client.is_server_ready()
    assert await client.is_model_ready(model)
    server = await client.get_server_metadata(**options)
    assert "model_configuration" in server["extensions"], server
    metadata = await client.get_model_metadata(model, **options)
    (given,) = metadata["inputs"]
    assert (given["name"], given["datatype"], [int(n) for n in given["shape"]]) == ("input", "FP32", [-1, 64]), metadata
    config = await client.get_model_config(model, metadata["versions"][-1], **options)
    assert config.get("config", config)["backend"] == "onnxruntime", config
    index = await client.get_model_repository_index(**options)
    index = index if isinstance(index, list) else index["models"]
    assert (model, "READY") in [(entry["name"], entry["state"]) for entry in index], index
    statistics = await client.get_inference_statistics(model, **options)
    (version,) = statistics["model_stats"]
    assert version["name"] == model, statistics
    settings = await client.get_log_settings(**options)
    assert "log_info" in settings.get("settings", settings), settings
    settings = await client.get_trace_settings(**options)
    assert "trace_level" in settings.get("settings", settings), settings
    await refused(client.load_model(model), "polling")
    await refused(client.unload_model(model), "polling")
    await refused(client.get_model_metadata("no-such-model"), "no-such-model")


def row(module, index, width=64):
    given = module.InferInput("input", [1, width], "FP32")
    given.set_data_from_numpy(np.ascontiguousarray(pixels[index : index + 1, :width]))
    return [given]


async def side_by_side(module, client, reference):
    """All rows at once, each a request of its own, the wrong ones refused in between."""

    async def one(index):
        if index % 60 == 7:
            await refused(client.infer(model, row(module, index, 63)), "shape")
            return
        result = await client.infer(model, row(module, index), request_id=str(index))
        response = result.get_response()
        assert (response["id"] if module is http else response.id) == str(index)
        assert np.allclose(result.as_numpy("logits"), reference[index : index + 1], atol=1e-5)

    await asyncio.gather(*(one(index) for index in range(len(rows))))


async def shared_memory(module, client, reference):
    key = f"/millrace-{os.getpid()}-aio-{module.__name__.rsplit('.', 1)[-1]}"
    given = shm.create_shared_memory_region("aio-given", key + "-in", pixels.nbytes, create_only=True)
    taken = shm.create_shared_memory_region("aio-taken", key + "-out", reference.nbytes, create_only=True)
    try:
        shm.set_shared_memory_region(given, [pixels])
        await client.register_system_shared_memory("aio-given", key + "-in", pixels.nbytes)
        await client.register_system_shared_memory("aio-taken", key + "-out", reference.nbytes)
        status = await client.get_system_shared_memory_status()
        names = {region["name"] for region in status} if module is http else set(status.regions)
        assert names == {"aio-given", "aio-taken"}, status
        source = module.InferInput("input", list(pixels.shape), "FP32")
        source.set_shared_memory("aio-given", pixels.nbytes)
        target = module.InferRequestedOutput("logits")
        target.set_shared_memory("aio-taken", reference.nbytes)
        await client.infer(model, [source], outputs=[target])
        found = shm.get_contents_as_numpy(taken, np.float32, list(reference.shape))
        assert np.allclose(found, reference, atol=1e-5)
        await client.unregister_system_shared_memory("aio-given")
        await refused(client.infer(model, [source]), "not registered")
        await client.unregister_system_shared_memory()
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(taken)


async def stream(client, reference):
    """Requests that go on while answers come; then one that is given up with answers outstanding."""

    async def requests(count):
        for index in range(count):
            yield {"model_name": model, "inputs": row(grpc, index), "request_id": str(index)}

    index = 0
    async for result, error in client.stream_infer(requests(len(rows))):
        assert error is None, error
        assert result.get_response().id == str(index)
        assert np.allclose(result.as_numpy("logits"), reference[index : index + 1], atol=1e-5)
        index += 1
    assert index == len(rows), index
    given_up = client.stream_infer(requests(len(rows)))
    async for _ in given_up:
        assert given_up.cancel()
        break
    assert await client.is_server_ready()


async def main():
    whole = grpc.InferInput("input", list(pixels.shape), "FP32")
    whole.set_data_from_numpy(pixels)
    async with grpc_aio.InferenceServerClient(grpc_url) as over_grpc, http_aio.InferenceServerClient(http_url) as over_http:
        reference = (await over_grpc.infer(model, [whole])).as_numpy("logits")
        assert (reference.argmax(1) == labels).mean() >= 0.95
        for algorithm in ["gzip", "deflate"]:
            packed = await over_grpc.infer(model, [whole], compression_algorithm=algorithm)
            assert np.allclose(packed.as_numpy("logits"), reference, atol=1e-5)
            given = http.InferInput("input", list(pixels.shape), "FP32")
            given.set_data_from_numpy(pixels)
            packed = await over_http.infer(
                model, [given], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
            )
            assert np.allclose(packed.as_numpy("logits"), reference, atol=1e-5)
        await told(over_grpc, {"as_json": True})
        await told(over_http, {})
        for module, client in [(grpc, over_grpc), (http, over_http)]:
            await side_by_side(module, client, reference)
            await shared_memory(module, client, reference)
        await stream(over_grpc, reference)
        # Given up before the server can have answered.
        for client, asked in [(over_grpc, whole), (over_http, given)]:
            task = asyncio.ensure_future(client.infer(model, [asked]))
            await asyncio.sleep(0)
            assert task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError), outcome
            assert await client.is_server_ready()


asyncio.run(main())
print(f"{len(rows)} rows side by side")
