"""Reads a task and a volume with SkyPilot's own classes, which refuse wrong fields.

python -m docs.checks.skypilot FOLDER, in an environment with SkyPilot: part of `make lint-deploy`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml


def main(folder: Path) -> None:
    """Raises the error of SkyPilot if one of the two files is wrong."""
    import sky
    from sky.volumes.volume import Volume

    task = sky.Task.from_yaml(str(folder / "train.yaml"))
    volume = Volume.from_yaml_config(yaml.safe_load((folder / "volume.yaml").read_text()))
    volume.validate()
    if volume.name not in task.volumes.values():
        raise ValueError(f"{folder}/train.yaml mounts {task.volumes}, not the volume {volume.name}")
    print(f"SkyPilot {sky.__version__} reads {folder}: {task.num_nodes} nodes, {task.resources}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
