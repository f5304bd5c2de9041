"""tritonclient.grpc and .http load and unload models of a server that was started with explicit control."""
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

grpc_url, http_url, model = sys.argv[1:4]


def refused(call, part):
    try:
        call()
    except InferenceServerException as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"accepted, where {part!r} was to be said")


def states(client):
    index = client.get_model_repository_index()
    entries = index if isinstance(index, list) else [{"name": e.name, "state": e.state} for e in index.models]
    return [entry["state"] for entry in entries if entry["name"] == model]


def trace_levels(settings):
    return settings["trace_level"] if isinstance(settings, dict) else list(settings.settings["trace_level"].value)


for library, url in [(tritonclient.grpc, grpc_url), (tritonclient.http, http_url)]:
    with library.InferenceServerClient(url) as client:
        assert not client.is_model_ready(model)
        assert set(states(client)) == {"UNAVAILABLE"}, states(client)
        refused(lambda: client.get_model_config(model), "no model")
        client.load_model(model)
        assert client.is_model_ready(model) and "READY" in states(client)
        client.load_model(model)
        given = library.InferInput("input", [1, 64], "FP32")
        given.set_data_from_numpy(np.zeros([1, 64], dtype=np.float32))
        client.infer(model, [given])
        assert trace_levels(client.update_trace_settings(model, {"trace_level": None})) == ["OFF"]
        assert trace_levels(client.get_trace_settings()) == ["OFF"]
        on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        refused(lambda: client.update_trace_settings(model, on), "[serving.telemetry]")
        refused(lambda: client.update_trace_settings(settings={"trace_file": "x.json"}), "[serving.telemetry]")
        refused(lambda: client.load_model(model, config='{"max_batch_size": 1}'), "bundle")
        refused(lambda: client.load_model("no-such-model"), "no-such-model")
        client.unload_model(model, unload_dependents=True)
        assert not client.is_model_ready(model) and set(states(client)) == {"UNAVAILABLE"}
        refused(lambda: client.unload_model(model), "not loaded")
print("loaded and unloaded twice")
