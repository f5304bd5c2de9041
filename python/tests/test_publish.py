"""Publication of PyTorch models, with the program that serves them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import threading
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import millrace
from support import DEADLINE_S, PROGRAM, HomeCase, python, require, run, torch2_or_skip, torch_or_skip

MODULES = ("onnx", "onnxscript", "onnxruntime")


class PublishTest(HomeCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.torch = torch2_or_skip(6, "the exporter needs 2.6")
        for module in MODULES:
            require(module)
        super().setUpClass()
        cls.torch.manual_seed(0)
        cls.model = cls.torch.nn.Sequential(
            cls.torch.nn.Linear(4, 8), cls.torch.nn.BatchNorm1d(8), cls.torch.nn.Dropout(), cls.torch.nn.Linear(8, 3)
        )

    def publish(self, model: Any, inputs: Any, name: str, **options: Any) -> Any:
        return millrace.publish(model, inputs, name, program=PROGRAM, home=self.home, **options)

    def shown(self, name: str, version: int) -> Any:
        shown = run(self.home, "--json", "model", "show", name, "--volume", "models", "--version", str(version))
        return json.loads(shown)

    def versions(self, name: str) -> list[str]:
        try:
            entries = millrace.Volume("models", create=True, home=self.home).list(f"/models/{name}")
        except millrace.NotFoundError:
            return []
        return [entry.path.rpartition("/")[2] for entry in entries]

    def test_a_published_model_is_served_and_predicts_what_the_model_does(self) -> None:
        torch = self.torch
        feed = self.feed(columns=["pixels", "label"], format="torch", batch_rows=100, seed=7, epochs=2)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.model.train()
        for batch in feed:
            loss = torch.nn.functional.cross_entropy(self.model(batch["pixels"] / 4000), batch["label"].long() % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        done = self.publish(
            self.model, torch.zeros(1, 4), "digits", feed=feed, code="4711abc", output_names=["logits"],
            metrics={"loss": loss.item()}, metadata={"author": "a test"},
        )
        self.assertTrue(self.model.training)
        self.assertEqual((done.version, done.path), (1, "models:/models/digits/1"))
        shown = self.shown("digits", 1)
        expected = {
            "volume": "digits", "snapshot": "v1", "path": "/train", "config_sha256": feed.plan, "seed": 7, "steps": 20,
            "epochs": 2, "code_version": "4711abc", "offsets": {},
        }
        self.assertEqual(shown["lineage"], expected)
        self.assertEqual(shown["signature"]["inputs"], [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}])
        self.assertTrue(shown["rows"]["independent"])
        self.assertAlmostEqual(shown["metrics"]["loss"], loss.item())
        record = json.loads(millrace.Volume("models", home=self.home).open("/models/digits/1/training.json").read())
        self.assertEqual((record["metadata"], record["feed"]["rows_read"]), ({"author": "a test"}, 2000))
        self.assertEqual(record["feed"]["columns"], ["pixels", "label"])

        rows = [[1.0, 2.0, 3.0, 4.0], [-5.0, 0.5, 0.0, 100.0], [0.0, 0.0, 0.0, 0.0]]
        file = Path(self.home, "rows.jsonl")
        file.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        millrace.close()
        serve = [PROGRAM, "--home", self.home, "serve", "--volume", "models", "--grpc", "127.0.0.1:0", "--http",
                 "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--json"]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        late = threading.Timer(DEADLINE_S, server.kill)
        late.start()
        try:
            line = server.stdout.readline()
            self.assertTrue(line, "the server ended or printed nothing")
            printed = run(self.home, "predict", "digits", str(file), "--grpc", json.loads(line)["grpc"], "--output", "-")
        finally:
            late.cancel()
            server.send_signal(signal.SIGTERM)
            errors = server.communicate(timeout=DEADLINE_S)[1]
        found = [json.loads(line) for line in printed.splitlines()]
        self.model.eval()
        with torch.no_grad():
            own = self.model(torch.tensor(rows))
        theirs = torch.tensor([answer["outputs"]["logits"] for answer in found])
        self.assertTrue(torch.allclose(own, theirs.reshape(own.shape), rtol=1e-4, atol=1e-5), f"{printed} {own} {errors}")

    def test_versions_are_never_replaced(self) -> None:
        torch = self.torch
        self.assertEqual(self.publish(torch.nn.Linear(4, 2), torch.zeros(2, 4), "next").version, 1)
        self.assertEqual(self.shown("next", 1)["lineage"]["imported"]["file"], "model.onnx")
        graph = Path(self.home, "graph.onnx")
        with millrace.Volume("models", home=self.home).open("/models/next/1/model.onnx") as file:
            graph.write_bytes(file.read())
        run(self.home, "model", "import", str(graph), "--name", "next", "--volume", "models")
        self.assertEqual(self.publish(torch.nn.Linear(4, 2), torch.zeros(2, 4), "next", seed=5).version, 3)
        self.assertEqual(self.versions("next"), ["1", "2", "3"])
        self.assertEqual(self.shown("next", 3)["lineage"]["seed"], 5)
        self.assertEqual(self.shown("next", 2)["lineage"]["imported"]["file"], "graph.onnx")

    def test_several_inputs_and_outputs(self) -> None:
        torch = self.torch

        class Two(torch.nn.Module):
            def forward(self, ids: Any, scale: Any) -> Any:
                return {"sum": (ids * scale).sum(1), "parts": [ids > 2, scale.double()]}

        given = {"ids": torch.arange(6).reshape(2, 3), "scale": torch.rand(2, 3)}
        done = self.publish(Two(), given, "two")
        inputs = self.shown("two", done.version)["signature"]["inputs"]
        self.assertEqual([(found["name"], found["datatype"]) for found in inputs], [("ids", "INT64"), ("scale", "FP32")])

    def test_a_model_whose_export_differs_is_not_published(self) -> None:
        torch = self.torch

        class Frozen(torch.nn.Module):
            calls = 0

            def forward(self, x: Any) -> Any:
                Frozen.calls += 1
                return x + Frozen.calls

        with self.assertRaisesRegex(millrace.MismatchError, "^publish frozen: output .* differs .*nothing was published"):
            self.publish(Frozen(), torch.zeros(2, 4), "frozen")
        self.assertEqual(self.versions("frozen"), [])

    def test_wrong_arguments_are_told(self) -> None:
        torch = self.torch
        linear = torch.nn.Linear(4, 2)
        cases: list[tuple[Any, dict[str, Any], type, str]] = [
            (torch.zeros(2, 5), {}, millrace.UsageError, r"fails on example inputs of the shapes \(2, 5\)"),
            (torch.tensor(1.0), {}, millrace.UsageError, "dynamic_batch=False"),
            ([torch.zeros(2, 4), torch.zeros(3, 4)], {}, millrace.UsageError, r"\(2, 4\), \(3, 4\)"),
            ([1, 2], {}, millrace.UsageError, "must be a tensor"),
            (torch.zeros(2, 4), {"metrics": {"loss": float("nan")}}, millrace.UsageError, "'loss' is not a finite number"),
            (torch.zeros(2, 4), {"metrics": {"loss": "low"}}, millrace.UsageError, "'loss' is not a finite number"),
            (torch.zeros(2, 4), {"metadata": {"x": object()}}, millrace.UsageError, "JSON cannot"),
            (torch.zeros(2, 4), {"steps": -1}, millrace.UsageError, "steps is -1"),
            (torch.zeros(2, 4), {"feed": "data@v1:/train"}, millrace.UsageError, "feed is a str; pass the millrace.Feed"),
        ]
        for inputs, options, kind, text in cases:
            with self.assertRaisesRegex(kind, text):
                self.publish(linear, inputs, "wrong", **options)
        with self.assertRaisesRegex(millrace.UsageError, r"the model is a dict; .* not its state_dict\(\)"):
            self.publish({"weight": torch.zeros(2, 4)}, torch.zeros(2, 4), "digits")
        with self.assertRaisesRegex(millrace.UsageError, "^publish ../wrong: "):
            self.publish(linear, torch.zeros(2, 4), "../wrong")
        with self.assertRaisesRegex(millrace.UnavailableError, "'nothing-here' was not found"):
            millrace.publish(linear, torch.zeros(2, 4), "wrong", program="nothing-here", home=self.home)
        self.assertEqual(self.versions("wrong"), [])

    def test_a_new_volume_other_than_the_default_is_created_with_a_warning(self) -> None:
        model, inputs = self.torch.nn.Linear(4, 2), self.torch.zeros(2, 4)
        with self.assertWarnsRegex(UserWarning, "volume 'modles' did not exist and was created"):
            self.assertEqual(self.publish(model, inputs, "mistyped", volume="modles").volume, "modles")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self.assertEqual(self.publish(model, inputs, "mistyped", volume="modles").version, 2)
        self.assertEqual([str(warning.message) for warning in found if "did not exist" in str(warning.message)], [])

    def test_a_killed_publication_leaves_nothing_or_a_whole_version(self) -> None:
        for moment, versions in (("before", []), ("after", ["1"])):
            code = f"""
