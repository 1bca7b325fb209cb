"""What `model.optimize_for_inference()` replaces: matrices laid out once for products on CPU, and leaner norms.

A product with few rows is bound by reading the matrix, and on CPU the stock product lays a large matrix out anew at
every call. A packed matrix is laid out once, and the stock weight is given up for it: there is no second copy that
could be out of date, and no weight left to edit, train, adapt, quantise or save.
"""

import math
from functools import lru_cache
from typing import NoReturn

import torch
from torch import nn

PRECISIONS = ("float32",)
ROWS = 512  # that a layout is made for. It serves few rows as well as one that is made for them, but not the reverse.
LEAST_SIZE = 2**18  # of a matrix: smaller ones are multiplied faster by the stock product, at one row and at two cores
LOAD_AGAIN = "this model was optimised for inference and has given up its weights: load it again to "


class PackedLinear(nn.Linear):
    """A linear layer whose matrix is laid out for products. It is an `nn.Linear`, so that whatever looks for one to
    change finds it, reads `weight`, and is told."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError(LOAD_AGAIN + "compute gradients.")
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")

    def _refuse(self, *args, **kwargs) -> NoReturn:
        raise RuntimeError(LOAD_AGAIN + "change, copy, quantise, adapt or save it.")

    weight = property(_refuse)
    _save_to_state_dict = _load_from_state_dict = _refuse
    __deepcopy__ = __reduce_ex__ = _refuse


class LeanRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`: w x / sqrt(|x|^2 / d + eps), where the root is a hypotenuse over d^-1/2 |x| and eps^1/2.

    The stock one takes eight operations on CPU, this one five. It shares the weight of the norm that it replaces.
    """

    def __init__(self, norm: nn.RMSNorm):
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, True
        self.weight = norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = norm * constant(x.shape[-1] ** -0.5, x.dtype, x.device)
        return (x * self.weight) / rms.hypot(constant(math.sqrt(self.eps or 0), x.dtype, x.device))


@lru_cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor, which it would be turned into at every use. Never to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


@torch.no_grad()
def replace_layers(model: nn.Module) -> None:
    """Puts packed matrices and lean norms in the place of those that get faster by it, one at a time, so that no more
    than one weight is held twice. What shares its weight with another module, or has hooks, stays as it is."""
    uses: dict[torch.Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[parameter] = uses.get(parameter, 0) + 1
    for name, module in list(model.named_modules()):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            continue
        if type(module) is nn.Linear and _gains(module) and uses[module.weight] == 1:
            model.set_submodule(name, PackedLinear(module))
        elif type(module) is nn.RMSNorm:
            model.set_submodule(name, LeanRMSNorm(module))


def _gains(linear: nn.Linear) -> bool:
    weight = linear.weight
    is_plain = type(weight) is nn.Parameter and weight.dtype == torch.float32
    return is_plain and weight.numel() >= LEAST_SIZE and _has_packed_products()


def _has_packed_products() -> bool:
    """Whether this PyTorch has the operators, which are not part of its public interface, as they are known here."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    weight, x = torch.arange(6.0).view(2, 3), torch.ones(1, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return torch.allclose(torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], ""), x @ weight.T)
    except (AttributeError, RuntimeError, TypeError):
        return False
