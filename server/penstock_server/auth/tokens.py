"""Tokens: making them, finding their holder, taking one-time ones, revoking; the websockets that each keeps open."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.engine import CursorResult

from penstock.process.private import write_private
from penstock_server import acting, tags
from penstock_server.auth.principal import Principal, Role
from penstock_server.auth.secrets import TokenKind, keyed_hash, load_pepper, new_secret
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.problems import Conflict, NotFound, Problem
from penstock_server.tables import TokenRow
from penstock_server.uuid7 import uuid7

ADMIN_FILE = "admin.token"
SESSION_S = 7 * 24 * 3600.0
LOGIN_S = 300.0
BROWSER_SCOPES = ("read", "submit", "admin")
_BEARERS: frozenset[TokenKind] = frozenset({"user", "node"})
_LASTING = _BEARERS | {"session"}
_LAST_USED_EVERY_S = 60.0
MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class Minted:
    """A new token. `secret` exists here and nowhere else."""

    row: TokenRow
    secret: str


class Tokens:
    """All tokens of one server. Cost of a lookup: one indexed read, the first time."""

    def __init__(self, database: Database, clock: Clock, state_dir: Path) -> None:
        self._db, self._clock, self._state_dir = database, clock, state_dir
        self._pepper = load_pepper(state_dir)
        # Browsers send a host's cookies to every port of it: servers that share a host need names of their own.
        self.cookie = f"penstock_session_{keyed_hash(self._pepper, 'cookie')[:8]}"
        self._noted: dict[str, float] = {}
        self._used: dict[str, datetime] = {}  # when each was used, until that is written
        self._known: dict[str, TokenRow] = {}  # by hash, as they were when they were looked up
        self._version = 0

    async def ensure_admin(self) -> Path:
        """Make the administrator's token at the first start; return the file that holds it.

        A file whose token the database does not know (another database, for instance) is written anew.
        """
        path = self._state_dir / ADMIN_FILE
        if path.exists() and await self._find(path.read_text().strip(), _BEARERS) is not None:
            return path
        async with self._db.write() as tx:
            minted = self.mint(tx, "user", "admin", ["read", "submit", "admin", "attach"])
            write_private(path, minted.secret + "\n", durable=True)
        return path

    def mint(
        self,
        tx: Tx,
        kind: TokenKind,
        name: str,
        scopes: Collection[str],
        *,
        expires_in_s: float | None = None,
        expires_by: datetime | None = None,
        node_id: str | None = None,
        projects: Mapping[str, Role] | None = None,
        made_by: str | None = None,
    ) -> Minted:
        """Add a new token to the transaction. `expires_by`: however long it is asked for."""
        now = self._clock.now()
        secret = new_secret(kind)
        ends = [now + timedelta(seconds=expires_in_s)] if expires_in_s is not None else []
        ends += [expires_by] if expires_by is not None else []
        row = TokenRow(
            id=uuid7(),
            kind=kind,
            name=name,
            hash=keyed_hash(self._pepper, secret),
            scopes=sorted(scopes),
            node_id=node_id,
            projects=None if projects is None else dict(projects),
            made_by=made_by,
            created_at=now,
            expires_at=min(ends, default=None),
        )
        tx.session.add(row)
        tx.subject = row.id
        return Minted(row, secret)

    async def end_of(self, tx: Tx, asker: Principal) -> datetime | None:
        """Return when the token of a principal expires; of a browser session, the token that opened it.

        Raises a problem if it has ended since the request came.
        """
        row = await tx.session.get_one(TokenRow, asker.token_id)
        if row.made_by is not None:
            row = await tx.session.get_one(TokenRow, row.made_by)
        if not _valid(row, self._clock.now()):
            raise Problem(401, "unauthenticated", "the token of this request has ended meanwhile")
        return row.expires_at

    async def bearer(self, secret: str) -> Principal | None:
        """Return the holder of a bearer token, or None."""
        return await self._principal(secret, _BEARERS, by_cookie=False)

    async def session(self, secret: str) -> Principal | None:
        """Return the holder of a browser session, or None."""
        return await self._principal(secret, frozenset({"session"}), by_cookie=True)

    async def take(self, tx: Tx, kind: TokenKind, secret: str) -> TokenRow | None:
        """Use up a one-time token. Of two that race for it, one gets it; the other None."""
        now = self._clock.now()
        statement = (
            update(TokenRow)
            .where(
                TokenRow.hash == keyed_hash(self._pepper, secret),
                TokenRow.kind == kind,
                TokenRow.used_at.is_(None),
                TokenRow.revoked_at.is_(None),
                or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > now),
            )
            .values(used_at=now)
            .returning(TokenRow)
        )
        row = (await tx.session.execute(statement)).scalar_one_or_none()
        if row is not None:
            acting.identify(row.id, row.name)
        return row

    async def admits(self, tx: Tx, secret: str) -> bool:
        """Whether a token lets a node join: a reusable one, or one that is used up by this."""
        statement = select(TokenRow).where(TokenRow.hash == keyed_hash(self._pepper, secret), TokenRow.kind == "pilot")
        row = (await tx.session.execute(statement)).scalar_one_or_none()
        if row is not None:
            acting.identify(row.id, row.name)
            return _valid(row, self._clock.now())
        return await self.take(tx, "join", secret) is not None

    async def revoke(self, token_id: str, *, tag: str | None = None) -> None:
        """Revoke one token for good, with the sessions that were opened by it. `tag`: its own (If-Match).

        Raises NotFound, or Conflict if no administrator would be left.
        """
        async with self._db.write() as tx:
            row = await tx.session.get(TokenRow, token_id)
            if row is not None:
                tags.require(f"token {row.name!r}", tags.of_token(row.revoked_at), tag)
            await self._keep_an_administrator(tx, token_id)
            statement = (
                update(TokenRow)
                .where(or_(TokenRow.id == token_id, TokenRow.made_by == token_id), TokenRow.revoked_at.is_(None))
                .values(revoked_at=self._clock.now())
            )
            result = cast("CursorResult[object]", await tx.session.execute(statement))
            if result.rowcount == 0:
                raise NotFound("token", token_id)
            tx.subject = token_id
        self.forget()

    async def login(self, tx: Tx, asker: Principal) -> Minted:
        """Make a login code; its session may do in a browser what the asker may, and ends with the asker's token."""
        row = await tx.session.get_one(TokenRow, asker.token_id)
        scopes = [scope for scope in BROWSER_SCOPES if asker.may({scope})]
        made_by = row.made_by or row.id
        return self.mint(
            tx, "login", "login code", scopes, expires_in_s=LOGIN_S, projects=asker.projects, made_by=made_by
        )

    async def open_session(self, tx: Tx, code: str) -> Minted | None:
        """Turn a login code into a session, or return None if it is no good."""
        row = await self.take(tx, "login", code)
        if row is None:
            return None
        made_by = None if row.made_by is None else await tx.session.get(TokenRow, row.made_by)
        lasts_s = SESSION_S
        if made_by is not None:
            if not _valid(made_by, self._clock.now()):
                return None
            if made_by.expires_at is not None:
                lasts_s = min(SESSION_S, (made_by.expires_at - self._clock.now()).total_seconds())
        return self.mint(
            tx, "session", "browser", row.scopes, expires_in_s=lasts_s, projects=row.projects, made_by=row.made_by
        )

    async def _keep_an_administrator(self, tx: Tx, token_id: str) -> None:
        is_valid = (
            TokenRow.revoked_at.is_(None),
            or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > self._clock.now()),
        )
        rows = (await tx.session.execute(select(TokenRow).where(TokenRow.kind == "user", *is_valid))).scalars()
        lasting = {row.id for row in rows if "admin" in row.scopes and row.projects is None}
        if lasting == {token_id}:
            raise Conflict(
                "last_admin_token",
                "this is the last token of an administrator; without it there is no way to make another",
                hint="make another one first: penstock token create NAME --scope admin",
            )

    async def revoke_node(self, tx: Tx, node_id: str) -> None:
        """Revoke every token of a node, because it joins again. The caller calls `forget` after the commit."""
        statement = update(TokenRow).where(TokenRow.node_id == node_id, TokenRow.revoked_at.is_(None))
        await tx.session.execute(statement.values(revoked_at=self._clock.now()))

    async def _principal(self, secret: str, kinds: Collection[TokenKind], *, by_cookie: bool) -> Principal | None:
        row = await self._find(secret, kinds)
        if row is None:
            return None
        self._note_use(row.id)
        kind = cast("TokenKind", row.kind)
        return Principal(row.id, kind, row.name, frozenset(row.scopes), row.node_id, by_cookie, row.projects)

    async def _find(self, secret: str, kinds: Collection[TokenKind]) -> TokenRow | None:
        hashed = keyed_hash(self._pepper, secret)
        row = self._known.get(hashed)
        if row is None:
            version = self._version
            async with self._db.glance() as session:
                row = (await session.execute(select(TokenRow).where(TokenRow.hash == hashed))).scalar_one_or_none()
            if row is not None and row.kind in _LASTING and version == self._version:
                self._known[hashed] = row
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
        if row is None or row.kind not in kinds or not _valid(row, self._clock.now()):
            return None
        return row

    def forget(self) -> None:
        """Look every token up again: some were revoked just now. No other process writes to this database."""
        self._known.clear()
        self._version += 1

    def _note_use(self, token_id: str) -> None:
        """Note it for the next step: no request waits for that to be written."""
        now = self._clock.monotonic()
        if now - self._noted.get(token_id, float("-inf")) >= _LAST_USED_EVERY_S:
            self._noted[token_id] = now
            self._used[token_id] = self._clock.now()

    def last_used(self, row: TokenRow) -> datetime | None:
        """Return when a token was used last, to the minute; what is to be written counts."""
        return self._used.get(row.id, row.last_used_at)

    async def step(self) -> None:
        """Write when tokens were used last."""
        used = dict(self._used)
        if used:
            rows = [{"of": token_id, "at": at} for token_id, at in sorted(used.items())]
            async with self._db.write() as tx:
                await (await tx.session.connection()).execute(_USED, rows)
            self._used = {token_id: at for token_id, at in self._used.items() if used.get(token_id) != at}


