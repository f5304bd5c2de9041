"""Exports the models of the zoo and records how PyTorch trains them.

Writes NAME.onnx into default/ and earlier/, one folder per exporter of PyTorch, and losses.json: the losses of 20 steps of
SGD (rate 0.05, cross-entropy, one batch of 8 rows). The test `zoo` of the trainer trains the same files on the same rows.

Recorded with PyTorch 2.15 and onnxscript as pip resolves it: python export.py [NAME ...]
"""

import json
import logging
import math
import pathlib
import sys
import warnings

import onnx
import torch
import torch.nn.functional as F
from torch import nn

ROWS = 8
STEPS = 20
RATE = 0.05
# What the default exporter says about the module of a node, the rewriting rules, and the call in PyTorch.
NODE_KEYS = {
    "pkg.torch.onnx.class_hierarchy", "pkg.torch.onnx.name_scopes", "pkg.onnxscript.rewriter.rule_name",
    "pkg.torch.onnx.fx_node",
}  # fmt: skip
HERE = pathlib.Path(__file__).parent

MODELS = {}


def model(name, row, module, vocabulary=None, train=False, pretrained=False, outputs=("y",)):
    """Adds a model whose input has rows of shape `row`: whole numbers below `vocabulary`, or floats.

    For a model with several inputs, `row` has the shape and the vocabulary of each by its name. An input with "mask" in
    its name has ones and then zeros. Of several outputs, the first one is trained.

    With `train`, the model is exported and trained in PyTorch's mode for training. With `pretrained`, no two of its
    parameters are equal, and none is 0: the exporters merge and drop such ones.
    """
    if pretrained:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    MODELS[name] = (row, module, vocabulary, train, list(outputs))


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


def activations():
    for name, activation in {
        "relu": nn.ReLU(),
        "leaky_relu": nn.LeakyReLU(0.1),
        "elu": nn.ELU(),
        "selu": nn.SELU(),
        "celu": nn.CELU(0.7),
        "prelu": nn.PReLU(),
        "prelu_per_channel": nn.PReLU(16),
        "softplus": nn.Softplus(),
        "softsign": nn.Softsign(),
        "hardsigmoid": nn.Hardsigmoid(),
        "hardswish": nn.Hardswish(),
        "mish": nn.Mish(),
        "silu": nn.SiLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU("tanh"),
        "relu6": nn.ReLU6(),
        "tanh": nn.Tanh(),
        "sigmoid": nn.Sigmoid(),
        "hardtanh": nn.Hardtanh(-0.5, 0.7),
        "threshold": nn.Threshold(0.1, 0.0),
        "logsigmoid": nn.LogSigmoid(),
        "tanhshrink": nn.Tanhshrink(),
        "hardshrink": nn.Hardshrink(0.1),
        "softshrink": nn.Softshrink(0.1),
        "rrelu": nn.RReLU(),
    }.items():
        model(f"activation_{name}", [8], mlp(activation))


def convolutions():
    flat = nn.Flatten
    model(
        "conv1d",
        [3, 16],
        nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), flat(), nn.Linear(48, 4)),
    )
    model(
        "conv1d_same",
        [3, 15],
        nn.Sequential(nn.Conv1d(3, 6, 4, padding="same"), nn.ReLU(), nn.AvgPool1d(2), flat(), nn.Linear(42, 4)),
    )
    model(
        "conv2d",
        [3, 12, 12],
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), flat(), nn.Linear(150, 4)),
    )
    model(
        "conv2d_groups_dilation_stride",
        [4, 12, 12],
        conv_head(nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2, stride=2), channels=8),
    )
    for mode in ["replicate", "reflect", "circular"]:
        model(f"conv2d_{mode}", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3, padding=1, padding_mode=mode)))
    model(
        "conv3d",
        [2, 6, 8, 8],
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), flat(), nn.Linear(192, 4)),
    )
    model(
        "avgpool3d",
        [2, 6, 8, 8],
        nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1, stride=(1, 2, 2)), nn.ReLU(), nn.AvgPool3d(2), flat(), nn.Linear(48, 4)
        ),
    )
    model(
        "convtranspose1d",
        [3, 8],
        nn.Sequential(
            nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), nn.ReLU(), flat(), nn.Linear(64, 4)
        ),
    )
    model("convtranspose2d", [3, 5, 5], conv_head(nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), channels=4))
    model("convtranspose2d_groups", [4, 5, 5], conv_head(nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2), channels=4))
    model(
        "depthwise_separable",
        [4, 8, 8],
        conv_head(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 8, 1), channels=8),
    )
    model("asymmetric_padding", [3, 8, 8], conv_head(nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(3, 6, 3)))


