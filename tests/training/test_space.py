"""The Space is made, pushed to a Hub on loopback with the real client, and runs from what was pushed."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import RepoCard, snapshot_download

from tests.helpers import ROOT
from tests.hub_server import TOKEN
from training import push
from training.space import requirements

SPACE, MINI, PROGRAMS = "someone/watch-a-model", "someone/recurrent-gpt2-mini", "someone/recurrent-gpt2-programs"


def test_a_space_is_pushed_with_its_code_and_what_it_needs(logged_in, capsys):
    push.main(["--space", SPACE, MINI, PROGRAMS])
    files = logged_in.files_of(f"spaces:{SPACE}")
    assert logged_in.repositories[f"spaces:{SPACE}"].references["main"] in capsys.readouterr().out
    for room in ("recurrent_gpt2", "training", "evaluation"):
        ours = {str(path.relative_to(ROOT)) for path in (ROOT / room).rglob("*.py") if path.parent.name != "space"}
        assert ours <= set(files), room
    assert "evaluation/templates/pictures.css" in files
    assert not any("__pycache__" in path or path.startswith("tests") for path in files)
    assert files["checkpoints.txt"].decode().split() == [MINI, PROGRAMS]
    card = RepoCard(files["README.md"].decode())
    assert (card.data.sdk, card.data.app_file, card.data.models) == ("gradio", "app.py", [MINI, PROGRAMS])
    assert f"gradio=={card.data.sdk_version}" in files["requirements.txt"].decode().split()
    assert not any(TOKEN.encode() in content for content in files.values())


def test_a_file_that_is_gone_leaves_the_space_too(logged_in):
    space = "someone/renewed"
    push.main(["--space", space, MINI])
    repository = logged_in.repositories[f"spaces:{space}"]
    repository.commit({**repository.commits[repository.commit_of("main")], "evaluation/old.py": (b"", False)}, "main")
    push.main([f"--space={space}", MINI])
    assert "evaluation/old.py" not in logged_in.files_of(f"spaces:{space}")
    assert "evaluation/lens.py" in logged_in.files_of(f"spaces:{space}")


def test_requirements_are_pinned_and_are_all_that_the_page_needs():
    needed = requirements()
    names = {line.split("==")[0].lower() for line in needed}
    assert {"torch", "transformers", "gradio", "matplotlib", "datasets", "safetensors"} <= names
    assert not {"pytest", "peft", "recurrent-gpt2"} & names
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert all(line in pinned for line in needed)


def test_a_dry_run_makes_the_folder_and_uploads_nothing(hub, tmp_path, capsys):
    before = len(hub.requests)
    push.main(["--space", SPACE, MINI, "--dry-run", "--output", str(tmp_path / "space")])
    assert len(hub.requests) == before
    assert (tmp_path / "space" / "app.py").exists()
    assert str(tmp_path / "space") in capsys.readouterr().out


def test_what_is_wrong_is_said_before_anything_is_sent(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments, sentence in [
        (["--space", SPACE, "checkpoints/recurrent-gpt2-mini"], "must be a name on the Hub"),
        (["--space", "watch", MINI], "must be a name on the Hub"),
        (["--space", SPACE, MINI, "--dry-run"], "give `--output`"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            push.main(arguments)
    with pytest.raises(FileExistsError, match="is there already"):
        push.main(["--space", SPACE, MINI, "--output", str(tmp_path)])
    with pytest.raises(PermissionError, match="there is no Hub token"):
        push.main(["--space", SPACE, MINI])


@pytest.mark.browser
def test_the_space_runs_from_what_was_pushed(logged_in, tmp_path):
    """As the Hub runs it: its files, its `app.py`, checkpoints from the Hub, and nothing of this folder."""
    from playwright.sync_api import sync_playwright

    for repo in (MINI, PROGRAMS):
        copied = shutil.copytree(ROOT / "checkpoints" / repo.split("/")[1], tmp_path / repo.split("/")[1])
        push.main([str(copied), repo])  # which names the repository in the card
    push.main(["--space", SPACE, MINI, PROGRAMS])
    folder = Path(snapshot_download(SPACE, repo_type="space", local_dir=tmp_path / "space"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        "PATH": "", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_DISABLE_XET": "1",
        "HF_ENDPOINT": logged_in.url, "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    show = "import recurrent_gpt2, runpy; print(recurrent_gpt2.__file__); runpy.run_path('app.py', run_name='__main__')"
    with (tmp_path / "log").open("w+") as log:
        space = subprocess.Popen([sys.executable, "-uc", show], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            for _ in range(600):
                written = (tmp_path / "log").read_text()
                if "Running on" in written or space.poll() is not None:
                    break
                time.sleep(0.5)
            assert "Running on" in written, written
            assert str(folder / "recurrent_gpt2") in written  # its own copy
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page()
                page.goto(f"http://127.0.0.1:{port}", timeout=120_000)
                page.wait_for_selector("#answers table", timeout=120_000)
                assert "14 of 14 right" in page.locator("#answers").inner_text()
                browser.close()
        finally:
            space.terminate()
            space.wait()
