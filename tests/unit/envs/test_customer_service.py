"""The customer-service environment: its tasks, its simulated users and its reward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from examples.service.database import Database
from examples.service.env import CustomerService
from examples.service.scenario import UserScenario, held_out_pair, make_scenario, pool
from examples.service.scripted_user import INSISTENCE, UNCLEAR, ScriptedUser
from examples.service_base.clerk import ASK_IDENTITY, DONE, REFUSAL, Clerk, Mistakes
from tests.scripted_llm import scripted_llm
from tests.service_desk import converse, says
from tidegate.envs.base import Done
from tidegate.errors import ConfigError, InfrastructureError
from tidegate.types import Task

SHOP = CustomerService()


def train_tasks(count: int) -> list[Task]:
    return [SHOP.train_task(index) for index in range(count)]


@cache
def first_task(kind: str, forbidden: str | None) -> Task:
    """The first training task whose only wish is of a kind."""
    for task in map(SHOP.train_task, range(2000)):
        wishes = make_scenario(**task.info).wishes
        if len(wishes) == 1 and (wishes[0].kind, wishes[0].forbidden) == (kind, forbidden):
            return task
    raise AssertionError("there is no such task")


async def test_an_agent_that_follows_the_rules_solves_every_task() -> None:
    for tasks in (train_tasks(100), *(held_out[:100] for held_out in SHOP.eval_sets().values())):
        turns = []
        for task in tasks:
            scored, messages = await converse(SHOP, task, Clerk().reply)
            assert scored.reward == 1.0, (task.id, messages)
            turns.append(sum(message["role"] == "assistant" for message in messages))
        assert sum(turns) / len(turns) > 5
        assert sum(count >= 4 for count in turns) > 0.85 * len(turns)


async def test_the_same_task_always_starts_alike() -> None:
    for task, again in zip(
        train_tasks(50), [CustomerService().train_task(n) for n in range(50)], strict=True
    ):
        assert task == again
        first, second = await SHOP.setup(task), await CustomerService().setup(again)
        assert first.database == second.database
        assert first.scenario == second.scenario
        first.database.orders.clear()
        assert second.database.orders, "episodes share no state"
        assert (await SHOP.setup(task)).database == second.database
    assert SHOP.train_task(1) != CustomerService(seed=1).train_task(1)


def test_held_out_tasks_have_other_names_numbers_items_and_pairs() -> None:
    def words(database: Database) -> set[str]:
        orders = database.orders.values()
        return {
            *database.customers, *database.orders, *database.stock, *(one.item for one in orders),
            *(part for one in database.customers.values() for part in (one.name, one.zip_code)),
            *(one.address.split()[1] for one in orders),
        }  # fmt: skip

    def scenarios(tasks: Sequence[Task]) -> list[UserScenario]:
        return [make_scenario(**task.info) for task in tasks]

    sets = SHOP.eval_sets()
    train, held_out = scenarios(train_tasks(300)), scenarios([*sets[""], *sets["combinations"]])
    seen = set().union(*(words(one.database) for one in train))
    closed = set().union(*(words(one.database) for one in held_out))
    assert not seen & closed
    assert not set(pool(True).items) & set(pool(False).items)
    for one in (*train, *scenarios(sets[""])):
        assert len(one.wishes) == 1 or not held_out_pair(one.wishes[0].kind, one.wishes[1].kind)
    for one in scenarios(sets["combinations"]):
        assert held_out_pair(one.wishes[0].kind, one.wishes[1].kind)
    reasons = Counter(wish.forbidden for one in train for wish in one.wishes)
    assert set(reasons) == {None, "identity", "owner", "status", "stock"}
    assert 0.55 < reasons[None] / reasons.total() < 0.75


async def test_refusing_is_right_only_if_the_rules_forbid_the_wish() -> None:
    strict = Clerk(Mistakes(too_strict=1.0, too_lax=0.0))
    for task in train_tasks(30):
        forbidden = [wish.forbidden is not None for wish in make_scenario(**task.info).wishes]
        scored, messages = await converse(SHOP, task, strict.reply)
        assert scored.reward == float(all(forbidden)), messages
    task = first_task("refund", "status")
    scored, _ = await converse(SHOP, task, claiming(Clerk()))
    assert scored.metrics["right_database"] == scored.metrics["rule_checks"] == 1.0
    assert scored.reward == 0.0, "the user must be told"


def claiming(clerk: Clerk) -> Any:
    """Claims success where the clerk refuses."""

    def reply(messages: Sequence[Any]) -> Any:
        message = clerk.reply(messages)
        return says(DONE) if message["content"] == REFUSAL else message

    return reply


async def test_the_checks_of_the_rules_are_demanded() -> None:
    for kind, forbidden in (("cancel", "status"), ("cancel", "identity"), ("price", "owner")):
        scored, _ = await converse(SHOP, first_task(kind, forbidden), lambda _: says(REFUSAL))
        assert scored.metrics["right_database"] == scored.metrics["user_told"] == 1.0
        assert scored.reward == 0.0, f"refused {forbidden} without a look"
    scored, messages = await converse(SHOP, first_task("refund", None), Clerk(Mistakes(no_look=1.0)).reply)
    assert scored.metrics["right_database"] == 1.0
    assert scored.reward == scored.metrics["rule_checks"] == 0.0, messages


async def test_a_wrong_final_database_is_worth_nothing() -> None:
    task = first_task("cancel", "status")
    scored, _ = await converse(SHOP, task, Clerk(Mistakes(too_lax=1.0)).reply)
    assert scored.reward == scored.metrics["right_database"] == 0.0
    state = await SHOP.setup(task := first_task("cancel", None))
    order = state.scenario.wishes[0].order
    state.over = state.searched = True
    state.looked.add(order)
    state.said.append(says(DONE))
    assert SHOP.score(task, None, None, [], state).reward == 0.0
    state.database = reversed_database(state.scenario.database)
    state.database.cancel(order)
    assert SHOP.score(task, None, None, [], state).reward == 1.0, "in any order of entries"
    other = next(key for key in state.database.orders if key != order)
    state.database.cancel(other)
    assert SHOP.score(task, None, None, [], state).reward == 0.0


def reversed_database(database: Database) -> Database:
    made = copy.deepcopy(database)
    return Database(*(dict(reversed(part.items())) for part in (made.customers, made.orders, made.stock)))


async def test_a_price_must_be_told_to_its_customer_only() -> None:
    task = first_task("price", None)
    price = make_scenario(**task.info).facts()[0]
    for text, reward in ((f"It cost {price} euros.", 1.0), ("It is done.", 0.0), (f"{price}0 euros", 0.0)):

        def reply(messages: Sequence[Any], text: str = text) -> Any:
            message = Clerk().reply(messages)
            return says(text) if "euros" in message["content"] else message

        scored, _ = await converse(SHOP, task, reply)
        assert scored.reward == reward, text


async def test_a_conversation_that_the_user_gives_up_is_worth_nothing() -> None:
    task = first_task("cancel", "owner")
    scored, messages = await converse(SHOP, task, lambda _: says(""))
    assert [one["content"] for one in messages if one["role"] == "user"][1:] == [UNCLEAR, UNCLEAR]
    assert scored.metrics["conversation_ended"] == 0.0
    assert scored.reward == 0.0


def test_the_scripted_user_answers_what_is_asked() -> None:
    scenario = make_scenario(**first_task("readdress", None).info)
    scenario = replace(scenario, introduced=False, nameless=True, insists=True)
    identity = f"I am {scenario.name}, zip code {scenario.zip_code}."
    order, target = f"It is order {scenario.wishes[0].order}.", f"{scenario.wishes[0].target}."
    for reply, answer in (
        (ASK_IDENTITY, identity),
        ("Hello! Please provide your name and the order number.", f"{identity} {order}"),
        ("To which address should it go?", target),
        ("Do you want me to change it?", "Yes, please."),
        ("I'm unable to do that.", INSISTENCE),
        ("What time is it?", UNCLEAR),
        ("It has been changed. Can I help you with anything else?", None),
    ):
        assert ScriptedUser(scenario).answer(reply) == answer, reply
    user = ScriptedUser(scenario)
    assert [user.answer(REFUSAL) for _ in range(2)] == [INSISTENCE, None], "the user insists once"
    user = ScriptedUser(scenario)
    assert [user.answer(ASK_IDENTITY) for _ in range(4)] == [identity, identity, identity, None]
    assert user.gave_up


async def test_a_model_plays_the_user() -> None:
    task = first_task("cancel", None)
    scenario = make_scenario(**task.info)
    identity = f"I'm {scenario.name}, zip code {scenario.zip_code}."

    def user(body: Any) -> dict[str, Any]:
        asked = body["messages"][-1]["content"]
        return {"content": identity if asked == ASK_IDENTITY else "Great, thanks! [END]"}

    async with scripted_llm(user) as (url, requests):
        shop = CustomerService(user={"url": url, "model": "user"})

        def reply(messages: Sequence[Any]) -> Any:  # the clerk reads the script's wording
            worded = [{**one, "content": str(one["content"]).replace("I'm", "I am")} for one in messages]
            return Clerk().reply(worded)

        scored, messages = await converse(shop, task, reply)
    assert scored.reward == 1.0
    if not scenario.introduced:
        assert identity in [one["content"] for one in messages]
    prompt = requests[0]["messages"]
    assert scenario.wishes[0].order in prompt[0]["content"]
    assert [one["role"] for one in prompt] == ["system", "assistant", "user"], "its own messages are replies"
    assert requests[0]["model"] == "user"


async def test_a_failing_user_model_is_a_failure_of_the_infrastructure() -> None:
    task = first_task("cancel", None)
    async with scripted_llm(lambda body: {"content": " "}) as (url, requests):
        shop = CustomerService(user={"url": url, "model": "user", "attempts": 2, "timeout_s": 5})
        state = await shop.setup(task)
        with pytest.raises(InfrastructureError, match="no answer in 2 attempts: an empty answer"):
            await shop.respond(state, says(DONE))
        assert len(requests) == 2
    with pytest.raises(InfrastructureError, match="APIConnectionError"):
        await shop.respond(state, says(DONE))


async def test_a_conversation_with_a_model_has_an_end() -> None:
    async with scripted_llm(lambda body: {"content": "And?"}) as (url, _):
        shop = CustomerService(user={"url": url, "model": "user"})
        state = await shop.setup(SHOP.train_task(0))
        answers = [await shop.respond(state, says("Yes.")) for _ in range(20)]
    assert answers[:-1] == ["And?"] * 19
    assert isinstance(answers[-1], Done)
    assert not state.over


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER_KEY", raising=False)
    for user, why in (
        ({"url": "http://x/v1"}, "model"),
        ({"url": "http://x/v1", "model": "m", "modle": 1}, "modle"),
        ({"url": "http://x/v1", "model": "m", "api_key_env": "USER_KEY"}, "'USER_KEY', but that variable"),
        ({"url": "http://x/v1", "model": "m", "attempts": 0}, "attempts = 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            CustomerService(user=user)
