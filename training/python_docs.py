"""A corpus that every Python installation has: the documentation strings of its modules."""

import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from tqdm.auto import tqdm

# A triple-quoted string at the top of a file or right under a line that ends with a colon. Reading 300 MB of source by
# pattern takes seconds where parsing it takes minutes, and what it finds beyond documentation is next to nothing.
DOCSTRING = re.compile(r'(?:\A|:[ \t]*\n)\s*[rRuU]?("""|\'\'\')(.*?)\1', re.DOTALL)
SHORTEST = 80  # characters; shorter ones are hardly text
SKIPPED_FOLDERS = {"test", "tests", "testing", "__pycache__", "idlelib", "lib2to3"}


def installation_fingerprint() -> str:
    """Changes whenever Python or an installed package changes."""
    versions = sorted(f"{package.name}=={package.version}" for package in distributions())
    return hashlib.blake2b("\n".join([sys.version, *versions]).encode(), digest_size=8).hexdigest()


def python_docs() -> Iterator[str]:
    """One document per module of the standard library and the installed packages: its documentation strings, each
    string once."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    files = [*_modules(library, SKIPPED_FOLDERS | {"site-packages"}), *_modules(packages, SKIPPED_FOLDERS)]
    seen = set()
    for path in tqdm(files, desc="reading Python's documentation", unit=" modules", leave=False):
        strings = [text for text in _docstrings(path) if text not in seen]
        seen.update(strings)
        if strings:
            yield "\n\n".join(strings)


def _modules(folder: Path, skipped: set[str]) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    return [path for path in files if not skipped.intersection(path.relative_to(folder).parts)]


def _docstrings(path: Path) -> list[str]:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    found = (inspect.cleandoc(match[2]) for match in DOCSTRING.finditer(source))
    return list(dict.fromkeys(text for text in found if len(text) >= SHORTEST))
