"""A cluster for the time of a run: connected to, seats reserved, and let go."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import ray
from ray._private import services
from ray.exceptions import AuthenticationError
from ray.util.placement_group import placement_group, remove_placement_group

from tidegate.errors import ConfigError, StartError
from tidegate.trainer.cluster.actor_slots import NAMESPACE, ActorSlots
from tidegate.trainer.cluster.placement import Placement, readable

CONNECT_S = 10.0
HEAD = "node:__internal_head__"
CLIENT_TIMEOUT = "ray client connection timeout"
TOKEN = "RAY_AUTH_TOKEN or ~/.ray/auth_token, as on its nodes"
HERE = 0.001
"""Of a node's own resource, which ties the run to that node."""


@contextlib.contextmanager
def connected(cluster: str) -> Iterator[str]:
    """Connected to `local` (a cluster of this machine that ends with us), `auto` (the one that this machine
    is a node of), `host:port`, or `ray://host:port`. Gives the resource of the node for the run itself.

    Raises ConfigError, and StartError within a minute where there is no such cluster.
    """
    if cluster == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        address = _address(cluster)
        if address != "local":
            _reach(cluster, address)
        _init(address, {"include_dashboard": False} if address == "local" else {})
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, AuthenticationError) as error:
        raise StartError(f"--cluster {cluster}: {_why(error)}") from error
    try:
        yield HEAD if address.startswith("ray://") else f"node:{ray.util.get_node_ip_address()}"
    finally:
        ray.shutdown()


def _address(cluster: str) -> str:
    """Where that is. Ray has no public call that finds its own cluster without connecting to it, for which it
    would wait for minutes where the cluster ended without taking its address back. Raises ConnectionError."""
    if cluster != "auto":
        return cluster
    address = os.environ.get("RAY_ADDRESS") or "auto"
    return services.canonicalize_bootstrap_address_or_die("auto") if address == "auto" else address


def _reach(cluster: str, address: str) -> None:
    """Ray itself waits for minutes where nobody listens, or what listens is not Ray. Raises ConfigError,
    StartError."""
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--cluster {address}: give auto, local, ray://HOST:PORT (10001 is the usual one) or HOST:PORT"
        )
    where = cluster if cluster == address else f"{cluster}: {address}"
    hint = "`ray status` on a node says whether the cluster is up"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise StartError(f"--cluster {where}: nobody answers there ({error}). {hint}") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # who is there would have to be asked with Ray's own keys
        return
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            raise StartError(
                f"--cluster {where}: what listens there is not Ray, or does not answer within "
                f"{CONNECT_S:g} s. {hint}"
            ) from None


def _init(address: str, options: Mapping[str, Any]) -> None:
    """A busy head node may fail to start the process that stands for a client: that is tried twice."""
    told = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR", **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Ray Client connection timed out")  # what is raised says it
        try:
            ray.init(address, **told)
        except ConnectionAbortedError:
            ray.init(address, **told)


@contextlib.contextmanager
def reserved(run: str, placement: Placement, home: str, patience_s: float) -> Iterator[ActorSlots]:
    """All seats of a run, or none. `home` is the resource of the node for the first bundle.

    Raises StartError where the cluster does not give them in time.
    """
    bundles = placement.bundles
    bundles[0][home] = HERE
    group = placement_group(bundles, strategy="PACK", name=f"tidegate-{run}")
    try:
        if not group.wait(patience_s):
            raise StartError(
                f"the cluster did not give the run its place within {patience_s:g} s.\nIt asks for:\n"
                + "".join(f"  {line}\n" for line in placement.lines())
                + f"The cluster has {_of(ray.cluster_resources())}, of which are free "
                f"{_of(ray.available_resources())}.\n"
                "Ask for less (engine.count, trainer.ranks, agent.workers, cluster.*), or wait longer "
                "(cluster.patience_s)"
            )
        yield ActorSlots(run, placement, group)
    finally:
        with contextlib.suppress(ConnectionError):  # with the cluster gone, nothing is reserved
            still_connected()
            remove_placement_group(group)


def still_connected() -> None:
    """Before calls to a cluster that may have gone: by itself Ray would look for another one, or start it.
    Raises ConnectionError."""
    if not ray.is_initialized():
        raise ConnectionError("the connection to the cluster has ended")


def _of(resources: Mapping[str, float]) -> str:
    """What processes may ask for."""
    hidden = ("node:", "memory", "object_store_memory")
    return readable({name: amount for name, amount in resources.items() if not name.startswith(hidden)})


def _why(error: BaseException) -> str:
    """Ray's first line, and what it says further down where that is the cause."""
    if isinstance(error, AuthenticationError):  # no token at all: Ray looks for one before it connects
        return f"Ray found no authentication token. Set the cluster's token: {TOKEN}"
    first = str(error).strip().partition("\n")[0].removesuffix(".")
    cause: BaseException | None = error
    while cause is not None:
        if "InvalidAuthToken" in str(cause):
            return f"{first}. Its token is wanted: {TOKEN}"
        cause = cause.__cause__
    if first == CLIENT_TIMEOUT:  # what Ray's client says, too, where it is turned away
        return (
            f"{first}, though it listens there: it may want its token, {TOKEN}, or be about to start or end"
        )
    last = str(error).strip().rpartition("\n")[2].removesuffix(".")
    return first if last == first else f"{first}. {last}"
