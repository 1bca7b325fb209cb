"""Exit rules that go by how sure the model is, to train with and to compare with.

They decode every step, as `kl` does, and a model that was trained without exits is sure too early: see docs/tasks.md.
The code of a checkpoint does not have them, so they are not registered under a name: a checkpoint can't ask for them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from recurrent_gpt2 import ExitPolicy, LoopView
from recurrent_gpt2.exit_policies import Policy, resolve_exit_policy


@dataclass(frozen=True)
class ConfidenceExit(ExitPolicy):
    """Stops when the most likely token is likely enough: 1 - max p < threshold."""

    default_threshold: ClassVar[float] = 0.1

    def measure(self, view: LoopView) -> torch.Tensor:
        return 1 - view.decode(view.state).float().softmax(-1).amax(-1)


@dataclass(frozen=True)
class EntropyExit(ExitPolicy):
    """Stops when the decoded distribution is sharp: its entropy in nats < threshold."""

    default_threshold: ClassVar[float] = 0.1

    def measure(self, view: LoopView) -> torch.Tensor:
        log_p = view.decode(view.state).float().log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)


OF_CONFIDENCE = {"confidence": ConfidenceExit, "entropy": EntropyExit}


def policy_to_train_with(given: Any) -> Policy | None:
    """An entry of `exit_policies` in a recipe: what `exit_policy=` takes, or one of the rules above by its name."""
    settings = {"name": given} if isinstance(given, str) else given
    if isinstance(settings, dict) and settings.get("name") in OF_CONFIDENCE:
        return OF_CONFIDENCE[settings["name"]](**{key: value for key, value in settings.items() if key != "name"})
    return resolve_exit_policy(given, 1)[0]
