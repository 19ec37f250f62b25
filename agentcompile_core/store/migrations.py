"""Versions of the tuning database's schema: an older file is brought up to date in one transaction, a newer one is left alone."""

import sqlite3

# Statement lists by version that they lead to. Version 0 is a new file, or one from before versions were written down.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    ("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, signature TEXT NOT NULL, json TEXT NOT NULL, sha256 TEXT NOT NULL)"
     " WITHOUT ROWID",
     "CREATE INDEX IF NOT EXISTS by_signature ON records (signature)"),
    ("ALTER TABLE records ADD COLUMN written_s INTEGER NOT NULL DEFAULT 0",  # when a row was written: the oldest go first
     "CREATE INDEX by_age ON records (written_s, key)"),
    ("DROP INDEX IF EXISTS by_signature",),  # nothing asks by signature, and every write had to keep it
)
VERSION = len(MIGRATIONS)


class NewerSchema(sqlite3.NotSupportedError):
    """A later version of this program wrote the file."""


def version(connection: sqlite3.Connection) -> int:
    """The schema version that a file says it has."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to VERSION; processes that do so at once wait for each other, and a killed one leaves the file as it was.

    Raises:
        NewerSchema: a later version wrote it.
        sqlite3.Error: it cannot be written.
    """
    if _check(connection) == VERSION:
        return
    before, connection.isolation_level = connection.isolation_level, None  # statements that define tables belong to the transaction
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for number in range(_check(connection), VERSION):
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk ends it by itself
                connection.execute("ROLLBACK")
            raise
    finally:
        connection.isolation_level = before


def _check(connection: sqlite3.Connection) -> int:
    found = version(connection)
    if found > VERSION:
        raise NewerSchema(f"the tuning database has schema {found}, this version reads up to {VERSION}; update this program")
    return found
