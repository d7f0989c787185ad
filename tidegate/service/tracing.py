"""Sends OpenTelemetry spans by OTLP over HTTP. Its SDK reads `OTEL_EXPORTER_OTLP_ENDPOINT` and similar."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from tidegate.errors import StartError
from tidegate.program import advise_extra

EXPORT_S = 5
"""Time limit of one export, and of the last one when a process ends."""
Attributes = Mapping[str, str | float]


def check_tracing(setting: str) -> None:
    """Raises StartError, which names the setting, if OpenTelemetry's SDK or exporter is not installed."""
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise StartError(
                f"{setting} needs {package}, which is not installed: {advise_extra('opentelemetry')}"
            )


class Spans:
    """Sends spans in a background thread. Spans that cannot be sent are dropped, with a line in the log.

    Args:
        service: Name of the process in traces, unless `OTEL_SERVICE_NAME` is set.
    """

    def __init__(self, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("tidegate")

    def add(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        parent: Any = None,
        error: str | None = None,
    ) -> Any:
        """Send a span that has ended; returns it, as `parent` of others.

        Args:
            name: Name of the operation.
            start: Unix time.
            end: Unix time.
            attributes: Values of the span.
            parent: Span that this operation is a part of.
            error: Why the operation failed; None if it did not.
        """
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        context = None if parent is None else set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(start))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(end))
        return span

    def close(self) -> None:
        """Send what remains, for at most `EXPORT_S` seconds. Blocks."""
        self._provider.force_flush(1000 * EXPORT_S)
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
