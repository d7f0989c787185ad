"""Runs on a cluster, without Ray: placement, environment variables, and where agents run."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path

import pytest

from tidegate.cli import main
from tidegate.config import Settings, load_settings
from tidegate.errors import ConfigError, StartError
from tidegate.observer import Silent
from tidegate.plan.dry_run import describe
from tidegate.program import advise_extra
from tidegate.trainer.cluster.environment import (
    GLOO_INTERFACE,
    ActorContext,
    ClusterNode,
    SharedDirProbe,
    forwarded_variables,
    set_gloo_interface,
)
from tidegate.trainer.cluster.placement import HOME, Placement
from tidegate.trainer.cluster.run_actor import MAX_EVENTS, ObserverRelay


def settings_of(*overrides: str) -> Settings:
    return load_settings(None, ["--model.path=examples/tiny_base/model", *overrides])


def test_each_process_has_a_bundle_and_the_gateway_shares_that_of_the_run() -> None:
    settings = settings_of(
        "--trainer.ranks=2", "--trainer.device=cuda", "--trainer.threads=4", "--engine.count=2",
        "--agent.workers=3", "--gateway.shards=2", '--cluster.engine={GPU = 2, "fast" = 0.5}',
        "--engine.kind=sglang", "--engine.python=/x/python",
    )  # fmt: skip
    placement = Placement.of(settings)
    assert [(seat.name, seat.bundle) for seat in placement.slots] == [
        ("trainer-0", 0), ("gateway", 0), ("trainer-1", 1), ("engine-1", 2), ("engine-2", 3),
        ("agent-1", 4), ("agent-2", 5), ("agent-3", 6), ("env", 7),
    ]  # fmt: skip
    assert placement.bundles[0] == {"CPU": 6, "GPU": 1}
    assert placement["engine-2"].resources == {"CPU": 1, "GPU": 2, "fast": 0.5}
    assert placement.total == {"CPU": 6 + 4 + 2 + 3 + 1, "GPU": 6, "fast": 1}
    assert placement[HOME].resources == {"CPU": 4, "GPU": 1}


def test_the_sum_of_a_bundle_is_no_finer_than_ray_counts() -> None:
    placement = Placement.of(settings_of("--cluster.trainer={CPU = 0.1}", "--cluster.gateway={CPU = 0.2}"))
    assert placement.bundles[0] == {"CPU": 0.3}


def test_running_engines_have_no_bundle() -> None:
    names = [slot.name for slot in Placement.of(settings_of('--engine.urls=["http://a"]')).slots]
    assert names == [HOME, "gateway", "agent", "env"]


@pytest.mark.parametrize("overrides", [["--engine.device=cuda:1"], ["--trainer.device=cuda:0"]])
def test_a_numbered_gpu_is_refused_on_a_cluster(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"on a cluster Ray assigns GPUs: set it to 'cuda'"):
        Placement.of(settings_of(*overrides))


def test_a_dry_run_prints_the_placement() -> None:
    settings = settings_of("--engine.count=2", "--engine.device=cuda")
    text = describe(settings, cluster="ray://head:10001")
    assert "On the Ray cluster (ray://head:10001)" in text
    assert "trainer-0 + gateway   2 CPU\nengine-1              1 CPU, 1 GPU\n" in text
    assert "in all: 6 CPU, 2 GPU" in text
    assert "Ray" not in describe(settings)


def test_the_variables_that_matter_go_along_and_no_others() -> None:
    environment = {
        "HF_HOME": "/models", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3", "TOKENIZERS_PARALLELISM": "false", "HOME": "/root",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "JUDGE_KEY": "s3cret",
    }  # fmt: skip
    there = forwarded_variables(environment)
    assert there.keys() == environment.keys() - {"CUDA_VISIBLE_DEVICES", "HOME", "JUDGE_KEY"}
    assert forwarded_variables(environment, ["JUDGE_KEY"])["JUDGE_KEY"] == "s3cret"
    with pytest.raises(ConfigError, match="names OTHER_KEY, which is not set here"):
        forwarded_variables(environment, ["OTHER_KEY"])


def test_process_groups_meet_at_the_address_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    set_gloo_interface("192.0.2.77")  # of no interface here
    assert GLOO_INTERFACE not in os.environ
    monkeypatch.setenv(GLOO_INTERFACE, "mine")
    set_gloo_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "mine"
    monkeypatch.delenv(GLOO_INTERFACE)
    set_gloo_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] in [name for _, name in socket.if_nameindex()]


def test_an_actor_sees_its_own_gpus_even_if_ray_was_told_not_to_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from tidegate.trainer.cluster import actors, run_actor

    for module in (actors, run_actor):
        monkeypatch.setattr(module, "shield_process", lambda: None)
        monkeypatch.setattr(module, "set_gloo_interface", lambda _: None)
    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    monkeypatch.setattr(actors.ray, "get_gpu_ids", lambda: [3])
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    context = ActorContext("a", SharedDirProbe.create(tmp_path), tmp_path, {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "taken away")  # restored afterwards
    for create in (
        lambda: actors.RankActor(context, 8),
        lambda: run_actor.RunActor(run_actor.RunSpec("a", tmp_path, tmp_path, {}, lambda *_: None), None),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        os.environ.pop("NCCL_CUMEM_ENABLE", None)
        create()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        assert os.environ["NCCL_CUMEM_ENABLE"] == "0", "as in SGLang's process"
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # by Ray
    actors.RankActor(context, 8)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


def test_a_node_that_is_not_alike_is_named() -> None:
    here, same = ClusterNode("10.0.0.1", "3.11.7", "0.1.0"), ClusterNode("10.0.0.2", "3.11.7", "0.1.0")
    assert same.mismatch(here) is None
    older = ClusterNode("10.0.0.3", "3.12.1", "0.0.9")
    said = older.mismatch(here) or ""
    assert "node 10.0.0.3 has Python 3.12.1 instead of 3.11.7 and tidegate 0.0.9 instead of 0.1.0" in said


def test_a_mark_is_seen_in_its_own_directory_alone(tmp_path: Path) -> None:
    mark = SharedDirProbe.create(tmp_path / "runs" / "a")
    assert mark.is_visible()
    assert not SharedDirProbe(tmp_path / "elsewhere", mark.text).is_visible()
    SharedDirProbe.create(tmp_path / "runs" / "a")  # another run of that name, on a disk of its own
    assert not mark.is_visible()


def test_the_context_of_an_actor_shows_no_secret(tmp_path: Path) -> None:
    context = ActorContext("a", SharedDirProbe(tmp_path, "x"), tmp_path, {"JUDGE_KEY": "s3cret"})
    assert "s3cret" not in repr(context)
    assert pickle.loads(pickle.dumps(context)).environment == {"JUDGE_KEY": "s3cret"}


class Hearing(Silent):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def note(self, text: str) -> None:
        self.heard.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.heard.append((what, done, total))


def test_a_remote_observer_gets_each_event_once_and_in_order() -> None:
    relay, hearing = ObserverRelay(), Hearing()
    relay.note("a")
    relay.progress("evaluation", 1, 2)
    for method, arguments in pickle.loads(pickle.dumps(relay.take_events())):
        getattr(hearing, method)(*arguments)
    assert hearing.heard == ["a", ("evaluation", 1, 2)]
    assert relay.take_events() == []
    for number in range(MAX_EVENTS + 5):  # nobody asks: memory is bounded, and the newest are kept
        relay.note(str(number))
    news = relay.take_events()
    assert len(news) == MAX_EVENTS
    assert news[-1] == ("note", (str(MAX_EVENTS + 4),))


def test_without_ray_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.startswith("tidegate.trainer.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    words = ["--cluster", "auto", "--model.path", "x", "--run.live_view=false"]
    assert main(["train", *words]) == StartError.exit_code
    needs = f"tidegate: --cluster needs Ray, on every node: {advise_extra('ray')}\n"
    assert capsys.readouterr().err == needs
    assert list(tmp_path.iterdir()) == []
