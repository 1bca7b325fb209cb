"""Recurrent-depth language models for `transformers`: loops of layers that each token leaves when it has converged."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .exit_policies import (
    AccelerationExit,
    AllExit,
    ArgmaxExit,
    ConfidenceExit,
    CosineExit,
    EntropyExit,
    ExitPolicy,
    FixedLoops,
    KLExit,
    LoopView,
    StepNormExit,
    available_exit_policies,
    register_exit_policy,
)
from .geometry import LoopGeometry
from .loop_cache import LoopCache
from .modeling_recurrent_gpt2 import (
    RecurrentGPT2ForCausalLM,
    RecurrentGPT2Model,
    RecurrentGPT2PreTrainedModel,
    sample_num_loops,
)

__version__ = "0.2.0"

AutoConfig.register("recurrent_gpt2", RecurrentGPT2Config, exist_ok=True)
AutoModel.register(RecurrentGPT2Config, RecurrentGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(RecurrentGPT2Config, RecurrentGPT2ForCausalLM, exist_ok=True)

__all__ = [
    "AccelerationExit",
    "AllExit",
    "ArgmaxExit",
    "ConfidenceExit",
    "CosineExit",
    "EntropyExit",
    "ExitPolicy",
    "FixedLoops",
    "KLExit",
    "LoopCache",
    "LoopGeometry",
    "LoopView",
    "RecurrentGPT2Config",
    "RecurrentGPT2ForCausalLM",
    "RecurrentGPT2Model",
    "RecurrentGPT2PreTrainedModel",
    "StepNormExit",
    "available_exit_policies",
    "register_exit_policy",
    "sample_num_loops",
]
