"""Exit rules that go by how sure the model is, to train with and to compare with.

They decode every step, as `kl` does, and a model that was trained without exits is sure too early: see docs/tasks.md.
The code of a checkpoint does not have them; import this module to use them by name.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from recurrent_gpt2 import ExitPolicy, LoopView, register_exit_policy


@register_exit_policy("confidence")
@dataclass(frozen=True)
class ConfidenceExit(ExitPolicy):
    """Stops when the most likely token is likely enough: 1 - max p < threshold."""

    default_threshold: ClassVar[float] = 0.1

    def measure(self, view: LoopView) -> torch.Tensor:
        return 1 - view.decode(view.state).float().softmax(-1).amax(-1)


@register_exit_policy("entropy")
@dataclass(frozen=True)
class EntropyExit(ExitPolicy):
    """Stops when the decoded distribution is sharp: its entropy in nats < threshold."""

    default_threshold: ClassVar[float] = 0.1

    def measure(self, view: LoopView) -> torch.Tensor:
        log_p = view.decode(view.state).float().log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)
