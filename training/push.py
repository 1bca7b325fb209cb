"""Checks a checkpoint and pushes it to the Hub: `python -m training.push runs/mini someone/recurrent-gpt2-mini`.

Before anything is uploaded, the folder is loaded by its own remote code in a fresh process, generates a few tokens, and
its card is compared with its result files. Only what a user needs is uploaded: no optimiser state, no pickles.

`python -m training.push --space someone/watch someone/recurrent-gpt2-mini` makes a Space that explores checkpoints of
the Hub: see `space.py`.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from .card import check_card, check_metadata, render_card

NEEDED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
UPLOADED = (
    *NEEDED, "*.py", "*.safetensors", "model.safetensors.index.json", "vocab.json", "merges.txt", "README.md",
    "special_tokens_map.json", "results.json", "tradeoff.png", "trainer_state.json", "geometry.jsonl",
    "depth.json", "depth.png", "mixture.json", "mixture.png", "loops.png", "calibration.json",
)  # fmt: skip
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write to the repository."

# Run in a process that cannot import the installed package, only the checkpoint's own code.
LOAD = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "recurrent_gpt2":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("The", return_tensors="pt").input_ids
new = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
assert new.shape[1] == ids.shape[1] + 4
"""


def check_folder(checkpoint: Path, repo: str | None = None) -> list[Path]:
    """The files to upload; fails with a sentence where the folder is not fit to be shared."""
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"there is no folder {checkpoint}.")
    missing = [name for name in NEEDED if not (checkpoint / name).exists()]
    if not list(checkpoint.glob("*.safetensors")):
        missing.append("model.safetensors")
    if not (checkpoint / "README.md").exists():
        missing.append("README.md (the card)")
    if missing:
        raise FileNotFoundError(f"{checkpoint} has no {', '.join(missing)}: save model and tokenizer there first.")
    check_card(checkpoint, repo)
    check_metadata(ModelCard.load(checkpoint / "README.md"))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        loaded = subprocess.run(
            [sys.executable, "-c", LOAD, str(checkpoint.resolve())], cwd=folder, env=environment, capture_output=True,
            text=True,
        )  # fmt: skip
    if loaded.returncode != 0:
        reason = (loaded.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{checkpoint} does not load by its own remote code: {reason}")
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file()]
    return [path for path in files if any(fnmatch.fnmatch(path.name, pattern) for pattern in UPLOADED)]


def write_card(checkpoint: Path, repo: str, **metadata) -> None:
    """Writes the card where there is none; one that is there, perhaps edited, stays, but for the name to load by."""
    card = checkpoint / "README.md"
    if card.exists():
        card.write_text(re.sub(r'^(repo, revision = )".*?"', rf'\1"{repo}"', card.read_text(), flags=re.MULTILINE))
    elif (checkpoint / "config.json").exists():
        render_card(checkpoint, repo, **metadata).save(card)


def linked_copy(checkpoint: Path, folder: Path) -> Path:
    """A folder with links to the files of a checkpoint, and a card of its own."""
    for path in checkpoint.iterdir():
        if path.name == "README.md":
            shutil.copy(path, folder)
        elif path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    return folder


@contextmanager
def refusals(repo: str) -> Iterator[None]:
    """What the Hub refuses, and an upload that breaks off, become sentences that say what to do."""
    if get_token() is None:
        raise PermissionError(f"there is no Hub token. {LOGIN}")
    try:
        yield
    except LocalTokenNotFoundError:
        raise PermissionError(f"there is no Hub token. {LOGIN}") from None
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(f"the Hub refused the token for {repo}. {LOGIN}") from None
        raise ConnectionError(f"the upload to {repo} failed ({error.response.status_code}): run it again.") from None
    except (ConnectionError, RuntimeError) as error:
        message = f"the upload to {repo} broke off: run it again; what has arrived is not sent again."
        raise ConnectionError(message) from error


def push(checkpoint: Path, repo: str, files: list[Path], private: bool = False, revision: str | None = None) -> str:
    """Uploads files of a checked folder and returns the commit. An interrupted upload can be repeated: what has arrived
    is not sent again."""
    with refusals(repo):
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=checkpoint,
            allow_patterns=[path.name for path in files],
            revision=revision,
            commit_message=f"Upload {checkpoint.resolve().name}",
        )
    return commit.oid


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument == "--space" or argument.startswith("--space=") for argument in arguments):
        from .space import main as push_a_space

        return push_a_space(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a saved model")
    parser.add_argument("repo", help="owner/name on the Hub; it is created if it is not there")
    parser.add_argument("--private", action="store_true", help="create it as a private repository")
    parser.add_argument("--revision", help="branch to push to, instead of main")
    parser.add_argument("--dry-run", action="store_true", help="check, and list what would be uploaded")
    parser.add_argument("--license", default="apache-2.0", help="for a card that is written anew")
    parser.add_argument("--base_model", help="name on the Hub of what it was trained from, for a card written anew")
    parser.add_argument("--datasets", nargs="+", help="names on the Hub, for a card that is written anew")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.checkpoint
        if options.dry_run and checkpoint.is_dir():  # which leaves the folder as it is
            checkpoint = linked_copy(checkpoint, Path(scratch))
        write_card(
            checkpoint, options.repo, license=options.license, datasets=options.datasets, base_model=options.base_model
        )
        files = check_folder(checkpoint, options.repo)
        print(f"{'would upload' if options.dry_run else 'uploading'} to {options.repo}:")
        for path in files:
            print(f"  {path.stat().st_size:>12,}  {path.name}")
    if not options.dry_run:
        commit = push(checkpoint, options.repo, files, options.private, options.revision)
        print(f"pushed to {options.repo} at revision {commit}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
