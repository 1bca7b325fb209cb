"""Muon (Jordan et al., 2024) for the matrices between states, AdamW for embeddings and norms."""

import math

import torch

# Of the quintic iteration of Jordan et al.: five steps take all but very small singular values to about 0.7 to 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised momentum in groups with `orthogonal: True`, and by AdamW in the others.

    One optimiser for both, so that the stock scheduler, trainer and checkpoints handle it as any other. torch has a
    Muon too, for matrices alone and in bfloat16, which is slow on a CPU that has no such products.
    """

    def __init__(self, groups: list[dict], momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95), eps=1e-8):
        defaults = {"lr": 1e-3, "weight_decay": 0.0, "orthogonal": False}
        super().__init__(groups, {**defaults, "momentum": momentum, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._orthogonal_update if group["orthogonal"] else self._adam_update
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = update(parameter.grad, self.state[parameter], group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        return loss

    @staticmethod
    def _orthogonal_update(gradient: torch.Tensor, state: dict, group: dict) -> torch.Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        rows, columns = gradient.shape
        # Nesterov's look-ahead; and a tall matrix moves its outputs as far as a square one does.
        return orthogonalised(gradient.lerp(momentum, group["momentum"])) * math.sqrt(max(1, rows / columns))

    @staticmethod
    def _adam_update(gradient: torch.Tensor, state: dict, group: dict) -> torch.Tensor:
        if not state:
            state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["square"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
        return mean / square.sqrt_().add_(group["eps"])


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values brought near one, by a Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.float() / (wide.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide is matrix else x.T).to(matrix.dtype)
