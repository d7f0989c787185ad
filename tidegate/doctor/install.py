"""Checks the installed packages, the gateway's address, and whether sandboxes start, where they are used."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from tidegate import __version__
from tidegate.config import Settings
from tidegate.doctor.findings import Finding, error, note, ok, warning
from tidegate.errors import SandboxError, StartError
from tidegate.program import advise_extra
from tidegate.sandbox import open_sandbox
from tidegate.service.serve import Listen, bind

OLDEST_PYTHON = (3, 11)


def check_install(settings: Settings) -> list[Finding]:
    """Checks the versions of Python, of the packages of a gateway, and torch."""
    findings = []
    if sys.version_info < OLDEST_PYTHON:
        findings.append(
            error("install", "old_python", f"Python {platform.python_version()} is too old: 3.11 is required")
        )
    required = _requirements()
    if required is None:
        text = "tidegate runs from source without installation; packages not checked"
        findings.append(note("install", "not_installed", text))
    for requirement in required or ():
        findings += _package(requirement)
    if not findings:
        findings.append(
            ok("install", f"tidegate {__version__}, Python {platform.python_version()}, packages")
        )
    return [*findings, _torch(settings)]


def _requirements() -> list[Requirement] | None:
    try:
        lines = metadata.requires("tidegate") or []
    except metadata.PackageNotFoundError:
        return None
    requirements = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": "gateway"}):
            requirements.append(requirement)
    return requirements


def _package(requirement: Requirement) -> list[Finding]:
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [error("install", "package_missing", f"the package {name} is missing", f"pip install {name}")]
    if requirement.specifier.contains(version, prereleases=True):
        return []
    text = f"{name} {version} is installed; {requirement.specifier} is required"
    return [error("install", "package_version", text, f"pip install '{name}{requirement.specifier}'")]


def _torch(settings: Settings) -> Finding:
    try:
        return ok("install", f"torch {metadata.version('torch')}")
    except metadata.PackageNotFoundError:
        pass
    fix = advise_extra("train")
    if settings.engine.urls:
        return warning("install", "no_torch", "torch is not installed: this machine cannot train", fix)
    text = "torch is not installed: neither the embedded engine nor training can start"
    return error("install", "no_torch", text, fix)


def check_port(settings: Settings) -> Finding:
    """Checks whether the gateway can listen on its configured address."""
    gateway = settings.gateway
    where = f"{gateway.host}:{gateway.port}"
    try:
        bind(Listen(gateway.host, gateway.port), "gateway.port").close()
    except StartError as failure:
        text = f"the port is taken, or the address is not this machine's: {failure}"
        return error("port", "port_taken", text, "gateway.port = 0 selects a free port")
    return ok("port", "the gateway selects a free port" if gateway.port == 0 else f"{where} is free")


async def check_sandbox(settings: Settings) -> list[Finding]:
    """Opens a sandbox and runs a command in it; no finding if no option `sandbox` is `bubblewrap`."""
    if "bubblewrap" not in (settings.agent.options.get("sandbox"), settings.env.options.get("sandbox")):
        return []
    try:
        async with await open_sandbox() as box:
            result = await box.run("true", 10)
    except SandboxError as failure:
        text = f"no sandbox can be started: {failure}"
        return [error("sandbox", "sandbox_does_not_start", text, "docs/sandbox.md has the requirements")]
    if not result.ok:
        text = f"`true` ended with exit code {result.exit_code} in a sandbox: {result.stderr[-500:]}"
        return [error("sandbox", "sandbox_broken", text)]
    return [ok("sandbox", f"bubblewrap starts sandboxes; a command takes {1000 * result.seconds:.0f} ms")]
