"""The tables that questions are asked of, as SQL over the rows of all shards.

| table      | a row is                                                                                  |
|------------|-------------------------------------------------------------------------------------------|
| `steps`    | a version that was trained: its batch, staleness, reward, loss and all other measures       |
| `rollouts` | a response, as the last node left it: prompt, reward, outcome, versions that sampled it,    |
|            | length, place of its arrays; `raw` is the reward before shaping, if that is another; `turns` |
|            | what each turn earned, if it is told apart                                                 |
| `samples`  | a rollout in a batch: the step made from it, its reward there, place of its advantages        |
| `prompts`  | an admission: row, epoch, and what became of it                                              |
| `weights`  | a version that a loop carried, with its fingerprint                                          |
| `events`   | something that happened to the run: a restart, that it went on, how it failed; and          |
|            | `unhealthy`: gate `name` warned of step `number` or stopped it (`level`)                    |

Here it is that a run which went on undoes what came after the version that it went on from (as
`ledger.effective` says), and that of what was recorded twice under one id the last counts.
"""

from __future__ import annotations

import json
from typing import Any

NAMES = ("steps", "rollouts", "samples", "prompts", "weights", "events")

_LIVES = "select entry, reason, metrics from raw.events where kind = 'resumed' order by entry"

# `held`: small tables made once; `numbered`: what is shown, with the entry that each row comes from.
_HELD = """
create schema held; create schema numbered;
create table held.lives(entry bigint, anew boolean, oldest bigint, newest bigint);
create table held.lives_of(entry bigint, node varchar, version bigint)"""

_MADE = """
create table held.trained as select * from raw.events e where kind = 'trained' and not exists (
    select 1 from held.lives_of l where l.entry > e.entry and l.node = e.node and e.version > l.version);
create table held.admissions as select e.*, e.origins[1] as origin, (
    select min(l.entry) from held.lives l
    where l.entry > e.entry and e.split = 'eval' and e.version > l.oldest) as undone
    from raw.events e where kind = 'admitted';
create table held.drops as with told as (
    select e.*, unnest(e.origins) as origin, (
        select arg_min(l.anew, l.entry) from held.lives l where l.entry > e.entry) as anew
    from raw.events e where kind = 'dropped'
) select * from told d where not (reason = 'end_of_run' and coalesce(not anew, false)) and not exists (
    select 1 from held.admissions a
    where a.origin = d.origin and a.undone > d.entry and a.entry < a.undone);
create table held.groups as select max(entry) as entry, key, arg_max("group", entry) as "group",
    arg_max(passed, entry) as passed, arg_max(size, entry) as size from (
        select entry, if(scored = '', "group", scored) as key, any_value("group") as "group",
        any_value(passed) as passed, count(*) as size from raw.rollouts group by 1, 2) group by key;
create table held.passed_on as select distinct unnest(passed) as key from held.groups;
create table held.gone as select distinct r.entry from raw.rollouts r
    left join held.groups g on g.entry = r.entry left join held.passed_on p on p.key = g.key
    where g.entry is null or p.key is not null;
create table held.batches as
    select batch, max(entry) as entry from raw.samples group by batch;
create table held.steps_of as
    select id as batch, arg_max(version, entry) as version from held.trained group by 1"""