_USED = (
    update(TokenRow)
    .where(TokenRow.id == bindparam("of"))
    .values(last_used_at=bindparam("at", type_=TokenRow.last_used_at.type))
)


def _valid(row: TokenRow, now: datetime) -> bool:
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


_AT_ONCE = 500


class Held:
    """Open websockets by the token that opened them: one that is void keeps none open. One event loop."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db, self._clock = database, clock
        self._ends: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def by(self, token_id: str) -> Iterator[asyncio.Event]:
        """Note a websocket while the block runs; the event that it gives is set when its token is void."""
        end = asyncio.Event()
        self._ends.setdefault(token_id, set()).add(end)
        try:
            yield end
        finally:
            self._ends[token_id].discard(end)
            if not self._ends[token_id]:
                del self._ends[token_id]

    async def step(self) -> None:
        """End the websockets of tokens that were revoked or have expired."""
        ids = sorted(self._ends)
        for start in range(0, len(ids), _AT_ONCE):
            statement = select(TokenRow.id).where(
                TokenRow.id.in_(ids[start : start + _AT_ONCE]),
                or_(TokenRow.revoked_at.is_not(None), TokenRow.expires_at <= self._clock.now()),
            )
            async with self._db.glance() as session:
                void = (await session.execute(statement)).scalars().all()
            for token_id in void:
                for end in self._ends.get(token_id, ()):
                    end.set()
