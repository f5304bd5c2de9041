"""Models of the zoo with several layers: attention, convolutional networks, several inputs."""

import math

import torch
import torch.nn.functional as F
from models import Call, conv_head, head, linear_call, model
from torch import nn


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


class UNet(nn.Module):
    """An image from an image, with an up-sampling and a shortcut around it."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.join, self.out = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        wide = self.down(x).relu()
        deep = self.deep(F.max_pool2d(wide, 2)).relu()
        return self.out(self.join(torch.cat([self.up(deep), wide], 1)).relu())


class PaddedTokens(nn.Module):
    """The mean of all tokens, padding among them, whose row stays."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 4)
        with torch.no_grad():
            self.words.weight[0] = 0.5

    def forward(self, x):
        return self.out(self.words(x).mean(1).tanh())


class MaskOfTruthValues(nn.Module):
    """Attention that a mask of truth values hides keys from."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(self.words(x))[:, None].chunk(3, -1)
        seen = (x != 0)[:, None, None, :]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).mean((1, 2)))


class Transformer(nn.Module):
    """An image that the model turns and moves before it reads it."""

    def __init__(self):
        super().__init__()
        self.conv, self.place = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(108, 6)
        self.out = nn.Linear(144, 4)

    def forward(self, x):
        theta = self.place(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, [x.shape[0], 4, 6, 6], align_corners=False)
        return self.out(F.grid_sample(self.conv(x), grid, align_corners=False).flatten(1))


class ScaledBias(nn.Module):
    """A bias times a number, in one call."""

    def __init__(self):
        super().__init__()
        self.bias, self.out = nn.Parameter(torch.randn(1, 8, 8)), nn.Linear(64, 4)

    def forward(self, x):
        return self.out(torch.baddbmm(self.bias, x[:, :, None], x[:, None, :], beta=0.5).tanh().flatten(1))


def reported():
    model("unet_up_mse", [2, 8, 8], UNet(), loss="mse")
    model("embedding_padding_idx", [6], PaddedTokens(), vocabulary=12)
    model("attention_mask_of_truth_values", [6], MaskOfTruthValues(), vocabulary=12)
    model("spatial_transformer", [3, 6, 6], Transformer())
    model("scaled_bias", [8], ScaledBias())


def positions():
    def of_each_row(x, places):
        return torch.tensor([places]).expand(x.shape[0], -1)

    def changed(x):
        y = x.clone()
        y[:, 2:5] = x[:, 5:8].tanh()
        return y

    for name, width, function in [
        ("gather", 3, lambda x: x.gather(1, of_each_row(x, [0, 2, 5]))),
        ("gather_argmax", 16, lambda x: x * x.gather(1, x.argmax(1, keepdim=True))),
        ("topk", 3, lambda x: x.topk(3, 1).values),
        ("topk_positions", 3, lambda x: x.sin().gather(1, x.topk(3, 1, largest=False).indices)),
        ("sort", 16, lambda x: x.sort(1, descending=True).values.cumsum(1)),
        ("scatter", 16, lambda x: torch.zeros_like(x).scatter(1, x.topk(3, 1).indices, x.topk(3, 1).values)),
        (
            "scatter_add",
            16,
            lambda x: torch.zeros_like(x).scatter_add(1, of_each_row(x, [0, 2, 5, 5]), x[:, :4]),
        ),
        ("changed_columns", 16, changed),
        ("index_add", 16, lambda x: x.index_add(1, torch.tensor([0, 3, 1]), x[:, :3])),
        ("one_hot", 16, lambda x: F.one_hot(x.argmax(1), 16).float() * x),
        ("einsum_ellipsis", 4, lambda x: torch.einsum("...i,...i->...", x.view(-1, 4, 4), x.view(-1, 4, 4))),
    ]:
        model(name, [8], linear_call(function, out=width))


class RelativePositions(nn.Module):
    """Attention with a bias for the bucket of each distance, as in T5."""

    def __init__(self):
        super().__init__()
        self.words, self.bias = nn.Embedding(12, 8), nn.Embedding(16, 2)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def buckets(self, length):
        places = torch.arange(length)
        way = places[None] - places[:, None]
        distance = way.abs()
        far = 4 + (torch.log(distance.float() / 4) / math.log(8) * 4).long()
        far = torch.min(far, torch.full_like(far, 7))
        return (way > 0).long() * 8 + torch.where(distance < 4, distance, far)

    def forward(self, x):
        rows, length = x.shape
        q, k, v = self.qkv(self.words(x)).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) + self.bias(self.buckets(length)).permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, 8).mean(1))


def selections():
    def last(self, x):
        places = ((x != 0).sum(1) - 1).clamp(min=0)
        return self.out(self.words(x)[torch.arange(x.shape[0]), places])

    def shifted(self, x):
        places = (torch.arange(x.shape[1]) + 1).unsqueeze(0)
        return self.out((self.words(x) + self.places(places)).tanh().mean(1))

    words = {"words": nn.Embedding(12, 8), "out": nn.Linear(8, 4)}
    model("last_token", [6], Call(last, **words), vocabulary=12)
    model("shifted_positions", [6], Call(shifted, **words, places=nn.Embedding(9, 8)), vocabulary=12)
    model("relative_positions", [10], RelativePositions(), vocabulary=12)
    diagonal = linear_call(lambda x: torch.diagonal(x.view(-1, 4, 4), dim1=1, dim2=2), out=4)
    model("diagonal", [8], diagonal)
    model("einsum_diagonal", [8], linear_call(lambda x: torch.einsum("bii->bi", x.view(-1, 4, 4)), out=4))


class LearnedState(nn.Module):
    """Steps first, from a state that is a parameter."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.state, self.out = cell(5, 7), nn.Parameter(torch.randn(1, 1, 7)), nn.Linear(7, 4)

    def forward(self, x):
        state = self.state.expand(-1, x.shape[0], -1).contiguous()
        y, _ = self.cell(x.transpose(0, 1), (state, state) if isinstance(self.cell, nn.LSTM) else state)
        return self.out(y[-1])


def rotated(x):
    """Rotary positions: pairs of elements turn by angles that grow with the place."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=torch.float32)[:, None]
    angles = places * 10000 ** (-torch.arange(half, dtype=torch.float32) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class GroupedQueries(nn.Module):
    """Four heads of queries on two of keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.o, self.out = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        rows, steps, _ = x.shape
        q, k, v = (part(x).view(rows, steps, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(2, 1) for part in (rotated(k), v))
        y = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return self.out(self.o(y.transpose(1, 2).reshape(rows, steps, 16)).mean(1))


class Decoded(nn.Module):
    """Attention to a memory that is a parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.memory, self.out = nn.Parameter(torch.randn(1, 5, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.layer(x, self.memory.expand(x.shape[0], -1, -1)).mean(1))


def found_later():
    model("lstm_learned_state", [6, 5], LearnedState(nn.LSTM))
    model("gru_learned_state", [6, 5], LearnedState(nn.GRU))
    model("grouped_queries_rotary", [6, 8], GroupedQueries())
    model(
        "cosine_similarity",
        [8],
        Call(
            lambda self, x: 5 * F.cosine_similarity(self.a(x)[:, None], self.w[None], -1),
            a=nn.Linear(8, 8),
            w=nn.Parameter(torch.randn(4, 8)),
        ),
    )
    model("batchnorm_in_evaluation", [3, 8, 8], conv_head(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)))
    model("decoder_layer", [5, 8], Decoded())
