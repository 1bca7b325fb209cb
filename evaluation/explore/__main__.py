"""A page to watch a model think: `python -m evaluation.explore CHECKPOINT ...`.

Opens on the checkpoints that are given; others can be named on the page, from the Hub. docs/explore.md says what is to
be seen there.
"""

import argparse
import sys

from ..exit_search import find_rules


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.explore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", help="folders, or names on the Hub; the last with a task opens first")
    parser.add_argument(
        "--policies", nargs="+", default=[], metavar="FILE", help="files that register policies of yours"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets others in your network in")
    parser.add_argument("--port", type=int, help="a free one from 7860 on when left out")
    parser.add_argument("--open", action="store_true", help="open a browser")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that checkpoints of other kinds bring with them"
    )
    options = parser.parse_args(arguments)
    find_rules(options.policies)
    try:
        from .app import launch
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ValueError(
            "this page needs gradio: `make explore` installs it, or `pip install -e '.[explore]'`."
        ) from None
    from .workbench import Workbench

    workbench = Workbench(options.checkpoints, options.trust_remote_code)
    for name in workbench.names:
        workbench.open(name)  # fails here rather than on the page
    launch(workbench, server_name=options.host, server_port=options.port, inbrowser=options.open)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
