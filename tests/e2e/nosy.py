"""An agent that tries to reach what it must not: an agent process can access its own session, and no secrets
of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

NOSY = """
import json, os, urllib.error, urllib.request
from tidegate.agents.solver import Solver

def get(url, method="GET", key=None):
    request = urllib.request.Request(url, method=method, data=b"{}" if method == "POST" else None)
    request.add_header("Content-Type", "application/json")
    if key: request.add_header("Authorization", f"Bearer {key}")
    try:
        return urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code

class Nosy(Solver):
    looks = 0

    async def run(self, task, session):
        Nosy.looks += 1
        if Nosy.looks <= 5:
            self.look(task, session)
        return await super().run(task, session)

    def look(self, task, session):
        root, _, rest = session.base_url.partition("/s/")
        mine = rest.split("/")[0]
        with open(OUT, "a") as out:
            for key in (None, session.api_key):
                for method, path in [("GET", f"/sessions/{mine}"), ("GET", f"/sessions/{mine}/trajectory"),
                                     ("POST", "/sessions"), ("POST", f"/sessions/{mine}/finish"),
                                     ("GET", "/groups"), ("GET", "/engines"), ("DELETE", "/engines")]:
                    out.write(json.dumps([method, path, get(root + path, method, key)]) + "\\n")
            gateway = json.loads(open(f"{RUN}/logs/gateway.address").read())["pid"]
            for pid in (gateway, os.getppid()):
                for file in ("environ", "maps", "mem"):
                    try:
                        open(f"/proc/{pid}/{file}", "rb").read(1)
                        out.write(json.dumps(["proc", f"{pid}/{file} was read", 200]) + "\\n")
                    except PermissionError:
                        out.write(json.dumps(["proc", f"{pid}/{file}", 401]) + "\\n")
            out.write(json.dumps(["task", list(task.__slots__), 401]) + "\\n")
            out.write(json.dumps(["env", [k for k in os.environ if "ADMIN" in k], 401]) + "\\n")
"""


def nosy(folder: Path, run_dir: Path) -> str:
    """The setting for the agent of a run, which writes into `folder`. The run must be unprivileged."""
    (folder / "nosy.py").write_text(
        NOSY.replace("OUT", repr(str(folder / "nosy.jsonl"))).replace("{RUN}", str(run_dir))
    )
    return f"--agent.use={folder}/nosy.py:Nosy"


def check_secrecy(folder: Path, run_dir: Path) -> None:
    """Asserts that the agent reached nothing, and that nobody else can read the run's files."""
    everything = [path for path in run_dir.rglob("*") if not path.is_symlink()]
    assert {path.stat().st_mode & 0o777 for path in everything if path.is_dir()} == {0o700}
    assert run_dir.stat().st_mode & 0o777 == 0o700
    loose = [path for path in everything if path.is_file() and path.stat().st_mode & 0o077]
    assert loose == []
    seen = [json.loads(line) for line in (folder / "nosy.jsonl").read_text().splitlines()]
    assert {status for _, _, status in seen} == {401}, [one for one in seen if one[2] != 401][:5]
    assert next(what for kind, what, _ in seen if kind == "env") == []
    assert next(what for kind, what, _ in seen if kind == "task") == ["id", "messages"]
