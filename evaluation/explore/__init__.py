"""A page to watch a model think: `python -m evaluation.explore CHECKPOINT ...`. See docs/explore.md."""
