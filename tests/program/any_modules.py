"""Modules as people write them: small, but each with a way of its own to be hard to record. Imported by tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Inputs = Callable[[int], torch.Tensor]
CLASSES = 5


class Written(nn.Module):
    """A forward written as a function of (module, x), with parts."""

    def __init__(self, write: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.write = write
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.write(self, x)


def head(width: int) -> nn.Module:
    return nn.Linear(width, CLASSES)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.3)


def numbers(*shape: int) -> Inputs:
    return lambda rows: torch.randn(rows, *shape, dtype=torch.float64)


def ids(*shape: int) -> Inputs:
    return lambda rows: torch.randint(12, (rows, *shape))


class Residual(nn.Module):
    """The block of ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        self.body = nn.Sequential(conv[0], nn.BatchNorm2d(width), nn.ReLU(inplace=True), conv[1], nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + x)


class Buffered(nn.Module):
    """A constant buffer, and one that forward assigns."""

    scale: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("calls", torch.zeros(()))
        self.out = head(6)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return self.out(x * self.scale)


class Doubled(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def doubled(self: Any, x: Any) -> Any:
    return self.out(Doubled.apply(self.hidden(x)))  # type: ignore[no-untyped-call]  # torch


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), Residual(4), nn.MaxPool2d(2), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        head(4),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU6(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
        nn.BatchNorm2d(4),
        nn.Hardswish(),
        nn.Conv2d(4, 8, 1),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        head(8),
    )


def unet(self: Any, x: Any) -> Any:
    down = self.down(x)
    wide = F.interpolate(down, scale_factor=2, mode="bilinear", align_corners=False)
    same = F.interpolate(down, size=x.shape[2:])
    return self.out(torch.cat([self.up(wide), same, x], 1)).mean((2, 3))


def vit(self: Any, x: Any) -> Any:
    patches = self.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.position
    return self.head(self.encoder(tokens)[:, 0])


def encoder(layers: int = 1, **kwargs: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def attention(self: Any, x: Any) -> Any:
    late = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    mixed, weights = self.attention(x, x, x, key_padding_mask=x[..., 0] > 3.0, attn_mask=late)
    return self.out(mixed.mean(1) + weights.mean((1, 2)).unsqueeze(1))


def scaled_attention(self: Any, x: Any) -> Any:
    query, key, value = self.project(x).chunk(3, -1)
    return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).mean(1))


