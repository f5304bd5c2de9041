"""The registry of the zoo, its inputs, and what its models are built of."""

import math

import torch
from torch import nn

ROWS = 8

MODELS = {}


def model(name, row, module, vocabulary=None, train=False, pretrained=False, outputs=("y",), loss="cross-entropy"):
    """Adds a model whose input has rows of shape `row`: whole numbers below `vocabulary`, or floats.

    For a model with several inputs, `row` has the shape and the vocabulary of each by its name. An input with "mask" in
    its name has ones and then zeros. Of several outputs, the first one is trained.

    With `train`, the model is exported and trained in PyTorch's mode for training. With `pretrained`, no two of its
    parameters are equal, and none is 0: the exporters merge and drop such ones. With the `loss` "mse", the outputs are
    compared with numbers, those of an input of their shape.
    """
    if pretrained:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    MODELS[name] = (row, module, vocabulary, train, list(outputs), loss)


def mask(rows, length, vocabulary):
    values = [[at < length - row % 3 for at in range(length)] for row in range(rows)]
    return torch.tensor(values) if vocabulary is bool else torch.tensor(values).long()


def inputs(rows, row, vocabulary):
    """The inputs of a model, in the order of its arguments."""
    if isinstance(row, dict):
        return tuple(
            mask(rows, *shape, below) if "mask" in name else values(rows, shape, below)
            for name, (shape, below) in row.items()
        )
    return (values(rows, row, vocabulary),)


def values(rows, row, vocabulary):
    count = rows * math.prod(row)
    if vocabulary:
        return torch.tensor([(7 * i + i // 5) % vocabulary for i in range(count)]).reshape([rows] + row)
    numbers = [math.sin(0.7391 * i + 0.0013 * i * i) for i in range(count)]
    return torch.tensor(numbers, dtype=torch.float64).float().reshape([rows] + row)


def labels(classes):
    return torch.tensor([(5 * i + 1) % classes for i in range(ROWS)])


class Call(nn.Module):
    """A model of named parts and a function of them."""

    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def linear_call(function, width=16, out=16):
    """A function of one linear layer's output, in front of another linear layer."""
    return Call(lambda self, x: self.b(function(self.a(x))), a=nn.Linear(8, width), b=nn.Linear(out, 4))


def mlp(activation):
    return nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 4))


def head(channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


def conv_head(*layers, channels=6):
    return nn.Sequential(*layers, nn.ReLU(), head(channels))