def pools_and_resizing():
    model(
        "pools_ceil_mode",
        [3, 11, 11],
        nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.AvgPool2d(2, ceil_mode=True, padding=1, count_include_pad=False),
            head(6),
        ),
    )
    model(
        "avgpool_ceil_mode_counts_padding",
        [3, 11, 11],
        nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AvgPool2d(3, stride=2, ceil_mode=True, padding=1), head(6)
        ),
    )
    model(
        "adaptive_maxpool",
        [3, 8, 8],
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    model(
        "adaptive_avgpool_2",
        [3, 8, 8],
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)
        ),
    )
    model("lppool", [3, 8, 8], nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Sigmoid(), nn.LPPool2d(2, 2), head(6)))
    model(
        "maxpool_dilation",
        [3, 10, 10],
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.MaxPool2d(2, stride=1, dilation=2), head(6)),
    )
    model(
        "pixel_shuffle",
        [3, 6, 6],
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), head(2)),
    )
    model(
        "pixel_unshuffle",
        [3, 6, 6],
        nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 8, 3, padding=1), nn.ReLU(), head(8)),
    )
    for name, options in {
        "nearest": {"scale_factor": 2},
        "bilinear": {"scale_factor": 2, "mode": "bilinear"},
        "bilinear_aligned": {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        "bicubic": {"scale_factor": 2, "mode": "bicubic"},
    }.items():
        model(
            f"upsample_{name}",
            [3, 4, 4],
            conv_head(nn.Conv2d(3, 6, 3, padding=1), nn.Upsample(**options), nn.Conv2d(6, 6, 3)),
        )
    model(
        "pad_constant",
        [3, 6, 6],
        Call(
            lambda self, x: self.h(self.c(F.pad(x, (1, 2, 0, 1), value=0.5)).relu()), c=nn.Conv2d(3, 6, 3), h=head(6)
        ),
    )
    model(
        "channel_shuffle",
        [4, 6, 6],
        conv_head(nn.Conv2d(4, 8, 3, groups=2), nn.ChannelShuffle(2), channels=8),
    )


def normalizations():
    model("groupnorm", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)))
    model("instancenorm", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True)))
    model("instancenorm_plain", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6)))
    model("layernorm", [8], nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)))
    model("rmsnorm", [8], nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.ReLU(), nn.Linear(16, 4)))
    model("l2_normalize", [8], linear_call(F.normalize))
    model("local_response_norm", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3), nn.LocalResponseNorm(3)))
    model(
        "weight_norm",
        [8],
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4)),
    )
    model(
        "batchnorm1d",
        [8],
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)),
        train=True,
    )
    model("batchnorm2d", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)), train=True)
    model("batchnorm_first", [3, 8, 8], conv_head(nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3)), train=True)
    model(
        "batchnorm_momentum",
        [8],
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, eps=1e-3, momentum=0.3), nn.ReLU(), nn.Linear(16, 4)),
        train=True,
    )


class Recurrent(nn.Module):
    def __init__(self, cell, last=True, **options):
        super().__init__()
        self.cell = cell(5, 7, batch_first=True, **options)
        self.out = nn.Linear(14 if options.get("bidirectional") else 7, 4)
        self.last = last

    def forward(self, x):
        y, _ = self.cell(x)
        return self.out(y[:, -1] if self.last else y.mean(1))


