"""Small worlds around admission's policy: instances that answer, calls that extend a chain. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from talaria_admission.config import AdmissionConfig
from talaria_admission.events import Admit, Effect, Loaded, Opened
from talaria_admission.policy import Admission
from talaria_common.policies import PolicySet, policy_set
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    CallKey,
    CallSettled,
    Candidate,
    CostTerms,
    EndReason,
    Grant,
    Granted,
    HeldPrefix,
    Home,
    Link,
    LiveGrant,
    ModelState,
    NotGranted,
    PlaceCall,
    Snapshot,
    Usage,
)

MODEL = "m"


def chain(*messages: str) -> tuple[Link, ...]:
    """Links of a history; a message that starts with `a:` is the assistant's."""
    links, text = [], ""
    for message in messages:
        text += "|" + message
        links.append(Link(text.encode(), len(text), message.startswith("a:")))
    return tuple(links)


def a_candidate(instance: str, boot_id: str = "b1", cost_s: float = 1.0) -> Candidate:
    cost = CostTerms(load_s=cost_s)
    return Candidate(instance=instance, boot_id=boot_id, cost=cost, charge_s=0.5, charge_blocks=4)


def a_snapshot(
    instance: str = "i-1",
    *,
    version: int = 1,
    boot_id: str = "b1",
    queued_s: float = 0.0,
    remaining_s: float = 0.0,
    live: tuple[Grant, ...] = (),
    ended: tuple[CallEnded, ...] = (),
    prefixes: tuple[HeldPrefix, ...] = (),
    **more: Any,
) -> Snapshot:
    return Snapshot(
        instance=instance,
        boot_id=boot_id,
        version=version,
        models=(
            ModelState(model=MODEL, residency="active", queued_s=queued_s, remaining_s=remaining_s),
        ),
        live_grants=tuple(LiveGrant(grant=grant, session="s", call_index=0) for grant in live),
        ended=ended,
        prefixes=prefixes,
        **more,
    )


def an_end(granted: Granted, tail: Link | None = None, **more: Any) -> CallEnded:
    fields: dict[str, Any] = {
        "grant": granted.grant,
        "session": granted.session,
        "call_index": granted.call_index,
        "tail": tail,
        "reason": EndReason.FINISHED,
        "usage": Usage(prompt_tokens=10, completion_tokens=5),
        "prefix_tier": "device",
    }
    return CallEnded(**(fields | more))


@dataclass
class World:
    """Admission with two live instances, and shorthand for what the others would send."""

    policy: PolicySet = field(default_factory=lambda: policy_set("talaria"))
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    instances: tuple[str, ...] = ("i-1", "i-2")
    now_s: float = 0.0
    minted: int = 0
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config, self.policy)
        self.versions = dict.fromkeys(self.instances, 0)
        self.step(Loaded(rows=(), unix_s=1000.0))
        for instance in self.instances:
            self.beat(instance)
        self.step(Opened(epoch=1))

    def step(self, event: Any) -> list[Effect]:
        self.effects = self.admission.step(event, self.now_s)
        self.admission.check()
        return self.effects

    def beat(self, instance: str = "i-1", **more: Any) -> list[Effect]:
        """A heartbeat of an instance."""
        self.versions[instance] = self.versions.get(instance, 0) + 1
        return self.step(a_snapshot(instance, version=self.versions[instance], **more))

    def pass_s(self, seconds: float, *, is_beating: bool = True) -> None:
        """Time goes by, with heartbeats that list nothing unless told otherwise."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            if is_beating:
                for instance in self.instances:
                    self.beat(instance)

    def admit(
        self,
        call_id: str,
        *messages: str,
        attempt: int = 1,
        ranked: tuple[str, ...] = ("i-1", "i-2"),
        home: Home | None = None,
        load_version: int = 0,
        **more: Any,
    ) -> Granted | NotGranted:
        """Ask for a call whose prompt is `messages`; its session is its id's unless derived."""
        links = chain(*messages)
        fields: dict[str, Any] = {"arrived_unix_s": 1000.0 + self.now_s}
        if "session" in more and more["session"] is not None:
            fields["source"] = "header"
        place = PlaceCall(
            key=CallKey(call_id, attempt), model=MODEL, links=links, **(fields | more)
        )
        question = AdmitCall(
            place=place,
            ranked=tuple(a_candidate(i) for i in ranked),
            home=home,
            load_version=load_version,
        )
        self.minted += 1
        effects = self.step(Admit(call=question, fresh_id=f"fresh-{self.minted}"))
        (answer,) = (e for e in effects if isinstance(e, Granted | NotGranted))
        return answer

    def grant(self, call_id: str, *messages: str, **more: Any) -> Granted:
        """Ask, and insist on a yes."""
        answer = self.admit(call_id, *messages, **more)
        assert isinstance(answer, Granted), answer
        return answer

    def end(self, granted: Granted, *messages: str, **more: Any) -> list[Effect]:
        """The call's CallEnded; `messages` is its prompt."""
        links = chain(*messages)
        return self.step(an_end(granted, links[-1] if links else None, **more))

    def settle(
        self, granted: Granted, arrived_s: float, ended_s: float, **more: Any
    ) -> list[Effect]:
        """The front door's account of the call; times from the world's start."""
        return self.step(
            CallSettled(
                key=granted.grant.key,
                session=granted.session,
                call_index=granted.call_index,
                model=MODEL,
                outcome="finished",
                arrived_unix_s=1000.0 + arrived_s,
                ended_unix_s=1000.0 + ended_s,
                **more,
            )
        )

    def committed_s(self, instance: str = "i-1") -> float:
        view = self.admission.books.account.instances[instance]
        return view.committed_s(self.now_s)
