"""The database: one engine, read sessions, and write transactions that remember what they changed.

`write()` commits explicitly at its end, or rolls everything back; after the commit (never before) the effects that it
gathered go to `on_commit`, which wakes pipelines and subscribers. On SQLite a write begins IMMEDIATE, so that a read
followed by a write never fails half way with SQLITE_BUSY. Migrations run when the server starts, under an advisory lock
on PostgreSQL; on SQLite the lock of the state folder (`statedir`) serves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Insert, Select, Table, event, insert, inspect, literal, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine

from penstock.compat.aiosqlite import connect
from penstock.errors import Bug, Unavailable
from penstock_server import acting
from penstock_server.statedir import InUse
from penstock_server.tables import Base, CounterRow, EventRow
from penstock_server.writelock import WriteLock

BUSY_TIMEOUT_MS = 30_000
SQLITE_READERS = 8
"""Sessions that read a SQLite at once. The next waits its turn, as long as that takes."""
WAL_RETRY_S = 0.01
KEEP_ALIVE = {
    "tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 4, "tcp_user_timeout": 30_000,
}  # fmt: skip
"""Seconds, seconds, probes, milliseconds: PostgreSQL's default, that of the machine, is two hours."""
WAL_PAGES = 16_384
"""Of the write-ahead log, 64 MiB: with more a commit copies them itself, if `checkpoint` has not before."""
LAST_AT_ONCE = 16
"""Rows that PostgreSQL gets by one statement at the end of a transaction."""
TROUBLE_S = 10.0
_SERVER_KEY = 0x50454E53544F434C
_TERM = "server_term"


class DatabaseAway(Unavailable):
    """The database cannot be reached, is busy, or cannot be written; the same may go well later. Fields: cause."""

    code = "database_away"


class DatabaseDamaged(DatabaseAway):
    """The file of the database is not what it was."""

    code = "database_damaged"


class DatabaseInUse(InUse):
    """Another server has the database."""


class TakenOver(Unavailable):
    """Another server has this database now. This one may write nothing more, and ends."""

    code = "taken_over"


class StorageFull(DatabaseAway):
    """There is no disk space left for the database."""

    code = "storage_full"


@dataclass(slots=True)
class Effects:
    """What a transaction changed: published to the rest of the server once it is committed.

    `webhooks`: those that have something to send. `events` are written at its end, all at once: there are no ORM
    relationships that would put them behind their rows.
    """

    jobs: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    webhooks: set[str] = field(default_factory=set)
    events: list[EventRow] = field(default_factory=list)
    schedule: bool = False


@dataclass(slots=True)
class Tx:
    """A write transaction. `session` is for statements; `effects` for what follows the commit.

    `subject`: identifier of what it makes, for the audit log; without one, what the path of the request names.
    `last`: rows behind all others, written with the events; all their columns are set, or NULL.
    """

    session: AsyncSession
    effects: Effects = field(default_factory=Effects)
    subject: str = ""
    last: list[Base] = field(default_factory=list)


