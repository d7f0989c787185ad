"""A collector of OpenTelemetry spans: the real protocol (OTLP over HTTP, protobuf) on loopback."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.serving import served


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    attributes: dict[str, Any]
    start: float
    end: float
    id: bytes
    parent: bytes
    error: str | None


@dataclass
class Collector:
    spans: list[Span] = field(default_factory=list)
    url: str = ""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent == parent.id]

    async def receive(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for scope in of_resource.scope_spans:
                self.spans += [_read(span, service) for span in scope.spans]
        return Response()


def _read(span: Any, service: str) -> Span:
    return Span(
        span.name, service, _values(span.attributes), span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9, span.span_id, span.parent_span_id,
        span.status.message if span.status.code == 2 else None,
    )  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Serves a collector."""
    collector = Collector()
    app = Starlette(routes=[Route("/v1/traces", collector.receive, methods=["POST"])])
    async with served(app) as url:
        collector.url = url
        yield collector