_SHOWN = {
    "steps": """
select entry, version, node, id as batch, tokens, staleness_max, staleness_mean, reward_mean, loss, grad_norm,
       metrics from held.trained""",
    "rollouts": """
select * exclude (passed) from raw.rollouts where entry not in (select entry from held.gone)""",
    "samples": """
select s.entry, t.version, s.batch, s.number, s.scored,
       if(s.rollout >= 0 and g."group" is not null, g."group" || '/' || s.rollout, '') as rollout,
       s.reward, s.origin, s.length, s.advantage_part, s.advantage_start
from raw.samples s join held.batches b on b.entry = s.entry
left join held.steps_of t on t.batch = s.batch left join held.groups g on g.key = s.scored""",
    "prompts": """
select a.entry, a.id, a.origin, a.split, a.epoch, a.row, a.version as min_version, t.version as trained_in,
       d.reason as dropped, d.node as dropped_by, d.detail
from held.admissions a
left join (select origin, arg_min(version, entry) as version from (
    select unnest(origins) as origin, version, entry from held.trained) group by 1) t on t.origin = a.origin
left join (select origin, arg_max(reason, entry) as reason, arg_max(node, entry) as node,
    arg_max(detail, entry) as detail from held.drops group by 1) d on d.origin = a.origin
where a.undone is null""",
    "weights": """
select min(entry) as entry, node as loop, arg_max(id, entry) as id, version,
       arg_max(fingerprint, entry) as fingerprint, arg_max(batch, entry) as batch
from raw.events e where kind = 'weights' and not exists (
    select 1 from held.lives l where l.entry > e.entry and e.version > l.newest)
group by node, version""",
    "events": """
select entry + if(kind = 'run', (select max(entry) + 1 from raw.events), 0) as entry,
       if(kind = 'run', id, kind) as kind,
       case when kind in ('restarted', 'scaled') then node when kind = 'unhealthy' then id else ''
       end as name,
       coalesce(number, version, 0) as number, if(kind = 'unhealthy', reason, '') as level,
       if(kind = 'unhealthy', metrics ->> '$.measure', null) as measure,
       if(kind = 'unhealthy', (metrics ->> '$.value')::double, null) as value,
       if(kind = 'unhealthy', (metrics ->> '$.bound')::double, null) as bound, detail
from raw.events where kind in ('restarted', 'scaled', 'resumed', 'unhealthy', 'run')""",
}

_ORDER = {"rollouts": "entry, number", "samples": "entry, number"}
_MATERIAL = ("steps", "prompts", "weights", "events")  # not long; the others are read where they stand

OVERVIEW = """
select (select count(*) from steps) as steps,
       (select count(*) from held.groups where entry not in (select entry from held.gone)) as groups,
       (select coalesce(sum(size), 0) from held.groups
        where entry not in (select entry from held.gone)) as rollouts,
       (select count(*) from prompts) as admitted,
       (select count(distinct entry) from held.drops) as dropped,
       (select count(*) from raw.events e where kind = 'evaluated' and not exists (
           select 1 from held.lives l where l.entry > e.entry and e.version > l.oldest)) as evaluated,
       (select count(distinct id) from raw.events where kind = 'redacted') as redacted,
       (select count(*) from raw.events where kind = 'restarted') as restarts,
       (select count(*) from raw.events where kind = 'unhealthy' and reason = 'warn') as warnings,
       (select count(*) from raw.events where kind = 'unhealthy' and reason = 'stop') as stops,
       (select count(*) from held.lives) as resumes"""


def create(connection: Any) -> None:
    """Make the tables `NAMES` of raw.events, raw.rollouts and raw.samples."""
    connection.execute(_HELD)
    for entry, anew, versions in connection.execute(_LIVES).fetchall():
        told: dict[str, int] = json.loads(versions)
        life = [entry, anew == "anew", min(told.values(), default=0), max(told.values(), default=0)]
        connection.execute("insert into held.lives values (?, ?, ?, ?)", life)
        for node, version in told.items():
            connection.execute("insert into held.lives_of values (?, ?, ?)", [entry, node, version])
    connection.execute(_MADE)
    for name, query in _SHOWN.items():
        kind = "table" if name in _MATERIAL else "view"
        connection.execute(f"create {kind} numbered.{name} as {query}")
        connection.execute(f"create view {name} as select * exclude (entry) from numbered.{name}")


def in_order(name: str) -> str:
    """The query of all rows of a table, in the order in which they were recorded."""
    return f"select * exclude (entry) from numbered.{name} order by {_ORDER.get(name, 'entry')}"
