"""tritonclient.grpc against a running server: metadata, control calls, inference, compression, errors."""
import json
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

url, model, records = sys.argv[1:4]
rows = [json.loads(line) for line in open(records)]
pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
labels = np.array([row["label"] for row in rows])

with triton.InferenceServerClient(url) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    server = client.get_server_metadata()
    assert server.name and server.version
    metadata = client.get_model_metadata(model)
    assert metadata.name == model
    (tensor,) = metadata.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("input", "FP32", [-1, 64]), tensor
    (output,) = metadata.outputs
    assert (output.name, output.datatype) == ("logits", "FP32"), output

    def infer(array, name="input", datatype="FP32", **options):
        given = triton.InferInput(name, array.shape, datatype)
        given.set_data_from_numpy(array)
        return client.infer(model, [given], outputs=[triton.InferRequestedOutput("logits")], **options)

    whole = infer(pixels, request_id="all")
    assert whole.get_response().id == "all"
    logits = whole.as_numpy("logits")
    assert logits.shape == (len(rows), 10)
    accuracy = float((logits.argmax(1) == labels).mean())
    assert accuracy >= 0.95, accuracy
    one = infer(pixels[:1]).as_numpy("logits")
    assert np.allclose(one, logits[:1], atol=1e-5)
    for algorithm in ["gzip", "deflate"]:
        packed = infer(pixels, compression_algorithm=algorithm).as_numpy("logits")
        assert np.allclose(packed, logits, atol=1e-5), algorithm

    for array, name, datatype, status in [
        (pixels[:1], "wrong", "FP32", "INVALID_ARGUMENT"),
        (pixels[:1, :63].copy(), "input", "FP32", "INVALID_ARGUMENT"),
        (pixels[:1].astype(np.int64), "input", "INT64", "INVALID_ARGUMENT"),
    ]:
        try:
            infer(array, name, datatype)
        except InferenceServerException as error:
            assert status in error.status(), error
        else:
            raise AssertionError(f"{name} {datatype} {array.shape} was accepted")
    config = client.get_model_config(model).config
    assert (config.name, config.platform, config.backend) == (model, "onnxruntime_onnx", "onnxruntime"), config
    assert config.max_batch_size >= len(rows), config
    assert [(i.name, list(i.dims)) for i in config.input] == [("input", [64])], config
    assert [(o.name, list(o.dims)) for o in config.output] == [("logits", [10])], config
    assert config.instance_group[0].count >= 1
    (statistics,) = client.get_inference_statistics(model, metadata.versions[-1]).model_stats
    assert statistics.inference_count >= len(rows) + 1 and statistics.execution_count >= 2, statistics
    assert statistics.inference_stats.fail.count >= 3, statistics
    assert {1, len(rows)} <= {batch.batch_size for batch in statistics.batch_stats}, statistics
    index = client.get_model_repository_index().models
    assert (model, "READY") in [(entry.name, entry.state) for entry in index], index
    try:
        client.load_model(model)
    except InferenceServerException as error:
        assert "not allowed if polling is enabled" in str(error), error
    else:
        raise AssertionError("a server that polls loads models by a call")
    before = client.get_log_settings(as_json=True)["settings"]
    changed = client.update_log_settings({"log_verbose_level": 1, "log_info": True}, as_json=True)["settings"]
    assert changed["log_verbose_level"] == {"uint32_param": 1} and changed["log_info"] == {"bool_param": True}, changed
    client.update_log_settings({"log_verbose_level": 0, "log_info": before["log_info"]["bool_param"]})
    try:
        client.update_log_settings({"log_file": "/tmp/x"})
    except InferenceServerException as error:
        assert "INVALID_ARGUMENT" in error.status(), error
    else:
        raise AssertionError("a call named a file to log to")

    try:
        client.get_model_metadata("no-such-model")
    except InferenceServerException as error:
        assert "NOT_FOUND" in error.status(), error
    else:
        raise AssertionError("an unknown model has metadata")
print(f"{len(rows)} predictions, accuracy {accuracy:.4f}")