def sinusoids(self: Any, x: Any) -> Any:
    position, rate = torch.arange(x.shape[1]).unsqueeze(1), torch.exp(torch.arange(0, 8, 2) / -8.0)
    encoding = torch.zeros(x.shape[1], 8)
    encoding[:, 0::2], encoding[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    return self.out(self.hidden(x + encoding).mean(1))


def windows(self: Any, x: Any) -> Any:
    rows, high, wide, width = x.shape
    parts = x.view(rows, high // 2, 2, wide // 2, 2, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, width)
    back = self.hidden(parts).view(rows, high // 2, wide // 2, 2, 2, width).permute(0, 1, 3, 2, 4, 5)
    return self.out(back.reshape(rows, high, wide, width).mean((1, 2)))


def made_inside(self: Any, x: Any) -> Any:
    mask, zeros = torch.arange(x.shape[1]) < 3, torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype)
    return self.out(torch.where(mask, x, zeros))


def masked(self: Any, x: Any) -> Any:
    hidden = self.hidden(x).masked_fill(x > 1.0, 0.0)
    hidden = hidden.clone()
    hidden[x < -1.0] = 0.5
    return self.out(hidden.clamp_(max=2.0))


def in_place(self: Any, x: Any) -> Any:
    x.mul_(2.0)
    x[:, 0] = 0.0
    return self.out(x)


def complex_numbers(self: Any, x: Any) -> Any:
    z = torch.complex(self.hidden(x), self.other(x))
    return self.out((z * z.conj()).real + torch.fft.rfft(x).abs().sum(-1, keepdim=True))


def checkpointed(self: Any, x: Any) -> Any:
    hidden = checkpoint(self.hidden, self.first(x), use_reentrant=False)
    return self.out(checkpoint(self.other, hidden, use_reentrant=True))


def pick(self: Any, x: Any) -> Any:
    hidden = self.hidden(x)
    best, order = hidden.topk(3, -1).values, torch.gather(hidden, 1, x.argsort(-1))
    return self.out(torch.cat([best, order.cumsum(-1)[:, [0, 2, 4]]], 1))


def wide(name: str = "hidden") -> dict[str, nn.Module]:
    return {name: nn.Linear(6, 6)}


MODULES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "resnet": (resnet, numbers(2, 8, 8)),
    "mobilenet": (mobilenet, numbers(2, 8, 8)),
    "unet with interpolate": (
        lambda: Written(
            unet, down=nn.Conv2d(2, 4, 3, stride=2, padding=1), up=nn.Conv2d(4, 4, 1), out=nn.Conv2d(10, 5, 1)
        ),
        numbers(2, 8, 8),
    ),
    "upsampling and shuffling": (
        lambda: nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bicubic"),
            nn.PixelUnshuffle(2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            head(256),
        ),
        numbers(2, 4, 4),
    ),
    "vit": (
        lambda: Written(
            vit,
            patch=nn.Conv2d(2, 8, 4, stride=4),
            token=weight(1, 1, 8),
            position=weight(1, 5, 8),
            encoder=encoder(1, norm_first=True, activation="gelu"),
            head=head(8),
        ),
        numbers(2, 8, 8),
    ),
    "transformer encoder": (lambda: nn.Sequential(encoder(), nn.Flatten(), head(40)), numbers(5, 8)),
    "transformer": (
        lambda: Written(
            lambda self, x: self.out(self.inner(x, x).mean(1)),
            inner=nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
            out=head(8),
        ),
        numbers(5, 8),
    ),
    "multi-head attention, masked": (
        lambda: Written(attention, attention=nn.MultiheadAttention(8, 2, batch_first=True), out=head(8)),
        numbers(5, 8),
    ),
    "scaled attention": (lambda: Written(scaled_attention, project=nn.Linear(8, 24), out=head(8)), numbers(5, 8)),
    "sinusoids": (lambda: Written(sinusoids, hidden=nn.Linear(8, 8), out=head(8)), numbers(5, 8)),
    "windows": (lambda: Written(windows, **wide(), out=head(6)), numbers(4, 4, 6)),
    "einsum": (
        lambda: Written(lambda self, x: self.out(torch.einsum("bij,kj->bk", x, self.w)), w=weight(6, 8), out=head(6)),
        numbers(5, 8),
    ),
    "one layer twice": (
        lambda: Written(
            lambda self, x: self.out(torch.tanh(self.hidden(torch.tanh(self.hidden(x))))), **wide(), out=head(6)
        ),
        numbers(6),
    ),
    "table as weight": (
        lambda: Written(
            lambda self, x: self.out(F.linear(self.table(x).mean(1), self.table.weight)),
            table=nn.Embedding(12, 6, padding_idx=0),
            out=head(12),
        ),
        ids(4),
    ),
    "buffers": (Buffered, numbers(6)),
    "bag of rows": (
        lambda: Written(
            lambda self, x: self.out(torch.cat([self.mean(x), self.largest(x)], 1)),
            mean=nn.EmbeddingBag(12, 6),
            largest=nn.EmbeddingBag(12, 6, mode="max"),
            out=head(12),
        ),
        ids(4),
    ),
    "checkpoint": (
        lambda: Written(
            checkpointed, **wide("first"), **wide(), other=nn.Sequential(nn.Linear(6, 6), nn.Tanh()), out=head(6)
        ),
        numbers(6),
    ),
    "complex numbers": (lambda: Written(complex_numbers, **wide(), **wide("other"), out=head(6)), numbers(6)),
    "tensors made inside": (lambda: Written(made_inside, out=head(6)), numbers(6)),
    "masks": (lambda: Written(masked, **wide(), out=head(6)), numbers(6)),
    "input written in place": (lambda: Written(in_place, out=head(6)), numbers(6)),
    "picking": (lambda: Written(pick, **wide(), out=head(6)), numbers(6)),
    "sequences": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3),
            nn.InstanceNorm1d(4, affine=True),
            nn.PReLU(4),
            nn.ReflectionPad1d(1),
            nn.Flatten(),
            nn.Linear(36, 12),
            nn.GLU(),
            nn.RMSNorm(6),
            nn.Softplus(),
            head(6),
        ),
        numbers(2, 9),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.Mish(), nn.AvgPool3d(2), nn.Flatten(), head(24)),
        numbers(1, 5, 5, 5),
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.SELU(), head(6)),
        numbers(6),
    ),
    "bilinear": (lambda: Written(lambda self, x: self.out(x, x), out=nn.Bilinear(6, 6, CLASSES)), numbers(6)),
    "distances": (
        lambda: Written(
            lambda self, x: self.out(torch.cdist(self.hidden(x), self.w)), **wide(), w=weight(6, 6), out=head(6)
        ),
        numbers(6),
    ),
    "patches": (lambda: nn.Sequential(nn.Unfold(3), nn.Flatten(), head(72)), numbers(2, 4, 4)),
    "unpooling": (
        lambda: Written(
            lambda self, x: self.out(
                F.max_unpool2d(*F.max_pool2d(self.conv(x), 2, return_indices=True), [2, 2]).flatten(1)
            ),
            conv=nn.Conv2d(2, 2, 1),
            out=head(32),
        ),
        numbers(2, 4, 4),
    ),
    "a derivative of its own": (
        lambda: Written(doubled, **wide(), out=head(6)),
        numbers(6),
    ),
}
# Statistics are those of a replica's rows, so that two replicas are not one.
NORMALISED = {"resnet", "mobilenet"}
