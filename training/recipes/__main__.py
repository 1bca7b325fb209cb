"""Lists the recipes of the project, and copies one to a file of yours:

python -m training.recipes
python -m training.recipes finetune mine.yaml
"""

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def recipes() -> dict[str, str]:
    """Every recipe with what its first sentence says."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = " ".join(line[1:].strip() for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")])
        found[path.stem] = comment.partition(". ")[0].rstrip(".") + "."
    return found


def copy(name: str, target: Path) -> None:
    if name not in recipes():
        raise ValueError(f"there is no recipe {name!r}. The project has: {', '.join(recipes())}.")
    if target.is_dir():
        target = target / f"{name}.yaml"
    if target.exists():
        raise FileExistsError(f"{target} is there already: choose another name.")
    target.write_text((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    print(f"wrote {target}; run it with: python -m training.train {target}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="a recipe to copy; none: list them")
    parser.add_argument("target", nargs="?", type=Path, help="file or folder to copy it to")
    options = parser.parse_args(arguments)
    if options.name is None:
        width = max(map(len, recipes()))
        for name, sentence in recipes().items():
            print(f"{name:<{width}}  {sentence}")
    elif options.target is None:
        raise ValueError(f"where should {options.name!r} go? Name a file: python -m training.recipes NAME FILE")
    else:
        copy(options.name, options.target)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
