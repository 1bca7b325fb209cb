"""Depth tasks: training data in which the loops that every token needs are known."""

from .chains import Chains
from .depo import Depo
from .programs import Programs
from .reasoning_gym import ReasoningGym
from .task import Task, TaskBatch, TaskSource, available_tasks, register_task
from .vocabulary import extended_tokenizer, ids_of_tokens, task_tokenizer

__all__ = [
    "Chains",
    "Depo",
    "Programs",
    "ReasoningGym",
    "Task",
    "TaskBatch",
    "TaskSource",
    "available_tasks",
    "extended_tokenizer",
    "ids_of_tokens",
    "register_task",
    "task_tokenizer",
]
