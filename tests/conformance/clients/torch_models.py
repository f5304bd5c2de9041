"""tritonclient against one server of four models from PyTorch: its answers are PyTorch's, also under load."""
import random
import sys
import threading

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import np_to_triton_dtype

grpc_url, http_url, folder = sys.argv[1:4]
MODELS = ["resnet18", "mobilenet_v2", "bert", "lstm"]
ROWS = ["resnet18", "mobilenet_v2", "bert"]
CLIENTS = 8


def load(model):
    """Cases of a model: inputs and outputs by their names."""
    arrays = np.load(f"{folder}/{model}.npz")
    cases = {}
    for key in arrays.files:
        case, side, name = key.split("/")
        cases.setdefault(case, {"in": {}, "out": {}})[side][name] = arrays[key]
    return list(cases.values())


cases = {model: load(model) for model in MODELS}


def ask(client, model, inputs, outputs, **options):
    """Over gRPC, or over HTTP with binary tensors unless the options say otherwise."""
    module = grpc if isinstance(client, grpc.InferenceServerClient) else http
    given = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(array), **options)
        given.append(tensor)
    wanted = [module.InferRequestedOutput(name, **options) for name in outputs]
    result = client.infer(model, given, outputs=wanted)
    return {name: result.as_numpy(name) for name in outputs}


def check(got, wanted, what):
    for name, array in wanted.items():
        assert got[name].shape == array.shape, (what, name, got[name].shape)
        worst = float(np.abs(got[name] - array).max())
        assert worst <= 1e-4, (what, name, worst)


def part(case, begin, end):
    """Some of the rows of a case."""
    return [{name: array[begin:end] for name, array in case[side].items()} for side in ("in", "out")]


def statistics(client, model):
    (found,) = client.get_inference_statistics(model).model_stats
    return found.inference_stats.success.count, found.execution_count


def each_alone(client):
    for model in MODELS:
        for number, case in enumerate(cases[model]):
            check(ask(client, model, case["in"], case["out"]), case["out"], (model, number))
            if model in ROWS:
                count = len(next(iter(case["in"].values())))
                for begin, end in [(0, 1), (count // 2, count)]:
                    inputs, outputs = part(case, begin, end)
                    check(ask(client, model, inputs, outputs), outputs, (model, number, begin, end))


def in_steps(client):
    """A sequence in pieces, with the state handed on by the client, ends as it does in one."""
    case = cases["lstm"][1]
    x, state = case["in"]["x"], {"h": case["in"]["h_in"], "c": case["in"]["c_in"]}
    pieces = []
    for begin, end in [(0, 1), (1, 15), (15, 40)]:
        inputs = {"x": x[:, begin:end], "h_in": state["h"], "c_in": state["c"]}
        got = ask(client, "lstm", inputs, ["y", "h_out", "c_out"])
        pieces.append(got["y"])
        state = {"h": got["h_out"], "c": got["c_out"]}
    got = {"y": np.concatenate(pieces, axis=1), "h_out": state["h"], "c_out": state["c"]}
    check(got, case["out"], "lstm in pieces")


def at_once(work):
    """Runs the work of all clients at the same time; the first failure is raised."""
    failures = []
    barrier = threading.Barrier(CLIENTS)

    def run(number):
        try:
            with (grpc.InferenceServerClient(grpc_url) if number % 2 else http.InferenceServerClient(http_url)) as client:
                barrier.wait(timeout=120)
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


def mixed(number, client):
    """Other models, cases and numbers of rows from request to request."""
    choose = random.Random(number)
    for _ in range(12):
        model = choose.choice(MODELS)
        case = choose.choice(cases[model])
        inputs, outputs = case["in"], case["out"]
        if model in ROWS:
            begin = choose.randrange(len(next(iter(inputs.values()))))
            inputs, outputs = part(case, begin, begin + choose.randint(1, 3))
        check(ask(client, model, inputs, outputs), outputs, (model, "with others"))


def same(model):
    def work(number, client):
        case = cases[model][0]
        inputs, outputs = part(case, number, number + 1) if model in ROWS else (case["in"], case["out"])
        for _ in range(3):
            check(ask(client, model, inputs, outputs), outputs, (model, "together"))

    return work


with grpc.InferenceServerClient(grpc_url) as over_grpc, http.InferenceServerClient(http_url) as over_http:
    for model in MODELS:
        config = over_grpc.get_model_config(model).config
        batches = config.HasField("dynamic_batching")
        assert (config.max_batch_size > 0, batches) == (model in ROWS, model in ROWS), config
        for case in cases[model]:
            some = next(iter(case["out"].values()))
            assert np.ptp(some) > 0.1, f"{model} answers the same to everything"
    for client in [over_grpc, over_http]:
        each_alone(client)
        in_steps(client)
    case = cases["lstm"][2]
    check(ask(over_http, "lstm", case["in"], case["out"], binary_data=False), case["out"], "lstm as JSON")
    at_once(mixed)
    for model in MODELS:
        for attempt in range(20):
            requests, runs = statistics(over_grpc, model)
            at_once(same(model))
            requests_after, runs_after = statistics(over_grpc, model)
            together = runs_after - runs < requests_after - requests
            # One session and eight clients: that nobody ever waits beside another is hardly possible.
            if together or model not in ROWS:
                break
        assert together == (model in ROWS), (model, runs_after - runs, requests_after - requests)
print(f"{len(MODELS)} models answer as PyTorch does")