def last_state(self, x):
    _, (h, _) = self.cell(x)
    return self.out(h[-1])


def recurrent():
    model("lstm", [6, 5], Recurrent(nn.LSTM))
    model("gru", [6, 5], Recurrent(nn.GRU))
    model("rnn", [6, 5], Recurrent(nn.RNN))
    model("lstm_both_ways", [6, 5], Recurrent(nn.LSTM, False, bidirectional=True))
    model("gru_both_ways", [6, 5], Recurrent(nn.GRU, False, bidirectional=True))
    model("lstm_two_layers", [6, 5], Recurrent(nn.LSTM, num_layers=2))
    model("lstm_last_state", [6, 5], Call(last_state, cell=nn.LSTM(5, 7, batch_first=True), out=nn.Linear(7, 4)))
    model(
        "lstm_on_embedding",
        [6],
        Call(
            lambda self, x: self.out(self.cell(self.embedding(x))[0][:, -1]),
            embedding=nn.Embedding(12, 5),
            cell=nn.LSTM(5, 7, batch_first=True),
            out=nn.Linear(7, 4),
        ),
        vocabulary=12,
    )


class ScaledDotProduct(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(8, 24), nn.Linear(8, 4), causal

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(rows, length, 8).mean(1))


class CausalBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)))

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.qkv(x).split(8, 2)
        scores = (q @ k.transpose(1, 2)) / 8**0.5
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).mean(1))


class PaddingMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        mask = (x == 0)[:, None, :]
        q, k, v = self.qkv(self.embedding(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(mask, -1e9)
        return self.out((scores.softmax(-1) @ v).mean(1))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.out(self.norm(self.layer(x))[:, 0])


class Bert(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.words, self.positions, self.norm = nn.Embedding(30, 16), nn.Embedding(8, 16), nn.LayerNorm(16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pool, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.words(x) + self.positions(torch.arange(x.shape[1])))
        return self.out(torch.tanh(self.pool(self.layers(x)[:, 0])))


def multihead():
    return Call(
        lambda self, x: self.out(self.heads(x, x, x, need_weights=False)[0].mean(1)),
        heads=nn.MultiheadAttention(8, 2, batch_first=True),
        out=nn.Linear(8, 4),
    )


def encoder_layer():
    return Call(
        lambda self, x: self.out(self.layer(x).mean(1)),
        layer=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        out=nn.Linear(8, 4),
    )


def attention():
    model("scaled_dot_product", [5, 8], ScaledDotProduct(False))
    model("scaled_dot_product_causal", [5, 8], ScaledDotProduct(True))
    model("causal_mask_in_a_buffer", [6, 8], CausalBuffer())
    model("padding_mask", [6], PaddingMask(), vocabulary=12)
    for suffix, pretrained in {"": False, "_pretrained": True}.items():
        model(f"multihead{suffix}", [5, 8], multihead(), pretrained=pretrained)
        model(f"encoder_layer{suffix}", [5, 8], encoder_layer(), pretrained=pretrained)
        model(f"vision_transformer{suffix}", [3, 8, 8], VisionTransformer(), pretrained=pretrained)
        model(f"bert_4_layers{suffix}", [8], Bert(4), vocabulary=30, pretrained=pretrained)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions, self.out = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out((self.words(x) + self.positions(torch.arange(x.shape[1]))).mean(1))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(16, 8) * 0.3), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(torch.tanh(F.linear(x, self.weight)) @ self.weight)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("deviation", torch.rand(8) + 0.5)
        self.body = mlp(nn.Tanh())

    def forward(self, x):
        return self.body((x - self.mean) / self.deviation)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.a.weight.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class ScalarParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))
        self.body = mlp(nn.Tanh())

    def forward(self, x):
        return self.body(x * self.scale) + self.shift


class EinsumWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(2, 4, 3) * 0.3), nn.Linear(6, 4)

    def forward(self, x):
        return self.out(torch.einsum("bhd,hde->bhe", x.view(-1, 2, 4), self.weight).flatten(1).tanh())


def parameters():
    model("embeddings", [6], Embeddings(), vocabulary=11)
    model(
        "tied_embedding",
        [6],
        Call(lambda self, x: self.words(x).mean(1).tanh() @ self.words.weight.t(), words=nn.Embedding(11, 8)),
        vocabulary=11,
    )
    tied = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    tied[2].weight = tied[0].weight
    model("tied_layers", [8], tied)
    called_twice = nn.Linear(8, 8)
    model("layer_called_twice", [8], nn.Sequential(called_twice, nn.Tanh(), called_twice, nn.Linear(8, 4)))
    model("transposed_weight", [8], Transposed())
    model("buffers", [8], Buffers())
    model("frozen_weight", [8], Frozen())
    model("scalar_parameters", [8], ScalarParameters())
    model("bilinear", [8], Call(lambda self, x: self.b(x[:, :4], x[:, 4:]), b=nn.Bilinear(4, 4, 4)))
    model(
        "einsum",
        [5, 8],
        Call(
            lambda self, x: self.b(torch.einsum("bsd,btd->bst", self.a(x), x).mean(1)),
            a=nn.Linear(8, 8),
            b=nn.Linear(5, 4),
        ),
    )
    model("einsum_weights", [8], EinsumWeights())


def shapes():
    model("slices", [8], linear_call(lambda x: torch.cat([x[:, ::2], x[:, 3:7], x[:, -2:]], 1), out=14))
    model("flip", [8], linear_call(lambda x: torch.flip(x, [1])))
    model("roll", [8], linear_call(lambda x: torch.roll(x, 3, 1)))
    model("chunk", [8], linear_call(lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), out=8))

    def uneven(x):
        p, q, r = x.split([4, 4, 8], 1)
        return torch.cat([p * p, q, r.tanh()], 1)

    model("split_uneven", [8], linear_call(uneven))
    model("glu", [8], nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 4)))
    model("outer_product", [8], linear_call(lambda x: (x.unsqueeze(2) * x.unsqueeze(1)).flatten(1), width=4))
    model("repeat", [8], linear_call(lambda x: x.unsqueeze(1).repeat(1, 3, 1).flatten(1), width=4, out=12))
    model("expand", [8], linear_call(lambda x: x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 12), width=4, out=12))
    model("index_select", [8], linear_call(lambda x: x[:, [3, 1, 1, 0]], out=4))
    model("where", [8], linear_call(lambda x: torch.where(x > 0, x.sin(), x**2)))
    model("regrouped_mean", [5, 8], linear_call(lambda x: x.flatten(1).view(-1, 4, 10).mean(2), width=8, out=4))
    model("residual", [8], linear_call(lambda x: x + x.tanh() * x.sigmoid()))
    model("dropout_in_evaluation", [8], nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4)))


def arithmetic():
    def reductions(x):
        parts = [x.amax(1), x.amin(1), x.norm(dim=1), x.std(1), x.var(1), x.logsumexp(1), (1 + 0.1 * x).prod(1)]
        return torch.cat(parts, 1)

    model("reductions", [5, 8], linear_call(reductions, width=6, out=42))

    def functions(x):
        smooth = x.cos() * x.pow(3) + torch.rsqrt(x**2 + 1) + torch.exp(-x).log1p()
        return smooth + torch.maximum(x, x.mean(1, True)) + torch.clamp(x, -0.3) + 1 / (x**2 + 1)

    model("functions", [8], linear_call(functions))
    model("roots", [8], linear_call(lambda x: (x.abs() + 0.1).sqrt() + x.atan() + x.sinh() * 0.1))


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        return (self.body(x) + self.shortcut(x)).relu()


class Inverted(nn.Module):
    def __init__(self, inside, outside, stride, factor):
        super().__init__()
        wide = inside * factor
        self.has_shortcut = stride == 1 and inside == outside
        self.body = nn.Sequential(
            nn.Conv2d(inside, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def forward(self, x):
        return x + self.body(x) if self.has_shortcut else self.body(x)


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.head = head(6)

    def forward(self, x):
        x = self.conv(x).relu()
        gate = torch.sigmoid(self.up(self.down(x.mean((2, 3), keepdim=True)).relu()))
        return self.head(x * gate)


def networks():
    stem = lambda stride, activation: [  # noqa: E731
        nn.Conv2d(3, 8, 3, stride, 1, bias=False),
        nn.BatchNorm2d(8),
        activation,
    ]
    widths = [(8, 8, 1), (8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2), (16, 16, 1), (16, 20, 2), (20, 20, 1)]
    model(
        "resnet18_narrow",
        [3, 32, 32],
        nn.Sequential(
            *stem(1, nn.ReLU()), nn.MaxPool2d(3, 2, 1), *[Residual(*width) for width in widths], head(20)
        ),
        train=True,
    )
    # With these weights, no activation comes so close to a bend of ReLU6 that rounding decides on its side.
    torch.manual_seed(1)
    model(
        "mobilenet_v2_narrow",
        [3, 16, 16],
        nn.Sequential(*stem(2, nn.ReLU6()), Inverted(8, 8, 1, 2), Inverted(8, 12, 2, 3), head(12)),
        train=True,
    )
    model("squeeze_excite", [3, 8, 8], SqueezeExcite())


class TwoTowers(nn.Module):
    """A model of a user and an item: their embeddings meet at the end."""

    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.items, self.item = nn.Embedding(20, 6), nn.Sequential(nn.Linear(6 + 3, 16), nn.Tanh(), nn.Linear(16, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, user, item, details):
        one, other = self.user(user), self.item(torch.cat([self.items(item), details], 1))
        return self.out(one * other)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, hidden):
        split = lambda y: y.view(y.shape[0], y.shape[1], 4, 4).transpose(1, 2)  # noqa: E731
        scores = split(self.query(x)) @ split(self.key(x)).transpose(2, 3) / 2 + hidden
        found = (scores.softmax(-1) @ split(self.value(x))).transpose(1, 2).reshape(x.shape)
        return self.norm(x + self.out(found))


class TokenClassifier(nn.Module):
    """A BERT with the three inputs and two of the outputs of those that people export."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.kinds = nn.Embedding(30, 16), nn.Embedding(8, 16), nn.Embedding(2, 16)
        self.norm, self.attention = nn.LayerNorm(16), nn.ModuleList([Attention(), Attention()])
        self.wide = nn.ModuleList([nn.Linear(16, 32), nn.Linear(16, 32)])
        self.narrow = nn.ModuleList([nn.Linear(32, 16), nn.Linear(32, 16)])
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.pool, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        x = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1])) + self.kinds(token_type_ids)
        x = self.norm(x)
        for attention, wide, narrow, norm in zip(self.attention, self.wide, self.narrow, self.norms):
            x = attention(x, hidden)
            x = norm(x + narrow(F.gelu(wide(x))))
        return self.out(torch.tanh(self.pool(x[:, 0]))), x


class KeyPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(12, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, ids, mask):
        x = self.layer(self.words(ids), src_key_padding_mask=~mask)
        weights = mask[:, :, None].float()
        return self.out((x * weights).sum(1) / weights.sum(1))


def several_inputs():
    model("two_towers", {"user": ([5], None), "item": ([], 20), "details": ([3], None)}, TwoTowers())
    ids = ([8], 30)
    bert = {"input_ids": ids, "attention_mask": ([8], None), "token_type_ids": ([8], 2)}
    model("bert_with_mask", bert, TokenClassifier(), pretrained=True, outputs=["y", "hidden"])
    model("key_padding_mask", {"ids": ([6], 12), "mask": ([6], bool)}, KeyPadding(), pretrained=True)


class Shared(nn.Module):
    """A normalisation of a parameter and of the input."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, 8))
        self.layerNorm = nn.LayerNorm(8)
        self.otherNorm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.otherNorm(self.layerNorm(x) + self.layerNorm(self.latents)).mean(1))


class Latents(nn.Module):
    """Attention of learned queries to the input."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 8))
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.heads(self.queries.expand(x.shape[0], -1, -1), x, x)[0].flatten(1))


def zero_biases(module):
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return module


def restored():
    model("convolution_without_bias", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 1, bias=False), nn.GroupNorm(2, 6)))
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 6, 2, 2), nn.ReLU(), head(6)]
    model("zero_biases", [3, 8, 8], zero_biases(nn.Sequential(*layers)))
    model("norm_of_a_parameter", [5, 8], Shared())
    model("learned_queries", [5, 8], Latents())
    model(
        "multihead_sequence_first",
        [5, 8],
        Call(
            lambda self, x: self.out(self.heads(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].mean(0)),
            heads=nn.MultiheadAttention(8, 4),
            out=nn.Linear(8, 4),
        ),
        pretrained=True,
    )


def export(name, exporter):
    row, module, vocabulary, train, outputs = MODELS[name]
    path = HERE / exporter / f"{name}.onnx"
    path.parent.mkdir(exist_ok=True)
    arguments = inputs(3, row, vocabulary)
    given = list(row) if isinstance(row, dict) else ["x"]
    names = {"input_names": given, "output_names": outputs}
    if exporter == "default":
        batch = torch.export.Dim("batch", min=2 if train else 1, max=1024)
        shapes = tuple({0: batch} for _ in given)
        # The optimization folds batch normalizations as if the model were not in training.
        torch.onnx.export(
            module, arguments, path, **names, dynamo=True, dynamic_shapes=shapes, verbose=False,
            external_data=False, optimize=not train,
        )
    else:
        mode = torch.onnx.TrainingMode.TRAINING if train else torch.onnx.TrainingMode.EVAL
        axes = {tensor: {0: "batch"} for tensor in given + outputs}
        torch.onnx.export(module, arguments, path, **names, dynamo=False, dynamic_axes=axes, training=mode)
    strip(path)


def strip(path):
    """Removes what is said about the source code of the nodes, and keeps their modules and calls."""
    exported = onnx.load(path)
    nodes = list(exported.graph.node) + [node for function in exported.functions for node in function.node]
    for node in nodes:
        kept = [entry for entry in node.metadata_props if entry.key in NODE_KEYS]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    onnx.save(exported, path)


def trained(name):
    row, module, vocabulary, train, _ = MODELS[name]
    module.train(train)
    x = inputs(ROWS, row, vocabulary)

    def trained_output():
        found = module(*x)
        return found[0] if isinstance(found, tuple) else found

    y = labels(trained_output().shape[-1]) if not train else labels(4)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(trained_output(), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return losses


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:])
    groups = [
        activations, convolutions, pools_and_resizing, normalizations, recurrent, attention, parameters, shapes,
        arithmetic, networks, several_inputs, restored,
    ]
    for seed, group in enumerate(groups):
        torch.manual_seed(seed)
        group()
    recorded = HERE / "losses.json"
    losses = json.loads(recorded.read_text()) if recorded.exists() else {}
    for name, (_, module, _, train, _) in MODELS.items():
        if wanted and name not in wanted:
            continue
        module.train(train)
        state = {key: value.clone() for key, value in module.state_dict().items()}
        for exporter in ["default", "earlier"]:
            module.load_state_dict(state)
            try:
                export(name, exporter)
            except Exception as error:
                print(f"{exporter} {name}: {str(error).splitlines()[0][:200]}")
        module.load_state_dict(state)
        losses[name] = trained(name)
    recorded.write_text(json.dumps(losses, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
