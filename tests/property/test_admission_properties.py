"""Admission against lossy messages, repeats, reordering, cancels, crashes and a new leader.

A model of two instances and of gateways that retry: every message between them and admission may
be lost, repeated or late. Whatever the order, the account is never negative and zero at rest, a
key has one grant, a lease is consumed once, and a call has one session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from talaria_admission.config import AdmissionConfig
from talaria_admission.events import Admit, CancelAnswered, Loaded, Opened, SendCancel, Tick
from talaria_admission.policy import Admission
from talaria_common.policies import policy_set
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    CallKey,
    CallSettled,
    CancelCall,
    EndReason,
    EndSession,
    Grant,
    Granted,
    HeldPrefix,
    LiveGrant,
    ModelState,
    NotGranted,
    PlaceCall,
    PlaceReason,
    Snapshot,
    Usage,
)
from tests.unit.admission_worlds import MODEL, a_candidate, chain

INSTANCES = ("i-1", "i-2")
SESSIONS = st.sampled_from([None, "s1", "s2"])


@dataclass
class Instance:
    """What one boot of an instance holds."""

    name: str
    boot: int = 1
    version: int = 0
    epoch_seen: int = 0
    live: dict[CallKey, LiveGrant] = field(default_factory=dict)
    ended: list[tuple[float, CallEnded]] = field(default_factory=list)
    seen: set[CallKey] = field(default_factory=set)

    @property
    def boot_id(self) -> str:
        return f"{self.name}-{self.boot}"

    def snapshot(self, now_s: float) -> Snapshot:
        self.version += 1
        kept = [(at, e) for at, e in self.ended if now_s - at < 10]
        return Snapshot(
            instance=self.name,
            boot_id=self.boot_id,
            version=self.version,
            epoch_seen=self.epoch_seen,
            models=(ModelState(model=MODEL, residency="active"),),
            prefixes=tuple(
                HeldPrefix(e.tail.digest, 10, "host") for _, e in kept if e.tail is not None
            ),
            live_grants=tuple(self.live.values()),
            ended=tuple(_aged(e, now_s - at) for at, e in kept),
        )


def _aged(end: CallEnded, age_s: float) -> CallEnded:
    fields = {name: getattr(end, name) for name in CallEnded.__struct_fields__}
    return CallEnded(**(fields | {"age_s": age_s}))


@dataclass
class Asked:
    """A call and the attempts that a gateway made of it."""

    call_id: str
    messages: tuple[str, ...]
    session: str | None
    questions: list[AdmitCall] = field(default_factory=list)


class AdmissionMachine(RuleBasedStateMachine):
    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.minted = 0
        self.instances = {name: Instance(name) for name in INSTANCES}
        self.runs: list[tuple[Granted, AdmitCall]] = []
        self.mail: list[CallEnded] = []
        self.grants: dict[CallKey, Grant] = {}
        self.consumed: dict[int, CallKey] = {}
        self.session_of: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.answers: list[CancelAnswered] = []
        self.epoch = 0
        self._lead(is_successor=False)

    # --- a leader, and another one ---

    def _lead(self, *, is_successor: bool) -> None:
        rows = ()
        if is_successor:
            sessions = self.admission.books.sessions
            rows = tuple(s.row(self.epoch) for s in sessions)
        self.epoch += 1
        self.admission = Admission(AdmissionConfig(), policy_set("talaria"))
        self.step(Loaded(rows=rows, unix_s=1000.0 + self.now_s))
        for instance in self.instances.values():
            self.step(instance.snapshot(self.now_s))
        self.step(Opened(epoch=self.epoch))

    def step(self, event: Any) -> list[Any]:
        effects = self.admission.step(event, self.now_s)
        for effect in effects:
            if isinstance(effect, SendCancel):
                self._cancel_at(effect)
        return effects

    def _cancel_at(self, effect: SendCancel) -> None:
        """The instance stops the attempt or promises to refuse it; its answer comes later."""
        instance = self.instances[effect.instance]
        if effect.key in instance.live:
            self._finish(instance, effect.key, EndReason.CANCELLED)
            self.answers.append(CancelAnswered(key=effect.key, outcome="stopped"))
        elif effect.key not in instance.seen:
            instance.seen.add(effect.key)
            self.answers.append(CancelAnswered(key=effect.key, outcome="unknown"))
        else:
            self.answers.append(CancelAnswered(key=effect.key, outcome="stopped"))

    def _finish(self, instance: Instance, key: CallKey, reason: EndReason) -> None:
        live = instance.live.pop(key)
        end = CallEnded(
            grant=live.grant,
            session=live.session,
            call_index=live.call_index,
            tail=live.tail,
            reason=reason,
            usage=Usage(prompt_tokens=10, completion_tokens=1),
            prefix_tier="device",
        )
        instance.ended.append((self.now_s, end))
        self.mail.append(end)

    # --- gateways and the router ---

    @rule(target=calls, opening=st.sampled_from(["u1", "u2"]), session=SESSIONS)
    def a_new_call(self, opening: str, session: str | None) -> Asked:
        return Asked(self._new_id(), (opening,), session)

    @rule(target=calls, before=calls)
    def a_return(self, before: Asked) -> Asked:
        session = before.session or self.session_of.get(before.call_id)
        return Asked(self._new_id(), (*before.messages, "a:r", "u"), session)

    @rule(target=calls, before=calls, reply=st.sampled_from(["a:r", "u-more"]))
    def a_return_without_id(self, before: Asked, reply: str) -> Any:
        if len(before.messages) > 6:
            return multiple()
        return Asked(self._new_id(), (*before.messages, reply, "u"), None)

    def _new_id(self) -> str:
        self.minted += 1
        return f"c{self.minted}"

    @rule(
        call=calls,
        first=st.sampled_from(INSTANCES),
        is_retry=st.booleans(),
        is_run=st.booleans(),
    )
    def ask(self, call: Asked, first: str, is_retry: bool, is_run: bool) -> None:
        if call.questions and not is_retry:
            return
        ranked = sorted(INSTANCES, key=lambda name: name != first)
        place = PlaceCall(
            key=CallKey(call.call_id, len(call.questions) + 1),
            model=MODEL,
            session=call.session,
            links=chain(*call.messages),
            arrived_unix_s=1000.0 + self.now_s,
        )
        candidates = tuple(a_candidate(i, self.instances[i].boot_id) for i in ranked)
        call.questions.append(AdmitCall(place=place, ranked=candidates))
        self._admit(call.questions[-1])
        if is_run and self.runs:
            self._run(*self.runs[-1])

    @rule(call=calls, data=st.data())
    def ask_again(self, call: Asked, data: st.DataObject) -> None:
        if call.questions:
            self._admit(data.draw(st.sampled_from(call.questions)))

    def _admit(self, question: AdmitCall) -> None:
        key = question.place.key
        effects = self.step(Admit(call=question, fresh_id=f"fresh-{self._new_id()}"))
        (answer,) = (e for e in effects if isinstance(e, Granted | NotGranted))
        if isinstance(answer, NotGranted):
            assert key.call_id not in self.cancelled or answer.error.code == "cancelled"
            return
        assert key.call_id not in self.cancelled
        assert answer.grant.key == key
        if answer.reason is PlaceReason.REPEATED:
            assert answer.grant == self.grants.setdefault(key, answer.grant)
        elif answer.grant.lease_of is not None:
            assert answer.grant.lease_of not in self.consumed, "a lease was consumed twice"
            self.consumed[answer.grant.lease_of] = key
        self.grants[key] = answer.grant
        assert self.session_of.setdefault(key.call_id, answer.session) == answer.session
        self.runs.append((answer, question))

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """A body arrives, in any order, perhaps more than once."""
        if not self.runs:
            return
        self._run(*data.draw(st.sampled_from(self.runs)))

    def _run(self, granted: Granted, question: AdmitCall) -> None:
        grant, instance = granted.grant, self.instances[granted.grant.instance]
        if instance.boot_id != grant.boot_id or grant.epoch < instance.epoch_seen:
            return
        if grant.key in instance.seen:
            return
        for key in [k for k in instance.live if k.call_id == grant.key.call_id]:
            if key.attempt > grant.key.attempt:
                return
            self._finish(instance, key, EndReason.SUPERSEDED)
        instance.epoch_seen = max(instance.epoch_seen, grant.epoch)
        instance.seen.add(grant.key)
        links = question.place.links
        instance.live[grant.key] = LiveGrant(
            grant=grant,
            session=granted.session,
            call_index=granted.call_index,
            tail=links[-1] if links else None,
        )

    @rule(call=calls)
    def client_leaves(self, call: Asked) -> None:
        self.cancelled.add(call.call_id)
        self.step(CancelCall(call_id=call.call_id))

    @rule(call=calls, is_final=st.booleans())
    def settle(self, call: Asked, is_final: bool) -> None:
        if call.call_id in self.session_of:
            self.step(
                CallSettled(
                    key=CallKey(call.call_id, len(call.questions)),
                    session=self.session_of[call.call_id],
                    call_index=0,
                    model=MODEL,
                    outcome="finished",
                    arrived_unix_s=1000.0,
                    ended_unix_s=1000.0 + self.now_s,
                    is_final=is_final,
                )
            )

    @rule(session=st.sampled_from(["s1", "s2"]))
    def end_session(self, session: str) -> None:
        self.step(EndSession(session=session))

    # --- instances and the network ---

    @rule(data=st.data(), name=st.sampled_from(INSTANCES), is_failed=st.booleans())
    def finish(self, data: st.DataObject, name: str, is_failed: bool) -> None:
        instance = self.instances[name]
        if instance.live:
            reason = EndReason.FAILED if is_failed else EndReason.FINISHED
            self._finish(instance, data.draw(st.sampled_from(sorted(instance.live))), reason)

    @rule(data=st.data(), fate=st.sampled_from(["deliver", "lose", "repeat"]))
    def mail_moves(self, data: st.DataObject, fate: str) -> None:
        if self.mail:
            n = data.draw(st.integers(0, len(self.mail) - 1))
            end = self.mail[n] if fate == "repeat" else self.mail.pop(n)
            if fate != "lose":
                self.step(end)

    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        if self.answers:
            self.step(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    @rule(name=st.sampled_from(INSTANCES))
    def beat(self, name: str) -> None:
        self.step(self.instances[name].snapshot(self.now_s))

    @rule(name=st.sampled_from(INSTANCES))
    def crash(self, name: str) -> None:
        old = self.instances[name]
        self.instances[name] = Instance(name, boot=old.boot + 1)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.1, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.step(Tick())

    @rule()
    def everything_beats_for_a_while(self) -> None:
        for _ in range(3):
            self.now_s += 0.4
            for name in INSTANCES:
                self.beat(name)

    @rule()
    def a_new_leader(self) -> None:
        """Tombstones and answers of the old one are lost with it."""
        snapshots = [i.snapshot(self.now_s) for i in self.instances.values()]
        known = {e.grant.key for s in snapshots for e in (*s.live_grants, *s.ended)}
        # A lease whose grant was lost with its leader may return once (protocols 4), and a call
        # that no instance has heard of is a new one.
        self.consumed = {n: key for n, key in self.consumed.items() if key in known}
        calls = {key.call_id for key in known}
        self.session_of = {c: s for c, s in self.session_of.items() if c in calls}
        self._lead(is_successor=True)
        for call_id in self.cancelled:
            self.step(CancelCall(call_id=call_id))  # clients repeat their cancels
        self.grants = {e.grant.key: e.grant for s in snapshots for e in (*s.live_grants, *s.ended)}

    # --- what holds ---

    @invariant()
    def the_tables_agree(self) -> None:
        self.admission.check()

    @invariant()
    def the_account_is_not_negative(self) -> None:
        for view in self.admission.books.account.instances.values():
            assert view.committed_s(self.now_s) >= 0

    @invariant()
    def a_call_has_at_most_one_open_grant(self) -> None:
        seen: set[str] = set()
        for view in self.admission.books.account.instances.values():
            for key in view.open:
                assert key.call_id not in seen
                seen.add(key.call_id)

    def teardown(self) -> None:
        """Left alone, everything ends and the account is exactly zero."""
        for instance in self.instances.values():
            for key in list(instance.live):
                self._finish(instance, key, EndReason.FINISHED)
        for _ in range(16):
            self.now_s += 0.5
            for instance in self.instances.values():
                self.step(instance.snapshot(self.now_s))
            while self.answers:
                self.step(self.answers.pop())
        books = self.admission.books
        self.admission.check()
        for load in books.account.load(1, 1, self.now_s).instances:
            assert (load.committed_s, load.committed_blocks, load.leases, load.grants) == (
                0,
                0,
                0,
                0,
            )
        assert all(not s.open_calls for s in books.sessions)
        assert books.cancels == {}


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
