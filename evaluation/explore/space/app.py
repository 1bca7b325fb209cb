"""The Space: what `python app.py` does in its folder, beside copies of the three rooms and `checkpoints.txt`."""

from pathlib import Path

from evaluation.explore.app import launch
from evaluation.explore.workbench import Workbench

launch(Workbench(Path(__file__).with_name("checkpoints.txt").read_text().split()))
