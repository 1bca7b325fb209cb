"""Files beside the code say the same as the code: versions, workflows, hooks."""

import re
import tomllib

import yaml

import recurrent_gpt2
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def commands(workflow: dict) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_one_version_is_stated_everywhere():
    newest = re.search(r"^## (\S+) \((\S+)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = read("CITATION.cff")
    assert {PROJECT["version"], recurrent_gpt2.__version__, str(citation["version"]), newest[1]} == {newest[1]}
    assert str(citation["date-released"]) == newest[2]
    assert citation["license"] == PROJECT["license"]


def test_the_workflow_runs_what_must_pass_on_every_python_from_the_oldest_on():
    workflow = read(".github/workflows/ci.yml")
    assert commands(workflow) == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML takes `on` for true


def test_the_newest_releases_are_tried_every_week():
    workflow = read(".github/workflows/newest.yml")
    assert commands(workflow) == ["make test-newest"]
    *_, day, month, weekday = workflow[True]["schedule"][0]["cron"].split()
    assert (day, month) == ("*", "*")
    assert weekday.isdigit()


def test_make_targets_that_are_named_exist():
    texts = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / ".ci/run", *(ROOT / "docs").glob("*.md")]
    texts += (ROOT / ".github/workflows").glob("*.yml")
    for path in texts:
        # In code, a comment may follow.
        for target in re.findall(r"^(?:- run: |`|\s*)make ([\w-]+)|`make ([\w-]+)", path.read_text(), re.MULTILINE):
            assert (target[0] or target[1]) in TARGETS, f"{path.name} names make {target}"


def test_a_commit_is_checked_by_the_ruff_of_the_environment():
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["entry"].split()[:2] for hook in hooks] == [[".venv/bin/ruff", "check"], [".venv/bin/ruff", "format"]]
    assert all(hook["language"] == "system" for hook in hooks)
