"""Loads the policies that a gateway serves, and chooses one by a request's model name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.errors import unknown_model
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.options import GatewayOptions, PolicyModel
from tidegate.gateway.parsing.tool_calls.registry import choose
from tidegate.gateway.rendering.conformance import check_conformance
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.turns.prompts import PolicyRoute, PromptBuilder, model_context
from tidegate.types import MODEL_NAME

log = logging.getLogger("tidegate.gateway")
_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")


class ServedPolicy(NamedTuple):
    """A policy with its tokenizer, chat template and tool-call format."""

    model: str
    """Name in requests, replies and model lists."""
    renderer: Renderer
    tool_format: str
    """Name of the tool-call format, and why it is that one."""
    prompts: PromptBuilder


class ServedPolicies:
    """The policies of a gateway: those of `GatewayOptions.policies`, or one without a name.

    Policies whose tokenizer files have the same content share a renderer.

    Args:
        options: Options of the gateway.
        pool: The engines.
        metrics: Counters of the gateway.
        renderer: That of the only policy, if it is loaded already.

    Raises:
        StartError: A tokenizer cannot be loaded, or a template fails.
    """

    def __init__(
        self,
        options: GatewayOptions,
        pool: EnginePool,
        metrics: GatewayMetrics,
        renderer: Renderer | None = None,
    ) -> None:
        models = options.policies or {"": PolicyModel(options.model, options.tool_parser)}
        loaded = {} if renderer is None else {_content(options.model): renderer}
        self.by_name: dict[str, ServedPolicy] = {}
        for name, own in models.items():
            content = _content(own.model)
            # Policies of one base are common, and a tokenizer takes seconds to load.
            if content not in loaded:
                loaded[content] = Renderer.load(own.model)
            renderer = loaded[content]
            tool_format, why = choose(own.tool_parser, renderer.render_text)
            exempt = None if own.train else f"policy {name!r}, which is frozen"
            policy = PolicyRoute(name, own.engines or name, own.adapter, exempt)
            context = model_context(own.model)
            prompts = PromptBuilder(
                renderer, pool, metrics, tool_format, context, options.structured_output, policy
            )
            self.by_name[name] = ServedPolicy(
                name or MODEL_NAME, renderer, f"{tool_format.name}, {why}", prompts
            )
        self.default = next(iter(self.by_name.values()))
        self.named = bool(options.policies)
        self.models = [policy.model for policy in self.by_name.values()]
        self.engine_sets = {policy.prompts.policy.engines for policy in self.by_name.values()}
        """Values of `EngineEndpoint.policy`."""

    def of(self, model: object) -> ServedPolicy:
        """Returns the policy that a request names: the only one under any name. Raises ApiError."""
        if not self.named:
            return self.default
        # A request body may have anything there, also what cannot be hashed.
        policy = self.by_name.get(model) if isinstance(model, str) else None
        if policy is None:
            raise unknown_model(model, self.models)
        return policy

    def renderers(self) -> Iterator[Renderer]:
        """Yields each renderer once."""
        yield from {id(policy.renderer): policy.renderer for policy in self.by_name.values()}.values()

    def check_templates(self) -> None:
        """Logs how exactly each template continues recorded tokens, and which tool-call formats are read."""
        reports = {id(renderer): check_conformance(renderer).summary() for renderer in self.renderers()}
        for name, policy in self.by_name.items():
            of = f" of policy {name!r}" if name else ""
            log.info("chat template%s: %s", of, reports[id(policy.renderer)])
            log.info("tool calls%s: %s", of, policy.tool_format)


def _content(model: Path) -> bytes:
    """Returns a hash of the files that a tokenizer with its template may be read from."""
    digest = blake2b(digest_size=16)
    for path in sorted(model.rglob("*")) if model.is_dir() else ():
        if path.suffix in _TOKENIZER_FILES and not path.name.endswith(".index.json") and path.is_file():
            digest.update(b"%b\0%b\0" % (str(path.relative_to(model)).encode(), path.read_bytes()))
    return digest.digest()
