"""Conversations: what calls with a project key belong to, and the feedback that rewards them.

A call belongs to the conversation that it names, else to the one whose recorded history it extends, else it
begins one. A conversation is a session that is a group of its own. It ends by itself, `idle_s` after its last
call or feedback if it has feedback, and is then offered to the trainer. Without feedback it ends `unrewarded`
after `feedback_window_s`. With reward functions each conversation ends as if it had feedback, and is scored.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from tidegate.errors import GatewayError
from tidegate.gateway.clients.conversation_index import (
    ClientCall,
    Conversation,
    ConversationIndex,
    bare_reply_id,
    read_call,
)
from tidegate.gateway.clients.notes import notes_of, received
from tidegate.gateway.clients.protection import CallRates, check_total
from tidegate.gateway.dialects.base import Dialect
from tidegate.gateway.engines.fair_queue import has_room
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.groups.store import ERASED
from tidegate.gateway.sessions.model_calls import RawBody
from tidegate.gateway.sessions.session import FinishReport, GatewaySession, SessionRequest
from tidegate.gateway.turns.request_reader import LARGE
from tidegate.service.backoff import backoff_s
from tidegate.types import CONVERSATION, Outcome, Task

log = logging.getLogger("tidegate.gateway")
SWEEP_S = 0.5
LONGEST_S = 60.0
"""Longest delay between two tries to end a conversation."""
MAX_CONVERSATIONS = 10_000
"""Limit of the conversations that have not ended, of all clients together; a client below its equal share of
them may always begin one."""
MAX_UNREWARDED = 1000
"""Limit of the ended conversations without a reward that are kept for each client; the oldest is deleted."""


class Conversations:
    """The conversations of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.rates = CallRates()
        self._gateway = gateway
        gateway.sessions.on_forgotten = self._on_forgotten
        self._failed: list[str] = []
        """Why conversations could not be ended in this sweep."""
        self._index = ConversationIndex()
        self._calling: set[Conversation] = set()
        """Conversations with calls since the indices were updated."""
        self._beginning = asyncio.Lock()
        """Held while a conversation begins, so that simultaneous calls begin it once."""
        self._sweeper: asyncio.Task[None] | None = None
        self._ending: dict[str, asyncio.Task[None]] = {}
        """By session id: the tasks that end conversations, which wait for reward functions."""
        self._unrewarded: defaultdict[str, deque[str]] = defaultdict(deque)
        """By client: the session ids of ended conversations without a reward, oldest first."""
        self._probe = GatewaySession(id="", key_hash=b"", opened=0.0, deadline=0.0)

    @property
    def _scored_by(self) -> Sequence[str]:
        """Names of the reward functions of conversations."""
        environments = self._gateway.options.environments
        info = None if environments is None else environments.info(CONVERSATION)
        return () if info is None else info.rewards

    def _restore(self) -> None:
        now = asyncio.get_running_loop().time()
        for session in self._gateway.sessions.all():
            sealed = self._gateway.groups.get(session.group_id or "") is not None
            if session.conversation is not None and session.client is not None and not sealed:
                self._index.add_turns(self._index.add(session, session.client, now))

    # -- calls -----------------------------------------------------------------------------------

    async def session_of(
        self, client: str, dialect: Dialect, body: RawBody, headers: Mapping[bytes, bytes]
    ) -> GatewaySession:
        """Return the session of a call, which may begin a conversation.

        Args:
            client: Name of the call's project key.
            dialect: The call's dialect.
            body: Its body.
            headers: Its headers.

        Raises:
            ApiError: The call cannot be read or names an unknown predecessor, or there is no room.
        """
        policies = self._gateway.policies.by_name
        if len(body) > LARGE:
            run = self._gateway.threads.run
            call = await run(True, read_call, dialect, body, headers, self._probe, policies)
        else:
            call = read_call(dialect, body, headers, self._probe, policies)
        self._update()
        found = self._find(client, call)
        if found is None:
            async with self._beginning:
                found = self._find(client, call) or await self._begin(client, call)
        found.used = asyncio.get_running_loop().time()
        self._calling.add(found)
        return found.session

    def _find(self, client: str, call: ClientCall) -> Conversation | None:
        if call.previous is not None:
            reply = self._index.reply(client, call.previous)
            if reply is None or self._is_over(reply[0]):
                raise ApiError(
                    f"there is no response {call.previous!r} of this key, or its conversation has ended"[
                        :300
                    ],
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            return reply[0]
        if call.name is not None:
            found = self._index.named(client, call.name)
            return None if found is None or self._is_over(found) else found
        repeated = self._index.beginning_with(client, call.digest) if call.retry else None
        if repeated is not None and not self._is_over(repeated):
            return repeated
        extended = self._index.extended(client, call.replies)
        return next((one for one in extended if not self._is_over(one)), None)

    def _is_over(self, conversation: Conversation) -> bool:
        """Return whether it accepts no more calls, though it may still be scored."""
        return conversation.session.closed is not None or conversation.session.id in self._ending

    async def _begin(self, client: str, call: ClientCall) -> Conversation:
        held = Counter(one.client for one in self._index.open.values())
        if not has_room(held, client, MAX_CONVERSATIONS, least=1):
            raise ApiError(
                f"{len(self._index.open)} conversations have not ended, {held[client]} of them of this key, "
                "which is the limit; try again later",
                status=429,
                type="too_many_conversations",
                code="too_many_conversations",
                retryable=True,
            )
        group_id = f"{client}.{secrets.token_hex(8)}"
        request = SessionRequest(
            task=Task(CONVERSATION, "", []),
            sampling=self._gateway.options.client_sampling,
            deadline_s=math.inf,
            group_id=group_id,
            slot=0,
            env=CONVERSATION if self._scored_by else "",
            candidate=self._gateway.pool.draws_candidate(group_id),
        )
        session, _ = await self._gateway.open_session(request, client, call.name or "")
        found = self._index.add(session, client, asyncio.get_running_loop().time())
        self._index.add_first_request(found, call.digest)
        return found

    def _update(self) -> None:
        """Index the turns that calls have recorded."""
        for conversation in list(self._calling):
            self._index.add_turns(conversation)
            if not conversation.session.calls.running:
                conversation.used = asyncio.get_running_loop().time()
                self._calling.discard(conversation)

    # -- feedback --------------------------------------------------------------------------------

    async def feedback(
        self,
        client: str,
        about: str,
        name: str,
        value: float,
        turn: bool,
        comment: str | None = None,
        correction: str | None = None,
    ) -> str:
        """Reward a conversation, or with `turn` one reply. A repeated name replaces the earlier value.

        Args:
            client: Name of the project key.
            about: Id of a reply, or name of a conversation.
            name: Name of the reward.
            value: The reward.
            turn: Whether the reward is for the reply alone.
            comment: A text that is kept with the conversation.
            correction: What the reply (or the newest one) should have been; kept as a demonstration.

        Returns:
            The name of the conversation's group, by which its end can be read.

        Raises:
            GatewayError: 404 without such a reply or conversation, 410 if it has ended, 409 if what is given
                needs a complete reply.
        """
        if name in self._scored_by:
            raise GatewayError(f"{name!r} is the name of a reward function; use another one", status=400)
        self._update()
        reply = self._index.reply(client, bare_reply_id(about))
        conversation = self._index.about(client, about)
        if conversation is None:
            conversation = self._replying(client, bare_reply_id(about))
            if conversation is not None and (turn or comment is not None or correction is not None):
                why = (
                    "the reply is not complete: repeat feedback for it alone, comments and corrections later"
                )
                raise GatewayError(why, status=409)
        if conversation is None:
            raise GatewayError(
                f"there is no reply and no conversation {about!r} of this key, or it has ended"[:300],
                status=404,
            )
        if turn and reply is None:
            raise GatewayError("a reward for one reply needs the reply's id", status=400)
        index = reply[1] if turn and reply is not None else None
        session = conversation.session
        check_total(session, name, value, index, self._gateway.options.reward_range)
        about_turn = None if reply is None else reply[1]
        notes = notes_of(session, name, about_turn, comment, correction)
        notes |= received(session, name, value, about_turn, reply_only=turn)
        await self._gateway.post_reward(session.id, name, value, index, notes)
        conversation.used = asyncio.get_running_loop().time()
        return (conversation.session.group_id or "").rpartition(".")[2]

    # -- erasure ---------------------------------------------------------------------------------

    async def erase(self, client: str, about: str) -> tuple[str, bool]:
        """Delete all that is recorded of a conversation or group of a client.

        Args:
            client: Name of the project key.
            about: Id of a reply or name of a conversation that has not ended, or the name of a group.

        Returns:
            The name of the group, and whether it was erased before.

        Raises:
            GatewayError: 404 if the key has none of these.
        """
        self._update()
        conversation = self._index.about(client, about)
        group_id = f"{client}.{about}" if conversation is None else conversation.session.group_id or ""
        groups = self._gateway.groups
        known = (
            groups.get(group_id) or groups.end_reason(group_id) or self._gateway.sessions.of_group(group_id)
        )
        if not known:
            raise GatewayError(
                f"there is no reply, conversation or group {about!r} of this key; a conversation that has "
                "ended is named by its group"[:300],
                status=404,
            )
        again = groups.end_reason(group_id) == ERASED
        await self._gateway.erase(group_id)
        return group_id.rpartition(".")[2], again

    def _replying(self, client: str, reply_id: str) -> Conversation | None:
        """Return the conversation with a reply of this id that is still being sampled."""
        for conversation in self._calling:
            running = conversation.session.calls.running
            if conversation.client == client and any(call.id == reply_id for call in running):
                return conversation
        return None

    # -- endings ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore a restarted gateway's conversations, and end them from now on when their time has come."""
        self._restore()
        self._sweeper = asyncio.create_task(self._sweep(), name="conversation sweeper")
        self._sweeper.add_done_callback(self._on_sweeper_done)

    async def close(self) -> None:
        tasks = [*self._ending.values(), *([] if self._sweeper is None else [self._sweeper])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_sweeper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._gateway.fail(f"the conversation sweeper failed: {task.exception()!r}")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._update()
            now = asyncio.get_running_loop().time()
            for conversation in list(self._index.open.values()):
                session = conversation.session
                due = session.id not in self._ending and now >= conversation.again
                if due and not session.calls.running:
                    self._end_if_due(conversation, now - conversation.used)
            if self._failed:  # one line for all: they may be thousands
                log.error("%d conversations could not be ended yet: %s", len(self._failed), self._failed[0])
                self._failed.clear()

    def _end_if_due(self, conversation: Conversation, idle_s: float) -> None:
        """Start the task that ends a conversation whose time has come."""
        session, options = conversation.session, self._gateway.options
        scored = session.env == CONVERSATION and bool(self._scored_by)
        rewarded = scored or bool(session.rewards or session.turn_rewards)
        limit_s = options.conversation_idle_s if rewarded else options.feedback_window_s
        if session.ending is None and idle_s < limit_s:
            return
        task = asyncio.create_task(self._end(conversation, rewarded), name=f"end {session.id}")
        self._ending[session.id] = task
        task.add_done_callback(lambda done: self._on_ended(conversation, done))

    def _on_ended(self, conversation: Conversation, task: asyncio.Task[None]) -> None:
        session_id = conversation.session.id
        del self._ending[session_id]
        if task.cancelled() or (error := task.exception()) is None or session_id not in self._index.open:
            return
        if isinstance(error, GatewayError):  # it is tried again
            delay_s = backoff_s(conversation.failures, SWEEP_S, LONGEST_S)
            conversation.again = asyncio.get_running_loop().time() + delay_s
            conversation.failures += 1
            self._failed.append(f"{session_id}: {error}")
        else:
            self._gateway.fail(f"the end of conversation {session_id} failed: {error!r}")

    async def _end(self, conversation: Conversation, rewarded: bool) -> None:
        session = conversation.session
        report = FinishReport() if rewarded else FinishReport(Outcome.UNREWARDED, "no feedback came in time")
        trajectory = await self._gateway.finish(session.id, report)
        has_reward = trajectory is not None and trajectory.reward is not None
        if has_reward:
            await self._gateway.seal(session.group_id or "", CONVERSATION, [session.id])
        self._forget(conversation)
        if not has_reward:
            ended = self._unrewarded[conversation.client]
            ended.append(session.id)
            if len(ended) > MAX_UNREWARDED:
                await self._gateway.delete_session(ended.popleft())

    def _on_forgotten(self, session: GatewaySession) -> None:
        """End a conversation whose session was deleted: its client or the trainer ended its group."""
        if (conversation := self._index.open.get(session.id)) is not None:
            self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        self._calling.discard(conversation)
        self._index.remove(conversation)
