"""Depth tasks: training data in which the loops that every token needs are known."""

from .chains import Chains
from .programs import Programs
from .task import Task, TaskBatch, TaskSource, available_tasks, register_task
from .vocabulary import extended_tokenizer, ids_of_tokens, task_tokenizer

__all__ = [
    "Chains",
    "Programs",
    "Task",
    "TaskBatch",
    "TaskSource",
    "available_tasks",
    "extended_tokenizer",
    "ids_of_tokens",
    "register_task",
    "task_tokenizer",
]
