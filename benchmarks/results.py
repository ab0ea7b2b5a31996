"""What was measured, on disk."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import plots

Result = dict[str, Any]


def make_result(
    command: str, environment: dict[str, Any], settings: dict[str, Any], sections: Iterable[dict[str, Any]]
) -> Result:
    """Return a measurement: its name, where it was made, what was asked for and what came out."""
    return {"command": command, "environment": environment, "settings": settings, "sections": list(sections)}


def save(folder: Path, result: Result) -> Path:
    """Write a measurement's JSON and its picture into a folder, and return the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['command']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plots.draw(result, folder)
    return path


def load(folder: Path) -> list[Result]:
    """Return the measurements of a folder, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