import os, sys, torch, millrace, millrace.export
plain = millrace.export._import
def stop(*arguments):
    if {moment == "after"}:
        plain(*arguments)
    print("here", flush=True)
    sys.stdin.read()
millrace.export._import = stop
millrace.publish(torch.nn.Linear(4, 2), torch.zeros(2, 4), "killed", seed=5,
                 home=os.environ["HOME_DIR"], program=os.environ["TEST_PROGRAM"])
"""
            with mock.patch.dict(os.environ, {"TEST_PROGRAM": PROGRAM}):
                process = python(self.home, code, stdin=-1)
            told = process.stdout.readline()
            while told and told != "here\n":
                told = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            self.assertEqual(told, "here\n", process.communicate(timeout=DEADLINE_S)[1][-2000:])
            self.assertEqual(self.versions("killed"), versions)
        self.assertEqual(self.shown("killed", 1)["lineage"]["seed"], 5)
        record = json.loads(millrace.Volume("models", home=self.home).open("/models/killed/1/training.json").read())
        self.assertEqual(record["seed"], 5)

    def test_a_version_is_never_seen_without_its_lineage(self) -> None:
        torch = self.torch
        seen: list[int] = []
        done = threading.Event()

        def watch() -> None:
            volume = millrace.Volume("models", create=True, home=self.home)
            while not done.is_set():
                try:
                    manifest = json.loads(volume.open("/models/watched/1/bundle.json").read())
                except millrace.NotFoundError:
                    continue
                seen.append(manifest["lineage"]["seed"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.publish(torch.nn.Linear(4, 2), torch.zeros(2, 4), "watched", seed=5)
        finally:
            done.set()
            watcher.join(DEADLINE_S)
        self.assertLessEqual(set(seen), {5})
        self.assertEqual(self.shown("watched", 1)["lineage"]["seed"], 5)

class OlderTorchTest(HomeCase):
    def test_publish_says_what_it_needs(self) -> None:
        torch = torch_or_skip()
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6) and all(map(importlib.util.find_spec, MODULES)):
            self.skipTest("everything is installed")
        with self.assertRaisesRegex(millrace.UnavailableError, "pip install|2.6 or newer"):
            millrace.publish(torch.nn.Linear(4, 2), torch.zeros(2, 4), "digits", home=self.home)


if __name__ == "__main__":
    unittest.main()
