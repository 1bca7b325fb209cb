"""`Linear` and `RMSNorm`: the stock layers' functions and weights, computed faster where no gradient is asked for.

**Packed weights.** A product with few rows is bound by reading the matrix, and on CPU the stock product lays the matrix
out anew at every call. Inside `with packed_weights(model)` every `Linear` of the model multiplies with a copy that is
laid out once. The copy takes as much memory as the weights, and is kept for the next time: on entry the weights are
compared with those that it was made from (by a checksum), and it is made anew if they have changed. Weights must not be
changed inside.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import nn

ROWS = 512  # that a layout is made for. It serves few rows as well as one that is made for them, but not the reverse.
MANY_ROWS = 256  # beyond which the stock product is the faster one, unless the matrix is wider than what it is given


class Linear(nn.Linear):
    """`nn.Linear`, without bias."""

    _packed: torch.Tensor | None = None  # in use
    _kept: tuple[tuple, torch.Tensor] | None = None  # what it was made from, and the copy

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # as it is while a checkpoint is loaded: there is nothing to fill, slowly
            super().reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self._packed
        if packed is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return nn.functional.linear(x, self.weight)
        has_many_rows = x.numel() > MANY_ROWS * self.in_features and self.out_features <= self.in_features
        if has_many_rows or x.dtype != torch.float32 or x.device.type != "cpu":
            return nn.functional.linear(x, self.weight)
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")

    def pack(self) -> None:
        """Starts to use a copy of the weight that is laid out for products."""
        weight = self.weight
        is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32
        if not is_plain or weight.is_inference():
            return
        made_from = (weight.data_ptr(), weight._version, _checksum(weight))
        if self._kept is None or self._kept[0] != made_from:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
            self._kept = made_from, packed
        self._packed = self._kept[1]

    def unpack(self) -> None:
        self._packed = None

    def _apply(self, *args, **kwargs):
        self._kept = None  # weights that move or change their precision need no copy of what they were
        return super()._apply(*args, **kwargs)

    def __getstate__(self):
        """Copies and pickles come without packed weights."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_kept")}


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    layers = []  # that are not packed already, further out
    if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and _has_packed_products():
        layers = [module for module in model.modules() if isinstance(module, Linear) and module._packed is None]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.pack()
        yield
    finally:
        for layer in layers:
            layer.unpack()


@lru_cache
def _has_packed_products() -> bool:
    """Whether this PyTorch has the operators, which are not part of its public interface, as they are known here."""
    weight, x = torch.arange(6.0).view(2, 3), torch.ones(1, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return torch.allclose(torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], ""), x @ weight.T)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _checksum(weight: torch.Tensor) -> int:
    """Of all bits and of which row they are in. Versions don't count changes that are made through `weight.data`; of
    those, values that change places within a row are not seen."""
    rows = weight.detach().contiguous().view(torch.int32).sum(1)
    return (rows * torch.arange(1, len(rows) + 1)).sum().item()


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`: w x / sqrt(|x|^2 / d + eps), where the root is a hypotenuse over d^-1/2 |x| and eps^1/2.

    The stock one takes eight operations on CPU, this one five.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.dtype not in (torch.float32, torch.float64):
            return super().forward(x)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = norm.mul_(constant(x.shape[-1] ** -0.5, x.dtype, x.device))
        return (x * self.weight).div_(rms.hypot_(constant(math.sqrt(self.eps), x.dtype, x.device)))


@lru_cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor, which it would be turned into at every use. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)
