"""What `model.optimize_for_inference()` replaces: matrices laid out once for products on CPU, and leaner norms.

A product with few rows is bound by reading the matrix, and on CPU the stock product lays a large matrix out anew at
every call. A packed matrix is laid out once, in float32 or in less, and the stock weight is given up for it: there is
no second copy that could be out of date, and no weight left to edit, train, adapt, quantise or save.

A token's result never depends on the others of its batch, in any precision: prefill stays what decoding is.
"""

import ctypes
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

ROWS = 512  # that a layout is made for. It serves few rows as well as one that is made for them, but not the reverse.
LEAST_SIZE = 2**18  # of a matrix: smaller ones are multiplied faster by the stock product, at one row and at two cores
HELD_TWICE = 2**24  # bytes at most of a head in float32 that is packed though it shares its weight with the embedding
FEW_ROWS = 10  # up to which a product with a large matrix that is not packed is faster the other way around
LOAD_AGAIN = "this model was optimised for inference and has given up its weights: load it again to "


class Unhooked(nn.Module):
    """A module that is called at once where it has no hooks: else looking for them costs as much as a small product."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) if self._forward_hooks or self._forward_pre_hooks else self.forward(x)


class PackedLinear(Unhooked, nn.Linear):
    """A linear layer whose matrix is laid out for products. It is an `nn.Linear`, so that whatever looks for one to
    change finds it, reads `weight`, and is told."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = self._pack(linear.weight.detach().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError(LOAD_AGAIN + "compute gradients.")
        return self._product(x)

    def _pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")

    def _refuse(self, *args, **kwargs) -> NoReturn:
        raise RuntimeError(LOAD_AGAIN + "change, copy, quantise, adapt or save it.")

    weight = property(_refuse)
    _save_to_state_dict = _load_from_state_dict = _refuse
    __deepcopy__ = __reduce_ex__ = _refuse


class PackedLinearBFloat16(PackedLinear):
    """The matrix and what it is multiplied with in bfloat16, sums in float32."""

    def _pack(self, weight: torch.Tensor) -> Any:
        return super()._pack(weight.bfloat16())

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.ops.mkldnn._linear_pointwise.default(x.bfloat16(), self._packed, None, "none", [], "").float()
        return product if self.bias is None else product + self.bias


class PackedLinearInt8(PackedLinear):
    """The matrix in 7 bits with a scale for every output, what it is multiplied with in 8 with a scale for every row.

    (The stock dynamic product has one scale for all rows, which makes a token's result depend on its company. 7 bits,
    since without VNNI instructions sums of two products of 8 bits may overflow; and the matrix has them, since it is
    activations that have few large values among many small ones.)
    """

    def _pack(self, weight: torch.Tensor) -> Any:
        scales = scales_of(weight, levels=63)[:, 0]
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # this way of making one is deprecated
            quantised = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        return torch.ops.quantized.linear_prepack(quantised, None)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # a norm of this order takes three times as long
        product = self._multiply(x / largest, 1 / 127, 128, self._packed).mul_(largest)
        return product if self.bias is None else product + self.bias


PRECISIONS = {"float32": PackedLinear, "bfloat16": PackedLinearBFloat16, "int8": PackedLinearInt8}


def scales_of(weight: torch.Tensor, levels: int) -> torch.Tensor:
    """[rows, 1]: what the integers from -levels to levels that stand for a row are multiplied with."""
    return weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / levels


