"""KServe's Python client, gRPC and REST, version 2 of the protocol: readiness, inference in all its forms, errors."""
import asyncio
import json
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

grpc_url, http_url, model, records = sys.argv[1:5]
rows = [json.loads(line) for line in open(records)]
pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
labels = np.array([row["label"] for row in rows])


def request(array, binary, **options):
    given = InferInput("input", list(array.shape), "FP32")
    given.set_data_from_numpy(array, binary_data=binary)
    return InferRequest(model, [given], **options)


def check(response, reference):
    assert response.model_name == model and response.id == "r", response
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("logits", "FP32"), output
    assert np.allclose(output.as_numpy(), reference, atol=1e-5)


async def refused(call, *texts):
    try:
        await call
    except (grpc.RpcError, httpx.HTTPStatusError) as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"accepted, where {texts} was to be said")


async def over_grpc():
    async with InferenceGRPCClient(grpc_url) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready(model)
        assert not await client.is_model_ready("no-such-model")
        reference = (await client.infer(request(pixels, True, request_id="r"))).outputs[0].as_numpy()
        assert (reference.argmax(1) == labels).mean() >= 0.95
        for binary in [True, False]:
            part = request(pixels[:32], binary, request_id="r", request_outputs=[RequestedOutput("logits")])
            check(await client.infer(part), reference[:32])
        await refused(client.infer(request(pixels[:1, :63], True)), "INVALID_ARGUMENT", "shape")
        return reference


async def over_rest(reference):
    base = f"http://{http_url}"
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(base) and await client.is_server_ready(base)
    assert await client.is_model_ready(base, model)
    for sent in [True, False]:
        for received in [True, False]:
            options = {"request_id": "r", "parameters": {"binary_data_output": received}}
            check(await client.infer(base, request(pixels, sent, **options), model_name=model), reference)
            wanted = [RequestedOutput("logits", {"binary_data": received})]
            part = request(pixels[:32], sent, request_id="r", request_outputs=wanted)
            check(await client.infer(base, part, model_name=model), reference[:32])
    plain = {"id": "r", "inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": pixels[0].tolist()}]}
    check(await client.infer(base, plain, model_name=model), reference[:1])
    await refused(client.infer(base, request(pixels[:1, :63], True), model_name=model), "400", "shape")
    await refused(client.infer(base, request(pixels[:1], True), model_name="no-such-model"), "404", "no-such-model")
    await client.close()


async def main():
    await over_rest(await over_grpc())


asyncio.run(main())
print(f"{len(rows)} predictions")
