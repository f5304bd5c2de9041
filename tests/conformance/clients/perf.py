"""perf_analyzer, Triton's load generator, in its modes against a running server: every request is answered."""
import os
import re
import subprocess
import sys

import tritonclient.grpc

folder, grpc_url, http_url, mlp = sys.argv[1:5]
BERT = ["-m", "bert", "--input-data", "zero", *(f"--shape={name}:16" for name in ["input_ids", "attention_mask", "token_type_ids"])]
LSTM = ["-m", "lstm", "--shape=x:2,5,16", "--shape=h_in:2,2,64", "--shape=c_in:2,2,64"]
SHARED = ["--shared-memory=system", "--output-shared-memory-size=65536"]
REQUESTS = 200
RUNS = [
    ["-m", mlp, "-i", "grpc", "--concurrency-range=1:4:3"],
    ["-m", mlp, "-i", "grpc", "--concurrency-range=8", "--async", "-b", "8"],
    ["-m", mlp, "-i", "grpc", "--concurrency-range=8", "--async", "--streaming"],
    ["-m", mlp, "-i", "grpc", "--concurrency-range=4", *SHARED],
    ["-m", mlp, "-i", "grpc", "--request-rate-range=200:400:200"],
    ["-m", mlp, "-i", "http", "--concurrency-range=1:4:3"],
    ["-m", mlp, "-i", "http", "--concurrency-range=8", "--async", "-b", "8"],
    ["-m", mlp, "-i", "http", "--concurrency-range=4", *SHARED],
    ["-m", mlp, "-i", "http", "--request-rate-range=200", "--request-distribution=poisson"],
    [*BERT, "-i", "grpc", "--concurrency-range=8", "--async", "-b", "2"],
    [*BERT, "-i", "http", "--concurrency-range=2"],
    [*BERT, "-i", "grpc", "--concurrency-range=2", *SHARED],
    [*LSTM, "-i", "grpc", "--concurrency-range=2", "--async", "--streaming"],
    [*LSTM, "-i", "http", "--concurrency-range=2"],
]


# How much: windows of as many requests, however apart they are. A fixed count (--request-count) is no way: what a
# quick server answers before the tool begins to count is missing at its end, and it waits for it forever.
MEASURED = ["--measurement-mode=count_windows", f"--measurement-request-count={REQUESTS}", "-s", "999999"]


def statistics(client, model):
    (found,) = client.get_inference_statistics(model).model_stats
    return found.inference_stats.success.count, found.inference_stats.fail.count


with tritonclient.grpc.InferenceServerClient(grpc_url) as client:
    for options in RUNS:
        model = options[options.index("-m") + 1]
        url = grpc_url if "grpc" in options else http_url
        answered, failed = statistics(client, model)
        run = subprocess.run(
            [f"{folder}/perf_analyzer", "-u", url, *MEASURED, *options],
            env={**os.environ, "LD_LIBRARY_PATH": folder},
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = f"{' '.join(options)}: exit {run.returncode}\n{run.stdout}\n{run.stderr}"
        assert run.returncode == 0, said
        counts = [int(count) for count in re.findall(r"Request count: (\d+)", run.stdout)]
        assert counts and min(counts) >= REQUESTS // 2, said
        answered_after, failed_after = statistics(client, model)
        assert failed_after == failed and answered_after - answered >= sum(counts), said
print(f"{len(RUNS)} runs, every request answered")
