"""A disk that fills up during a run, on a small real file system: clear error, no loss, resume."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, SMALL

pytestmark = pytest.mark.slow

SCRIPT = """
set -eu
mount -t tmpfs -o size=20m tmpfs "$DISK"
tg() { "$PYTHON" -m tidegate "$@"; }
code=0
tg train "$CONFIG" --run.dir="$DISK" --run.name=run $SMALL --trainer.steps=1000 > "$OUT/first" 2>&1 || code=$?
echo "$code" > "$OUT/code"
tg audit "$DISK/run" > "$OUT/audit_full" 2>&1
mount -o remount,size=400m "$DISK"
step=$(ls "$DISK/run/checkpoints" | sed -n s/step_//p | sort -n | tail -1)
tg train "$DISK/run/config.toml" --resume --trainer.steps=$((step + 2)) > "$OUT/second" 2>&1
tg audit "$DISK/run" > "$OUT/audit_resumed" 2>&1
cp "$DISK/run/metrics.jsonl" "$OUT/"
"""


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None and subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs unshare with user and mount namespaces")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_loses_nothing(tmp_path: Path, ranks: int) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir(), out.mkdir()
    environment = {
        **ENVIRONMENT, "DISK": str(disk), "OUT": str(out), "PYTHON": sys.executable, "CONFIG": str(DEMO),
        "SMALL": " ".join([*SMALL, f"--trainer.ranks={ranks}"]),
    }  # fmt: skip
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", SCRIPT],
        cwd=REPO, env=environment, timeout=400, capture_output=True, text=True,
    )  # fmt: skip
    first = (out / "first").read_text()
    assert done.returncode == 0, (
        done.stderr,
        first[-3000:],
        *(path.read_text() for path in out.glob("audit*")),
    )
    assert int((out / "code").read_text()) in (1, 3)
    assert "disk is full" in " ".join(first.split()), first[-3000:]
    assert "Traceback" not in first
    assert "--resume" in first
    for audit in ("audit_full", "audit_resumed"):
        assert (out / audit).read_text().strip().endswith("the ledger is consistent")
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))
