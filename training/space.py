"""Makes a Space of the page that explores models: `python -m training.push --space someone/watch someone/a someone/b`.

The arguments behind the Space's name are checkpoints on the Hub, on which it opens. The Space is a folder with the code
of this project, `app.py`, `requirements.txt` with the versions that go together, and a card. `--dry-run` makes it in
`--output` and uploads nothing: `python app.py` there runs it.
"""

import argparse
import platform
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from huggingface_hub import HfApi
from jinja2 import Environment, StrictUndefined

from .push import refusals

ROOT = Path(__file__).parents[1]
ROOMS = ("recurrent_gpt2", "training", "evaluation")
TEMPLATES = ROOT / "evaluation" / "explore" / "space"
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def requirements() -> list[str]:
    """What the page needs, with the versions that are tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, wanted, names = project["optional-dependencies"], ["explore"], list(project["dependencies"])
    while wanted:
        for needed in extras[wanted.pop()]:
            inner = re.fullmatch(rf"{project['name']}\[(.*)\]", needed)
            wanted += inner[1].split(",") if inner else []
            names += [] if inner else [needed]
    pins = {_plain(line.split("==")[0]): line for line in (ROOT / "constraints.txt").read_text().split()}
    return sorted({pins[_plain(re.split(r"[<>=!~\[ ]", name)[0])] for name in names}, key=str.lower)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def write_space(folder: Path, space: str, checkpoints: list[str]) -> None:
    """The files of a Space that opens on checkpoints of the Hub."""
    for name in (space, *checkpoints):
        if not NAME.fullmatch(name) or Path(name).exists():
            raise ValueError(f"{name!r} must be a name on the Hub, owner/name: push a folder there first.")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "space"))
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(TEMPLATES / "app.py", folder)
    (folder / "checkpoints.txt").write_text("".join(f"{name}\n" for name in checkpoints))
    needed = requirements()
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in needed))
    values = {
        "title": space.split("/")[1].replace("-", " "),
        "gradio": next(line for line in needed if line.startswith("gradio==")).removeprefix("gradio=="),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "checkpoints": checkpoints,
    }
    card = Environment(undefined=StrictUndefined).from_string((TEMPLATES / "README.md").read_text())
    (folder / "README.md").write_text(card.render(values) + "\n")


def push_space(folder: Path, space: str, private: bool = False) -> str:
    """Uploads a folder as a Space, which is created where it is not there, and returns the commit."""
    with refusals(space):
        api = HfApi()
        api.create_repo(space, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=space, repo_type="space", folder_path=folder, commit_message="Upload the page",
            delete_patterns=[f"{room}/**" for room in ROOMS],
        )  # fmt: skip
    return commit.oid


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--space", required=True, help="owner/name of the Space; it is created if it is not there")
    parser.add_argument("checkpoints", nargs="+", help="owner/name of checkpoints on the Hub; the page opens on them")
    parser.add_argument("--private", action="store_true", help="create it as a private Space")
    parser.add_argument("--dry-run", action="store_true", help="only make the folder")
    parser.add_argument("--output", type=Path, help="keep the folder here; it must not be there yet")
    options = parser.parse_args(arguments)
    if options.dry_run and options.output is None:
        raise ValueError("`--dry-run` uploads nothing: give `--output`, a folder to look at.")
    if options.output is not None and options.output.exists():
        raise FileExistsError(f"`--output` is {options.output}, which is there already.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch) / "space"
        folder.mkdir(parents=True)
        write_space(folder, options.space, options.checkpoints)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{options.space}: {len(files)} files, {size:,} bytes" + (f", in {folder}" if options.output else ""))
        if not options.dry_run:
            commit = push_space(folder, options.space, options.private)
            print(f"pushed to spaces/{options.space} at revision {commit}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
