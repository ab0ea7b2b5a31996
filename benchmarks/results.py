"""What was measured, on disk and on the screen."""

import json
from pathlib import Path
from typing import Any

from benchmarks import plots, tables


def finish(
    folder: Path,
    command: str,
    environment: dict[str, Any],
    settings: dict[str, Any],
    measured: dict[str, Any],
) -> None:
    """Write a measurement's JSON and plots into a folder, and print its tables.

    Args:
      folder: where to.
      command: the measurement's name.
      environment: where it was made.
      settings: what was asked for.
      measured: what came out.
    """
    result = {
        "command": command,
        "environment": environment,
        "settings": settings,
        "measured": measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{command}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plots.draw(result, folder)
    print(tables.render(result))
    print(f"\nWritten to {path} and beside it.")


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a folder, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
