import pytest

from tests.conftest import HUB_PORT
from tests.hub_server import TOKEN, Hub


@pytest.fixture(scope="session")
def hub():
    """A Hub on loopback, to which the real client is pointed. One for all files: the client keeps its connections, and
    would go on talking to the first."""
    server = Hub(HUB_PORT).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def logged_in(monkeypatch, hub):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub
