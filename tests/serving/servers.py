"""Starts a real server on the loopback, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
from openai import OpenAI

from tests.serving.engines import ENVIRONMENT

START_SECONDS = 540


@contextmanager
def running(*command: str, folder):
    """`python -m ...` with a port of its own; gives a client and the process. Not in the project's folder, as for one
    who has the package installed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = (folder / "server.log").open("w")
    arguments = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, **ENVIRONMENT}
    server = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(server, port, folder)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300), server
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)  # the group that it was started with, and nothing else
            server.wait(timeout=60)
        log.close()


def wait_for(server: subprocess.Popen, port: int, folder) -> None:
    for _ in range(START_SECONDS * 2):
        assert server.poll() is None, (folder / "server.log").read_text()[-4000:]
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise TimeoutError((folder / "server.log").read_text()[-4000:])
