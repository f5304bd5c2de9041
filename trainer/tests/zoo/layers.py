"""Models of the zoo with one layer or function each."""

import torch
import torch.nn.functional as F
from models import Call, conv_head, head, linear_call, mlp, model
from torch import nn


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
