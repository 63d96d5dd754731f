"""Who may do what on a run's server: an account per role, and one that may do everything.

The run's token is the password of `OWNER`, who conducts the run; the password of every other account is
derived from it, so that a process that knows one of them knows none of the others. What opens an account is
one word, `name:password`; the token alone opens that of the owner.

An account names the edges and logs that it works with. On the server that becomes a list of subjects; what is
in none of them is refused:

| with                | may                                                                            |
|---------------------|--------------------------------------------------------------------------------|
| an edge it fills    | put records, end, look how full it is                                           |
| an edge it empties  | lease and acknowledge as its group, bury, hear of ends                          |
| a log it writes     | append, look for an id, read                                                    |
| a log it reads      | read                                                                            |
| its heartbeat       | publish it; nobody else's                                                       |
| the view            | hear what the owner shows; a watcher may send nothing at all                    |
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass

from arriero.engine.nats_names import Names, token

OWNER = "the-owner"  # no role can be called so


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one kind of process may do. `empties` are (edge, group); `beats`: a heartbeat, as role `name`;
    `watches`: the view.
    """

    name: str
    fills: tuple[str, ...] = ()
    empties: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    beats: bool = True
    watches: bool = False


@dataclass(frozen=True, kw_only=True)
class Access:
    """The accounts of a run beside its owner's."""

    run: str
    accounts: tuple[Account, ...]


def derived(secret: str, purpose: str) -> str:
    """Another secret; it says nothing about `secret`, nor about one for another purpose."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def credential(secret: str, account: str) -> str:
    """What opens `account` on the server of the run with the token `secret`."""
    return f"{account}:{derived(secret, f'account {account}')}"


def login(given: str) -> tuple[str, str]:
    """Name and password of a credential."""
    name, _, password = given.rpartition(":")
    return name or OWNER, password


def inbox_prefix(account: str) -> str:
    """Where answers to an account come: nobody but it and the owner may listen there."""
    return "_INBOX" if account == OWNER else f"_INBOX_{token(account)}"


def authorization(secret: str, access: Access | None, timeout_s: int) -> str:
    """The part of a server's configuration that says all this; without `access` the owner is alone."""
    users = [f"{{ user: {OWNER}, password: {json.dumps(secret)} }}"]
    for account in access.accounts if access else ():
        assert access is not None
        _, password = login(credential(secret, account.name))
        names = Names(access.run)
        allowed = {
            "publish": sorted({*_publishes(account, names)}) or {"deny": ">"},
            "subscribe": sorted({*_subscribes(account, names)}),
        }
        rights = ", ".join(f"{verb}: {json.dumps(subjects)}" for verb, subjects in allowed.items())
        name = json.dumps(account.name)
        users.append(f"{{ user: {name}, password: {json.dumps(password)}, permissions: {{ {rights} }} }}")
    inner = "\n  ".join(users)
    return f"authorization {{\n  timeout: {timeout_s}\n  users: [\n  {inner}\n  ]\n}}\n"


def _publishes(account: Account, names: Names) -> Iterator[str]:
    api = "$JS.API"
    if account.beats:
        yield f"{names.run}.beat.{token(account.name)}.*.*"
    for edge in account.fills:
        yield names.edge_subject(edge)
        yield names.end_subject(edge)
        yield names.ended_subject(edge)
        yield f"{api}.STREAM.INFO.{names.edge_stream(edge)}"
    for edge, group in account.empties:
        stream = names.edge_stream(edge)
        yield f"{api}.STREAM.INFO.{stream}"
        yield f"{api}.CONSUMER.INFO.{stream}.{token(group)}"
        yield f"{api}.CONSUMER.MSG.NEXT.{stream}.{token(group)}"
        yield f"$JS.ACK.{stream}.{token(group)}.>"
        yield f"{names.run}.settled.{token(edge)}.*"
    if account.empties:
        yield names.dead_subject
        yield f"{api}.STREAM.INFO.{names.ends_stream}"
    if account.empties or account.fills:  # what a bounded store may let go of
        yield f"{api}.STREAM.MSG.GET.{names.dead_stream}"
    for log in account.writes:
        yield names.log_subjects(log)
        yield f"{api}.STREAM.INFO.{names.log_stream(log)}"
        yield f"{api}.STREAM.MSG.GET.{names.log_stream(log)}"
    for log in (*account.writes, *account.reads):
        stream = names.log_stream(log)
        yield f"{api}.CONSUMER.CREATE.{stream}"
        yield f"{api}.CONSUMER.MSG.NEXT.{stream}.*"
        yield f"{api}.CONSUMER.DELETE.{stream}.*"


def _subscribes(account: Account, names: Names) -> Iterator[str]:
    yield f"{inbox_prefix(account.name)}.>"
    if account.watches:
        yield names.view_subject
    for edge, _ in account.empties:
        yield names.end_subject(edge)
        yield names.ended_subject(edge)
        yield f"{names.run}.settled.{token(edge)}.*"
