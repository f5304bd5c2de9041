"""tritonclient.http against a running server: metadata, control calls, JSON and binary inference, compression, errors."""
import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

url, model, records = sys.argv[1:4]
rows = [json.loads(line) for line in open(records)]
pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
labels = np.array([row["label"] for row in rows])

with triton.InferenceServerClient(url) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    assert client.get_server_metadata()["name"]
    metadata = client.get_model_metadata(model)
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 64]}], metadata

    def infer(array, binary_in, binary_out, name="input", **compression):
        given = triton.InferInput(name, list(array.shape), "FP32")
        given.set_data_from_numpy(array, binary_data=binary_in)
        wanted = triton.InferRequestedOutput("logits", binary_data=binary_out)
        return client.infer(model, [given], outputs=[wanted], **compression).as_numpy("logits")

    reference = infer(pixels, True, True)
    assert reference.shape == (len(rows), 10)
    accuracy = float((reference.argmax(1) == labels).mean())
    assert accuracy >= 0.95, accuracy
    for binary_in in [True, False]:
        for binary_out in [True, False]:
            assert np.allclose(infer(pixels[:32], binary_in, binary_out), reference[:32], atol=1e-5)
            for sent in [None, "gzip", "deflate"]:
                for received in [None, "gzip", "deflate"]:
                    packed = infer(
                        pixels[:64],
                        binary_in,
                        binary_out,
                        request_compression_algorithm=sent,
                        response_compression_algorithm=received,
                    )
                    assert np.allclose(packed, reference[:64], atol=1e-5), (sent, received)

    config = client.get_model_config(model)
    assert (config["name"], config["platform"]) == (model, "onnxruntime_onnx"), config
    assert config["max_batch_size"] >= len(rows), config
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["input"]] == [("input", "TYPE_FP32", [64])], config
    assert config == client.get_model_config(model, metadata["versions"][-1])
    (statistics,) = client.get_inference_statistics(model, metadata["versions"][-1])["model_stats"]
    assert statistics["inference_count"] >= len(rows), statistics
    assert len(rows) in [batch["batch_size"] for batch in statistics["batch_stats"]], statistics
    assert client.get_inference_statistics()["model_stats"]
    index = client.get_model_repository_index()
    assert (model, "READY") in [(entry["name"], entry["state"]) for entry in index], index
    before = client.get_log_settings()
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before

    for call in [lambda: infer(pixels[:1], True, True, name="wrong"), lambda: infer(pixels[:1, :63].copy(), False, False)]:
        try:
            call()
        except InferenceServerException as error:
            assert error.status() == "400", error.status()
        else:
            raise AssertionError("a malformed request was accepted")
print(f"{len(rows)} predictions, accuracy {accuracy:.4f}")
