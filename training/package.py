"""Makes a checkpoint to share out of a training run and its report.

    python -m training.package runs/mini --report results/mini --output checkpoints/recurrent-gpt2-mini

The folder gets weights, tokenizer, code and configs, the log and the geometry of training, the report's results and
figure, and the card that is made from them. `generate` will use the exit policy that the report found cheapest at no
loss of quality, or `--exit_policy`, with the cap of the report. The config says the same number of loops, so that a
pass with a policy takes the steps that generation with it takes. The report on a model of a depth task is what
`evaluation.depth` wrote; what `evaluation.mixture` wrote beside a report goes along.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import recurrent_gpt2
from recurrent_gpt2 import ExitPolicy, RecurrentGPT2ForCausalLM

from .card import render_card
from .push import check_folder
from .tokenizer import fit_to_model

PACKAGE = Path(recurrent_gpt2.__file__).parent
FROM_RUN = ("trainer_state.json", "geometry.jsonl")
FROM_REPORT = ("results.json", "tradeoff.png")
OF_TASKS = ("depth.json", "depth.png")  # of `evaluation.depth`
OF_MIXTURES = ("mixture.json", "mixture.png", "loops.png")  # of `evaluation.mixture`, where it was run


def package(
    run: Path, report: Path, output: Path, exit_policy: dict[str, Any] | None = None, link_code: bool = False
) -> None:
    is_task = (report / OF_TASKS[0]).exists()
    of_run, of_report = (FROM_RUN[:1], OF_TASKS) if is_task else (FROM_RUN, FROM_REPORT)
    report_file = OF_TASKS[0] if is_task else "report.json"
    for folder, names in ((run, ("config.json", *of_run)), (report, (report_file, *of_report))):
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise FileNotFoundError(f"{folder} has no {', '.join(missing)}.")
    of_report = (*of_report, *(name for name in OF_MIXTURES if (report / name).exists()))
    measured = json.loads((report / report_file).read_text())
    policy = exit_policy or measured["policy"]
    if any(folder.resolve().is_relative_to(output.resolve()) for folder in (run, report)):
        raise ValueError(f"`--output` is {output}, but must be a folder of its own: it is replaced.")
    if output.exists() and any(output.iterdir()) and not (output / "config.json").exists():
        raise FileExistsError(f"`--output` {output} is not empty, and is no checkpoint to replace.")
    if link_code and not output.resolve().is_relative_to(PACKAGE.parent):
        raise ValueError(f"`--link-code` is for folders beside the package, in {PACKAGE.parent}, but not for {output}.")
    model = RecurrentGPT2ForCausalLM.from_pretrained(run)
    model.config.use_cache = True  # whatever it was in training
    if policy is not None:
        model.generation_config.exit_policy = ExitPolicy.from_dict(policy).to_dict()
        model.config.num_loops = measured["cap"]
    model.generation_config.num_loops = model.config.num_loops
    tokenizer = AutoTokenizer.from_pretrained(run)
    fit_to_model(tokenizer, model)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:  # what is there stays until all is made
        made = Path(temporary) / output.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for folder, names in ((run, of_run), (report, of_report)):
            for name in names:
                shutil.copy(folder / name, made / name)
        render_card(made).save(made / "README.md")
        check_folder(made)
        if link_code:
            link_to_package(made, output)
        shutil.rmtree(output, ignore_errors=True)
        made.rename(output)


def link_to_package(made: Path, output: Path) -> None:
    """Replaces the code in `made` by links into the package that are right where the folder goes, at `output`."""
    for file in made.glob("*.py"):
        file.unlink()
        file.symlink_to(os.path.relpath(PACKAGE / file.name, output.resolve()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a training run")
    parser.add_argument(
        "--report",
        type=Path,
        required=True,
        help="output folder of `evaluation.report` (or `evaluation.depth`) on the run",
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--exit_policy", type=json.loads, help="JSON, instead of the report's")
    parser.add_argument(
        "--link-code",
        action="store_true",
        help="links into the package instead of copies, for a folder in this repository",
    )
    options = parser.parse_args(arguments)
    package(options.run, options.report, options.output, options.exit_policy, options.link_code)
    size = sum(file.stat().st_size for file in options.output.iterdir())
    print(f"wrote {options.output} ({size / 1e6:.1f} MB)")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
