"""PyTorch: four models with seeded weights as ONNX files, each with inputs and what PyTorch answers to them."""
import inspect
import math
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional

folder = sys.argv[1]
torch.manual_seed(7)


def conv(width_in, width, kernel, stride=1, groups=1):
    return [
        nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
    ]


class Residual(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        self.body = nn.Sequential(*conv(width_in, width, 3, stride), nn.ReLU(), *conv(width, width, 3))
        same = stride == 1 and width_in == width
        self.skip = nn.Identity() if same else nn.Sequential(*conv(width_in, width, 1, stride))

    def forward(self, x):
        return functional.relu(self.body(x) + self.skip(x))


def resnet18():
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Inverted(nn.Module):
    def __init__(self, width_in, width, stride, expansion):
        super().__init__()
        inner = width_in * expansion
        expand = [] if expansion == 1 else [*conv(width_in, inner, 1), nn.ReLU6()]
        depthwise = [*conv(inner, inner, 3, stride, groups=inner), nn.ReLU6()]
        self.body = nn.Sequential(*expand, *depthwise, *conv(inner, width, 1))
        self.adds = stride == 1 and width_in == width

    def forward(self, x):
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v2():
    layers, width_in = [*conv(3, 32, 3, 2), nn.ReLU6()], 32
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expansion, width, count, stride in stages:
        for place in range(count):
            layers.append(Inverted(width_in, width, stride if place == 0 else 1, expansion))
            width_in = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, *conv(320, 1280, 1), nn.ReLU6(), *head)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.width = heads, width
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x, mask):
        rows, length, _ = x.shape

        def split(y):
            return y.view(rows, length, self.heads, self.width // self.heads).transpose(1, 2)

        scores = split(self.query(x)) @ split(self.key(x)).transpose(2, 3) / math.sqrt(self.width // self.heads)
        seen = (scores + mask).softmax(-1) @ split(self.value(x))
        x = self.norms[0](x + self.out(seen.transpose(1, 2).reshape(rows, length, self.width)))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, words=30522, width=256, layers=4, heads=4, positions=512):
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(n, width) for n in (words, positions, 2))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids, attention_mask, token_type_ids):
        places = torch.arange(input_ids.shape[1]).unsqueeze(0)
        x = self.norm(self.words(input_ids) + self.positions(places) + self.types(token_type_ids))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return self.head(y), h, c


def settled(model):
    """With the statistics that batch normalization gathers in a training, here from noise."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 224, 224))
    return model


def export(name, model, cases, outputs, axes):
    model.eval()
    arrays = {}
    with torch.no_grad():
        for case, inputs in enumerate(cases):
            answers = model(*inputs.values())
            answers = answers if isinstance(answers, tuple) else (answers,)
            for key, tensor in [*inputs.items(), *zip(outputs, answers)]:
                arrays[f"{case}/{'in' if key in inputs else 'out'}/{key}"] = tensor.numpy()
        # The exporter that needs PyTorch alone; older versions know no other.
        options = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
        torch.onnx.export(
            model,
            tuple(cases[0].values()),
            f"{folder}/{name}.onnx",
            input_names=list(cases[0]),
            output_names=outputs,
            dynamic_axes=axes,
            opset_version=16,
            **options,
        )
    np.savez(f"{folder}/{name}.npz", **arrays)


def sentences(rows, length):
    lengths = torch.randint(1, length + 1, (rows, 1))
    return {
        "input_ids": torch.randint(0, 30522, (rows, length)),
        "attention_mask": (torch.arange(length) < lengths).long(),
        "token_type_ids": torch.randint(0, 2, (rows, length)),
    }


def steps(rows, length):
    return {"x": torch.randn(rows, length, 16), "h_in": torch.randn(2, rows, 64), "c_in": torch.randn(2, rows, 64)}


rows = {0: "batch"}
for name, model, batches in [("resnet18", resnet18(), (8, 1)), ("mobilenet_v2", mobilenet_v2(), (8, 3))]:
    images = [{"image": torch.randn(count, 3, 224, 224)} for count in batches]
    export(name, settled(model), images, ["logits"], {"image": rows, "logits": rows})
tokens = {0: "batch", 1: "sequence"}
export(
    "bert",
    Bert(),
    [sentences(*shape) for shape in [(8, 24), (8, 7), (1, 128), (5, 1)]],
    ["last_hidden_state", "pooler_output"],
    {**dict.fromkeys(["input_ids", "attention_mask", "token_type_ids", "last_hidden_state"], tokens), "pooler_output": rows},
)
export(
    "lstm",
    Lstm(),
    [steps(*shape) for shape in [(3, 12), (1, 40), (2, 1)]],
    ["y", "h_out", "c_out"],
    {**dict.fromkeys(["x", "y"], tokens), **dict.fromkeys(["h_in", "c_in", "h_out", "c_out"], {1: "batch"})},
)
print(f"exported by PyTorch {torch.__version__}")