class Database:
    """An engine and its sessions. Closed by `close()`; usable from one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        # On SQLite a connection for each reader, one for the writer, one to migrate with, and all of them stay open:
        # the pool's own line would end with an error after 30 s, and a connection beyond its size lives for one read.
        options: dict[str, Any] = {"pool_size": 10, "max_overflow": 10}
        if self.is_sqlite:
            path = make_url(url).database or ":memory:"
            options = {"pool_size": SQLITE_READERS + 2, "max_overflow": 0, "async_creator": partial(connect, path)}
        self.engine = create_async_engine(url, **options)
        if self.is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _on_sqlite_connect)
            event.listen(self.engine.sync_engine, "begin", _on_sqlite_begin)
        else:
            event.listen(self.engine.sync_engine, "connect", _on_postgresql_connect)
        writing = self.engine.execution_options(penstock_write=True)
        single = self.engine.execution_options(penstock_single=True)
        self._read = async_sessionmaker(self.engine, expire_on_commit=False, autoflush=False)
        self._glance = async_sessionmaker(single, expire_on_commit=False, autoflush=False)
        self._write = async_sessionmaker(writing, expire_on_commit=False)
        # One writer at a time. SQLite would only make the second wait in its thread; on PostgreSQL two that lock
        # rows in different orders would deadlock, and this process is the only one that writes (`alone`).
        self.lock = WriteLock()
        self._readers: asyncio.Semaphore | nullcontext[None] = (
            asyncio.Semaphore(SQLITE_READERS) if self.is_sqlite else nullcontext()
        )
        self.on_commit: Callable[[Effects], None] = lambda effects: None
        self.outbox: Callable[[Tx], Awaitable[None]] | None = None
        """Called before the commit of a transaction that has events: adds what webhooks are to be sent of them."""
        self.trouble: DatabaseAway | None = None
        """Why a write failed lately because the database is unreachable or full."""
        self._trouble_until = 0.0
        self._has_committed = False  # since `checkpoint`
        self.taken_over = asyncio.Event()
        self._holder: AsyncConnection | None = None  # its session holds the advisory lock
        self._term: int | None = None

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a session for reading; nothing is committed. It and the others raise DatabaseAway.

        Never within another `read` or `glance`: on SQLite they share `SQLITE_READERS` turns.
        """
        with _away_as_such():
            async with self._readers, self._read() as session:
                await self._connect(session)
                yield session

    @asynccontextmanager
    async def glance(self) -> AsyncIterator[AsyncSession]:
        """Open a session for one statement that reads. On SQLite it costs no transaction: each would be three calls."""
        with _away_as_such():
            async with self._readers, self._glance() as session:
                await self._connect(session)
                yield session

    @asynccontextmanager
    async def write(self, *, urgent: bool = False) -> AsyncIterator[Tx]:
        """Open a write transaction; commit when the block ends, roll back when it raises.

        `urgent`: someone waits for its answer, so it goes before those that are not.
        """
        try:
            with _away_as_such():
                async with self.lock.turn(urgent=urgent), self._write() as session:
                    await self._connect(session)
                    if self.taken_over.is_set():
                        raise self._end()
                    tx = Tx(session)
                    yield tx
                    request = acting.unrecorded()
                    subject = tx.subject or (request.subject if request else "")
                    await self._write_last(tx, [request.row(subject)] if request is not None and subject else [])
                    await session.commit()
                    self._has_committed = True
                    if request is not None and subject:
                        request.is_recorded = True
        except DatabaseAway as error:
            self.trouble = error  # on a full disk some writes still find room
            self._trouble_until = time.monotonic() + (TROUBLE_S if isinstance(error, StorageFull) else 0.0)
            raise
        if time.monotonic() > self._trouble_until:
            self.trouble = None
        self.on_commit(tx.effects)

    async def _write_last(self, tx: Tx, audit: list[Base]) -> None:
        """Write what stands behind all other rows, and see that no other server has the database by now.

        PostgreSQL gets both by one statement: each would be a turn of the event loop during which the lock is held.
        """
        rows = [*tx.last, *tx.effects.events, *audit]
        if rows:
            await tx.session.flush()
        if tx.effects.events and self.outbox is not None:
            await self.outbox(tx)
        if self.is_sqlite or len(rows) > LAST_AT_ONCE:
            tx.session.add_all(rows)
            rows = []
        if not self.is_sqlite:
            await self._check_term(tx.session, rows)

    async def checkpoint(self) -> None:
        """Copy what SQLite has committed from its write-ahead log into the file, so that no commit has to.

        Beside the writer. If the log grows all the same, since every copy met a commit, once without one.
        """
        if not self.is_sqlite or not self._has_committed:
            return
        self._has_committed = False
        if await self._copy_log() > WAL_PAGES // 2:
            async with self.lock.turn(urgent=False):
                await self._copy_log()

    async def _copy_log(self) -> int:
        """Return the pages of the log, copied ones included: SQLite begins it anew once all are copied."""
        with _away_as_such():
            async with self._glance() as session:
                _, num_pages, _ = (await session.execute(text("PRAGMA wal_checkpoint(PASSIVE)"))).one()
        return int(num_pages)

    async def _connect(self, session: AsyncSession) -> None:
        """Take a connection. Here, unlike in what follows, an OSError is the database's: a socket that is not there."""
        if self.is_sqlite:
            return
        try:
            await session.connection()
        except (OSError, DBAPIError) as error:
            raise _away(error) from error

    async def try_to_write(self) -> None:
        """Write something that changes nothing. Raises DatabaseAway if that fails, or the disk was full just now."""
        if self.trouble is not None and time.monotonic() <= self._trouble_until:
            raise self.trouble
        async with self.write() as tx:
            await tx.session.execute(update(CounterRow).values(value=CounterRow.value))

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be the only server on this database (on SQLite the state folder's lock sees to it). Raises DatabaseInUse."""
        if self.is_sqlite:
            yield
            return
        try:
            self._holder = await self._take_lock()
        except (OSError, DBAPIError) as error:
            raise _away(error) from error
        if self._holder is None:
            where = self.engine.url.render_as_string(hide_password=True)
            raise DatabaseInUse(
                f"the database {where} is in use by another server. Stop that one, or name another with --database-url."
            )
        try:
            yield
        finally:
            await self._holder.close()

    async def begin_term(self) -> None:
        """Have writes of a server that had this database before refused from now on, whatever it believes."""
        if self.is_sqlite:
            return
        row = {"name": _TERM, "value": 1}
        grown = {"value": CounterRow.value + 1}
        statement = postgresql.insert(CounterRow).values(row).on_conflict_do_update(index_elements=["name"], set_=grown)
        async with self.write() as tx:
            self._term = (await tx.session.execute(statement.returning(CounterRow.value))).scalar_one()

    async def keep(self) -> None:
        """Take the lock again if its connection was lost. Raises TakenOver if another server has it by now."""
        if self.is_sqlite or self.taken_over.is_set():
            return
        assert self._holder is not None  # within `alone`
        try:
            await self._holder.execute(text("SELECT 1"))
        except (OSError, DBAPIError):
            await self._holder.invalidate()
            await self._holder.close()
            try:
                taken = await self._take_lock()
            except (OSError, DBAPIError) as error:
                raise _away(error) from error
            if taken is None:
                raise self._end() from None
            self._holder = taken

    async def _take_lock(self) -> AsyncConnection | None:
        connection = await self.engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        statement = text("SELECT pg_try_advisory_lock(:key)")
        if (await connection.execute(statement, {"key": _SERVER_KEY})).scalar_one():
            return connection
        await connection.close()
        return None

    async def _check_term(self, session: AsyncSession, rows: Sequence[Base]) -> None:
        """Insert rows, and lock the number of the term, so that another begins before this statement or after it.

        One that began before it makes the transaction fail, whatever that has read; one after it waits for its commit.
        """
        statement: Select[Any] = select(literal(None))
        if self._term is not None:
            statement = select(CounterRow.value).where(CounterRow.name == _TERM).with_for_update(read=True)
        elif not rows:
            return
        inserts = [_insert(row).cte(f"row_{number}") for number, row in enumerate(rows)]
        term = (await session.execute(statement.add_cte(*inserts))).scalar_one()
        if term != self._term:
            raise self._end()

    def _end(self) -> TakenOver:
        self.taken_over.set()
        return TakenOver("another server has taken over this database; this one ends. What runs goes on with that one.")

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


def _insert(row: Base) -> Insert:
    """Return the statement for a row of which all columns are set, or NULL: there is no default in it."""
    table = type(row).__table__
    assert isinstance(table, Table)
    return insert(table).values({column.key: getattr(row, column.key) for column in table.columns})


_FULL = ("disk is full", "No space left on device", "Disk quota exceeded")


@contextmanager
def _away_as_such() -> Iterator[None]:
    """Raise DatabaseAway for what drivers raise of a database that cannot be used now."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as error:
        raise _away(error) from error
    except DBAPIError as error:
        if any(text in str(error.orig) for text in ("file is not a database", "disk image is malformed")):
            raise DatabaseDamaged(
                f"the database is damaged: {error.orig}. Stop the server, and put a backup of it in its place, or move "
                "it away to begin with an empty one."
            ) from error
        if error.connection_invalidated or any(text in str(error.orig) for text in _FULL):
            raise _away(error) from error
        raise


def _away(error: Exception) -> DatabaseAway:
    cause = (str(getattr(error, "orig", None) or error).strip() or type(error).__name__).splitlines()[0][:200]
    refused = getattr(getattr(error, "orig", None), "sqlite_errorname", "") == "SQLITE_IOERR_WRITE"  # EDQUOT, EIO
    if refused or any(text in cause for text in _FULL):
        is_full = "is full" + ", or a quota is used up, or it fails" * refused
        return StorageFull(f"the server's disk {is_full}: {cause}. What runs goes on; make room for more.", cause=cause)
    return DatabaseAway(f"the database cannot be used now: {cause}. What runs goes on; try again.", cause=cause)


def _on_postgresql_connect(connection: Any, _record: Any) -> None:
    """Wait for commits to be in the log, whatever the database's default; notice a machine that is gone in 30 s."""
    cursor = connection.cursor()
    setting = "synchronous_commit"
    cursor.execute(f"SELECT set_config('{setting}', 'on', false) WHERE current_setting('{setting}') = 'off'")
    for setting, value in KEEP_ALIVE.items():
        known = f"WHERE current_setting('{setting}', true) IS NOT NULL"
        cursor.execute(f"SELECT set_config('{setting}', '{value}', false) {known}")
    cursor.close()
    connection.commit()


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    settings = f"busy_timeout={BUSY_TIMEOUT_MS}", f"wal_autocheckpoint={WAL_PAGES}"
    for pragma in ("synchronous=NORMAL", "foreign_keys=ON", *settings):
        cursor.execute(f"PRAGMA {pragma}")
    _use_wal(connection, cursor)
    cursor.close()


def _use_wal(connection: Any, cursor: Any) -> None:
    """Switch the file to a write-ahead log; no-op if it has one. Raises sqlite3.OperationalError after the timeout.

    SQLite does not wait here, whatever `busy_timeout` says, if another connection is open on a file without a log.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            connection.run_async(lambda _: asyncio.sleep(WAL_RETRY_S))
        else:
            return


def _on_sqlite_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("penstock_single", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("penstock_write", False) else "BEGIN")


_ADVISORY_KEY = 0x50454E53544F434B  # "PENSTOCK"


def script_location() -> Path:
    """Return the folder of the migrations: packaged in a wheel, `alembic/` in a checkout."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "migrations", here.parents[2] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise Bug(f"no migrations beside {here.parent}: the package is incomplete; install it again")


def newest_revision() -> str:
    """Return the revision of the newest migration: the names of their files begin with it, in ascending order."""
    return max(_known_revisions())


def _known_revisions() -> set[str]:
    return {path.name.partition("_")[0] for path in (script_location() / "versions").glob("[0-9]*_*.py")}


async def upgrade(database: Database, revision: str = "head") -> None:
    """Run the migrations up to `revision`, in one transaction. Loads none if the database has the newest already.

    Raises Unavailable if the database is of a newer Penstock.
    """

    def on_connection(connection: Connection) -> None:
        found, newest = _revisions_of(connection), newest_revision()
        if revision == "head" and found == {newest}:
            return
        if unknown := found - _known_revisions():
            raise Unavailable(
                f"the database is of a newer Penstock: it has the revision {', '.join(sorted(unknown))}, and this "
                f"version knows those up to {newest}. Install the newer version, or name another database"
            )
        _alembic(connection, "upgrade", revision)

    await _run(database, on_connection)


async def downgrade(database: Database, revision: str) -> None:
    """Run the migrations down to `revision`, in one transaction."""
    await _run(database, lambda connection: _alembic(connection, "downgrade", revision))


def _revisions_of(connection: Connection) -> set[str]:
    """One, or none before the first migration."""
    if not inspect(connection).has_table("alembic_version"):
        return set()
    return set(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())


def _alembic(connection: Connection, name: Literal["upgrade", "downgrade"], revision: str) -> None:
    from alembic import command  # a tenth of the time in which a server starts, and most starts migrate nothing
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    act = command.upgrade if name == "upgrade" else command.downgrade
    act(config, revision)


async def _run(database: Database, on_connection: Callable[[Connection], None]) -> None:
    writing = database.engine.execution_options(penstock_write=True)
    with _away_as_such():
        async with writing.connect() as connection, connection.begin():
            await _migrate(database, connection, on_connection)


async def _migrate(database: Database, connection: AsyncConnection, action: Callable[[Connection], None]) -> None:
    if not database.is_sqlite:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
    await connection.run_sync(action)


async def next_numbers(tx: Tx, name: str, count: int) -> int:
    """Reserve `count` numbers in a row; return the first. A rolled back transaction gives them back."""
    statement = (
        update(CounterRow)
        .where(CounterRow.name == name)
        .values(value=CounterRow.value + count)
        .returning(CounterRow.value)
    )
    last = (await tx.session.execute(statement)).scalar_one_or_none()
    if last is None:
        raise Bug(f"counter {name!r} is missing: the migrations did not run")
    return last - count + 1
