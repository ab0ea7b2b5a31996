"""What must agree between files that no program reads together: the lock, the version, the workflows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required() -> set[tuple[str, frozenset[str], str, str]]:
    """Every requirement of pyproject.toml: name, extras, versions, and the extra of ours that asks for it."""
    by_extra = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    parsed = [(Requirement(line), extra) for extra, lines in by_extra.items() for line in lines]
    return {(canonicalize_name(r.name), frozenset(r.extras), str(r.specifier), extra) for r, extra in parsed}


def locked() -> set[tuple[str, frozenset[str], str, str]]:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    (own,) = [package for package in packages if package["name"] == "svb-jax"]
    return {
        (
            entry["name"],
            frozenset(entry.get("extras", ())),
            entry.get("specifier", ""),
            "".join(re.findall(r"extra == '(\w+)'", entry.get("marker", ""))),
        )
        for entry in own["metadata"]["requires-dist"]
    }


def test_the_lock_is_that_of_this_project():
    assert locked() == required(), "pyproject.toml has changed since: uv lock"


def test_the_lock_names_public_hosts_alone():
    hosts = set(re.findall(r"\w+://([^/\"]*)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_the_citation_has_the_version():
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert version == PROJECT["version"]


def test_the_changelog_has_every_version_with_its_date():
    (first, *rest) = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    versions = rest if first == "Unreleased" else [first, *rest]
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) \((20\d\d-\d\d-\d\d)\)", version) for version in versions]
    assert all(dated), versions
    numbers, dates = zip(*(match.groups() for match in dated if match), strict=True)
    assert (numbers[0], numbers[-1]) == (PROJECT["version"], "0.1.0")
    assert list(dates) == sorted(dates, reverse=True)


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_workflows_call_scripts_and_extras_that_exist(workflow):
    text = workflow.read_text()
    for script in re.findall(r"bash (\.ci/\S+?)[\s\"}]", text):
        assert (ROOT / script).is_file()
    for extra in re.findall(r"\.\[(\w+)\]|--extra (\w+)", text):
        assert "".join(extra) in PROJECT["optional-dependencies"]


def test_actions_are_pinned_to_a_commit_with_its_version():
    text = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = set(re.findall(r"uses: (.*)$", text, flags=re.MULTILINE))
    by_branch = {action for action in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)}
    # PyPI documents its own by branch.
    assert by_branch == {"pypa/gh-action-pypi-publish@release/v1"}