class SmallEmbedding(nn.Embedding):
    """An embedding in the precision of the head with which it shared its weight; in int8, with a scale for every row.

    The head's matrix is laid out for products, where no row can be looked up. In less precision the two together take
    no more memory than their one weight did in float32.
    """

    def __init__(self, embedding: nn.Embedding, precision: str):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        weight = embedding.weight.detach()
        self._scales = scales_of(weight, levels=127) if precision == "int8" else None
        if self._scales is not None:
            weight = (weight / self._scales).round_()
        self._rows = weight.to({"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[precision])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._rows[ids].float()
        return rows if self._scales is None else rows * self._scales[ids]

    weight = PackedLinear.weight
    _save_to_state_dict = _load_from_state_dict = PackedLinear._refuse
    __deepcopy__ = __reduce_ex__ = PackedLinear._refuse


class KeptLinear(Unhooked, nn.Linear):
    """A linear layer that is as fast as it can be. Its matrix stays what it was, and is given up too: what an optimised
    model refuses does not depend on its size."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._kept = linear.weight.detach().t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError(LOAD_AGAIN + "compute gradients.")
        return x @ self._kept if self.bias is None else nn.functional.linear(x, self._kept.t(), self.bias)

    weight = PackedLinear.weight
    _save_to_state_dict = _load_from_state_dict = PackedLinear._refuse
    __deepcopy__ = __reduce_ex__ = PackedLinear._refuse


class SharedLinear(Unhooked, nn.Linear):
    """A large head that shares its weight with the embedding, and so keeps it as it is. With few rows the stock product
    runs on one core, or lays the matrix out first; the other way around, with the rows as columns, it does neither.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if x.requires_grad or not 0 < rows <= FEW_ROWS:
            return super().forward(x)
        given = x.reshape(rows, -1)
        columns = (given.repeat(2, 1) if rows == 1 else given).t()  # a product with a vector runs on one core
        product = (self.weight @ columns)[:, :rows].t().contiguous().view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


class LeanRMSNorm(Unhooked, nn.RMSNorm):
    """`nn.RMSNorm`: w x / sqrt(|x|^2 / d + eps), which is (d^1/2 w) x over the hypotenuse of |x| and (d eps)^1/2.

    The stock one takes eight operations on CPU, this one four. Its weight is given up, as those of matrices are.
    """

    def __init__(self, norm: nn.RMSNorm):
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, True
        weight, (width,) = norm.weight.detach(), norm.normalized_shape
        self._scaled = weight * math.sqrt(width)
        self._least = weight.new_tensor(math.sqrt(width * (norm.eps or 0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._scaled / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(self._least)

    weight = PackedLinear.weight
    _save_to_state_dict = _load_from_state_dict = PackedLinear._refuse
    __deepcopy__ = __reduce_ex__ = PackedLinear._refuse


@torch.no_grad()
def replace_layers(
    model: nn.Module,
    precision: str,
    least_size: int | None = None,
    keep: Callable[[str], bool] = lambda name: False,
    layouts: dict[str, type[PackedLinear]] = PRECISIONS,
) -> None:
    """Puts packed matrices and lean norms in the place of those that get faster by it, one at a time, so that no more
    than one weight is held twice. What shares its weight with another module, or has hooks, stays as it is; but a head
    that shares it with the embedding is packed in less precision than float32, or where it is small, and the embedding
    is kept in the same. Where it is large, both keep the weight.

    To see what less precision does to a small model, `least_size` takes smaller matrices too; `keep` leaves some out.
    `layouts`: how matrices are packed, by precision.
    """
    packed = layouts[precision]
    uses: dict[int, list[str]] = {}  # by identity, and names alone below: a reference would keep a weight alive
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), []).append(name)
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if _has_hooks(module):
            continue
        if type(module) is nn.Linear and not keep(name) and _gains(module, packed, least_size):
            sharing = [other for other in uses[id(module.weight)] if other != name]
            if sharing:
                embedding = model.get_submodule(sharing[0])
                if len(sharing) > 1 or not isinstance(embedding, nn.Embedding) or _has_hooks(embedding):
                    continue
                if precision == "float32" and module.weight.nbytes > HELD_TWICE:
                    model.set_submodule(name, SharedLinear(module))
                    continue
                model.set_submodule(sharing[0], SmallEmbedding(embedding, precision))
            return_freed_memory()
            model.set_submodule(name, packed(module))
        elif type(module) is nn.RMSNorm:
            model.set_submodule(name, LeanRMSNorm(module))
    del module
    return_freed_memory()


def return_freed_memory() -> None:
    """To the system. A weight that was given up leaves a gap on the heap into which the next packed one does not fit,
    aligned as it is: without this, half of the weights and more would be held twice."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc has it
    if trim is not None:
        trim(0)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def give_up_weights(model: nn.Module) -> None:
    """Takes the weights of all other matrices out of reach, but for those that are shared, or have hooks."""
    weights = [parameter for module in model.modules() for parameter in module.parameters(recurse=False)]
    for name, module in list(model.named_modules()):
        if (
            type(module) is nn.Linear
            and not _has_hooks(module)
            and sum(module.weight is weight for weight in weights) == 1
        ):
            model.set_submodule(name, KeptLinear(module))


def look_up_faster(model: nn.Module) -> None:
    """A module finds its parts by `__getattr__`, after all else has been searched: several times a microsecond in every
    layer. Among its own attributes they are found at once. (Where a part is replaced, `nn.Module` takes it out there.)
    """
    for module in model.modules():
        vars(module).update(module._modules)


def _gains(linear: nn.Linear, packed: type[PackedLinear], least_size: int | None) -> bool:
    weight, least_size = linear.weight, LEAST_SIZE if least_size is None else least_size
    is_plain = type(weight) is nn.Parameter and weight.dtype == torch.float32
    return is_plain and weight.numel() >= least_size and _works(packed)


def _works(packed: type[PackedLinear]) -> bool:
    """Whether this PyTorch has the operators, which are not part of its public interface, as they are known here."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    linear, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(6.0).view(2, 3))
        try:
            return torch.allclose(packed(linear)(x), linear(x), rtol=0.05)
        except (AttributeError, RuntimeError, TypeError):
            return False
