"""Connects to a Ray cluster and reserves a placement group for the duration of a run."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray._private import services
from ray.exceptions import AuthenticationError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.errors import ConfigError, StartError
from tidegate.trainer.cluster.placement import Placement, format_resources

NAMESPACE = "tidegate"
CALLS = 10_000
"""Limit on concurrent calls of one actor; idle capacity costs nothing."""
CONNECT_S = 10.0
HEAD = "node:__internal_head__"
CLIENT_TIMEOUT = "ray client connection timeout"
TOKEN = "RAY_AUTH_TOKEN or ~/.ray/auth_token, as on its nodes"
HOME_AMOUNT = 0.001
"""Amount of a node's own resource that ties the run to that node."""


@contextlib.contextmanager
def connected(cluster: str) -> Iterator[str]:
    """Connect to a cluster; yields the resource of the node on which the run itself is placed.

    `cluster` is `local` (a new cluster on this machine, for this process only), `auto` (the cluster of this
    machine), `host:port` or `ray://host:port`.

    Raises ConfigError, or StartError within a minute if there is no such cluster.
    """
    if cluster == "local":
        # Ray reports the usage of a new cluster to its makers by default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        address = _address(cluster)
        if address != "local":
            _check_reachable(cluster, address)
        _init(address, {"include_dashboard": False} if address == "local" else {})
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, AuthenticationError) as error:
        raise StartError(f"--cluster {cluster}: {_describe(error)}") from error
    try:
        yield HEAD if address.startswith("ray://") else f"node:{ray.util.get_node_ip_address()}"
    finally:
        ray.shutdown()


def _address(cluster: str) -> str:
    """Return the cluster's address. Raises ConnectionError.

    Ray has no public function for it; `ray.init` would wait for minutes if the address file is stale.
    """
    if cluster != "auto":
        return cluster
    address = os.environ.get("RAY_ADDRESS") or "auto"
    return services.canonicalize_bootstrap_address_or_die("auto") if address == "auto" else address


def _check_reachable(cluster: str, address: str) -> None:
    """Raises ConfigError or StartError if no Ray listens at `address`; Ray itself would wait for minutes."""
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
        raise StartError(f"--cluster {where}: cannot connect ({error}). {hint}") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # the probe below lacks Ray's keys
        return
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            raise StartError(
                f"--cluster {where}: the server is not Ray, or does not respond within "
                f"{CONNECT_S:g} s. {hint}"
            ) from None


def _init(address: str, options: Mapping[str, Any]) -> None:
    """Call `ray.init`, twice if a busy head node fails to start the process for this client."""
    options = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR", **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Ray Client connection timed out")  # the exception says so
        try:
            ray.init(address, **options)
        except ConnectionAbortedError:
            ray.init(address, **options)


@contextlib.contextmanager
def reserved(run: str, placement: Placement, home: str, timeout_s: float) -> Iterator[ActorSlots]:
    """Reserve all slots of a run. `home` is the resource of the node for the first bundle.

    Raises StartError if the cluster does not grant them within `timeout_s`.
    """
    bundles = placement.bundles
    bundles[0][home] = HOME_AMOUNT
    group = placement_group(bundles, strategy="PACK", name=f"tidegate-{run}")
    try:
        if not group.wait(timeout_s):
            raise StartError(
                f"timed out after {timeout_s:g} s waiting for the Ray placement group.\nRequested:\n"
                + "".join(f"  {line}\n" for line in placement.lines())
                + f"The cluster has {_format_available(ray.cluster_resources())}; free are "
                f"{_format_available(ray.available_resources())}.\n"
                "Request less (engine.count, trainer.ranks, agent.workers, cluster.*), or wait longer "
                "(cluster.timeout_s)"
            )
        yield ActorSlots(run, placement, group)
    finally:
        with contextlib.suppress(ConnectionError):  # with the cluster gone, nothing is reserved
            still_connected()
            remove_placement_group(group)


def still_connected() -> None:
    """Raises ConnectionError if the connection has ended; Ray would join or start another cluster instead."""
    if not ray.is_initialized():
        raise ConnectionError("the connection to the cluster has ended")


def _format_available(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "memory", "object_store_memory")
    return format_resources(
        {name: amount for name, amount in resources.items() if not name.startswith(hidden)}
    )


def _describe(error: BaseException) -> str:
    """Describe Ray's error by its first line and its cause."""
    if isinstance(error, AuthenticationError):  # raised before connecting if there is no token
        return f"Ray found no authentication token. Set the cluster's token: {TOKEN}"
    first = str(error).strip().partition("\n")[0].removesuffix(".")
    cause: BaseException | None = error
    while cause is not None:
        if "InvalidAuthToken" in str(cause):
            return f"{first}. The cluster requires its token: {TOKEN}"
        cause = cause.__cause__
    if first == CLIENT_TIMEOUT:  # also raised if the cluster refuses the client
        return (
            f"{first}, though it accepts connections: it may require its token, {TOKEN}, or be starting or "
            "stopping"
        )
    last = str(error).strip().rpartition("\n")[2].removesuffix(".")
    return first if last == first else f"{first}. {last}"


@dataclass(frozen=True, slots=True)
class ActorSlots:
    """The resources that a run has reserved on a cluster."""

    run: str
    placement: Placement
    group: Any
    """Ray's placement group."""

    def create_actor(self, name: str, cls: type, *arguments: object, restarts: int = 0) -> Any:
        """Create the actor `name` in its slot; Ray restarts it up to `restarts` times. Raises StartError."""
        slot = self.placement[name]
        resources = dict(slot.resources)
        options: dict[str, Any] = {
            "name": f"tidegate-{self.run}-{name}",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": restarts,
            "max_concurrency": CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=slot.bundle
            ),
        }
        try:
            return ray.remote(cls).options(**options).remote(*arguments)
        except ValueError as error:  # ActorAlreadyExistsError is one
            raise StartError(
                f"{options['name']} could not be created: {error}. If a run of this name is on the cluster, "
                "choose another run.name"
            ) from None
