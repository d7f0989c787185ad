"""Refusals of examples/slurm/train.sbatch, and a job whose engine does not start."""

from __future__ import annotations

from pathlib import Path

from tests.slurm import cluster, job

RUN = ("mine", "examples/demo/config.toml")


def ended(folder: Path, nodes: list[str], *words: str, **environment: str) -> tuple[int, str]:
    with job(cluster(folder), nodes, *words, **environment) as running:
        return running.wait(60), (folder / "job.log").read_text()


def test_a_job_without_a_name_is_refused(tmp_path: Path) -> None:
    assert ended(tmp_path, ["127.0.0.1"]) == (2, "usage: sbatch train.sbatch NAME CONFIG [settings]\n")


def test_more_workers_than_nodes_are_refused(tmp_path: Path) -> None:
    status, said = ended(tmp_path, ["127.0.0.1", "127.0.0.2"], *RUN, WORKERS="2")
    assert (status, said) == (
        2, "WORKERS=2: the job has only 1 nodes beside the first; ask for more (--nodes)\n",
    )  # fmt: skip
