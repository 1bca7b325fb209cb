import pytest

import training.train
from recurrent_gpt2 import exit_policies
from tests.training.runs import tiny_run, write_texts


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with texts (`texts.jsonl`) and a run (`run`) trained on them, with its geometry recorded."""
    folder = tmp_path_factory.mktemp("trained")
    write_texts(folder)
    training.train.main(tiny_run(folder, geometry_loops=6, max_steps=9, save_strategy="no"))
    return folder


@pytest.fixture(autouse=True)
def _registry():
    """Rules that a test registers are gone after it."""
    before = dict(exit_policies._OF_USERS)
    yield
    exit_policies._OF_USERS.clear()
    exit_policies._OF_USERS.update(before)
