"""tritonclient.grpc and .http load and unload models of a server that was started with explicit control."""
import sys

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


for client in [tritonclient.grpc.InferenceServerClient(grpc_url), tritonclient.http.InferenceServerClient(http_url)]:
    with client:
        assert not client.is_model_ready(model)
        assert set(states(client)) == {"UNAVAILABLE"}, states(client)
        refused(lambda: client.get_model_config(model), "no model")
        client.load_model(model)
        assert client.is_model_ready(model) and "READY" in states(client)
        client.load_model(model)
        refused(lambda: client.load_model(model, config='{"max_batch_size": 1}'), "bundle")
        refused(lambda: client.load_model("no-such-model"), "no-such-model")
        client.unload_model(model, unload_dependents=True)
        assert not client.is_model_ready(model) and set(states(client)) == {"UNAVAILABLE"}
        refused(lambda: client.unload_model(model), "not loaded")
print("loaded and unloaded twice")
