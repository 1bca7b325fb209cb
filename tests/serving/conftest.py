"""The clients that these tests speak through come with `make test-serve`; elsewhere there is nothing to collect."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("openai") else ["test_serve.py", "test_vllm_server.py"]


def pytest_collection_modifyitems(items):
    """Engines last: one changes the classes of its process, and `generate` has to answer before it."""
    items.sort(key=lambda item: item.path.name == "test_vllm.py")
