"""A tool call whose id an earlier call had is another call."""

from __future__ import annotations

import pytest

from tests.fakes import Stage
from tests.integration.gateway.test_environments import (
    LocalEnvironments,
    call,
    finished,
    opened,
    service,
    stage,
)

__all__ = ["service", "stage"]


@pytest.mark.parametrize("call_id", ["", "call_0", "functions.enter:0"])
async def test_calls_of_one_id_run_each(stage: Stage, service: LocalEnvironments, call_id: str) -> None:
    """open-webui/open-webui#28305, can1357/oh-my-pi#2055, NousResearch/hermes-agent#70724"""
    session = await opened(stage)
    results = [await session.call(call("enter", call_id, digit=digit)) for digit in (4, 4, 7)]
    assert [result["content"] for result in results] == ["closed"] * 3
    assert {result["tool_call_id"] for result in results} == {call_id}
    assert service.calls == 3
    recorded = (await finished(stage, session)).tool_calls
    assert [one.arguments["digit"] for one in recorded] == [4, 4, 7]
