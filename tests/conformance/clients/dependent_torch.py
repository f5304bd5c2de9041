"""PyTorch: models whose rows depend on each other as ONNX files, and a network that a tool may quantize."""
import inspect
import sys

import torch
from torch import nn

folder = sys.argv[1]
torch.manual_seed(11)


class Normalised(nn.Module):
    """Divides images by the largest value of the batch, as code for single images does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, x):
        return self.body(x / x.max())


class MinMax(nn.Module):
    def forward(self, x):
        return (x - x.min()) / (x.max() - x.min())


class BytesOrNot(nn.Module):
    def forward(self, x):
        return torch.where(x.max() > 1, x / 255, x)


class Soft(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=0)


class Summed(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, dim=0)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


class Alike(nn.Module):
    """Attention between the rows of a batch."""

    def forward(self, x):
        return torch.softmax(x @ x.transpose(0, 1) / 4, dim=1) @ x


def export(name, model, row):
    options = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    torch.onnx.export(
        model.eval(),
        torch.rand(2, *row),
        f"{folder}/{name}.onnx",
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        opset_version=16,
        **options,
    )


export("torch_normalised", Normalised(), (3, 16, 16))
for name, model in [
    ("min_max", MinMax()),
    ("bytes_or_not", BytesOrNot()),
    ("soft", Soft()),
    ("summed", Summed()),
    ("centred", Centred()),
    ("alike", Alike()),
]:
    export(f"torch_{name}", model, (16,))
export("mlp", nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), (16,))
print(f"exported by PyTorch {torch.__version__}")
