"""What people type first with psycopg: parameters without a type, and values in the types they have."""

import datetime
import sys
import uuid

import psycopg
from psycopg.types.json import Jsonb

with psycopg.connect(host=sys.argv[1], dbname=sys.argv[2], user="postgres", autocommit=True) as connection:

    def get(sql, *parameters):
        return connection.execute(sql, parameters).fetchone()[0]

    connection.execute(
        "CREATE TABLE sessions (id bigint PRIMARY KEY, at timestamptz, gone timestamptz);"
        "CREATE TABLE tokens (id uuid PRIMARY KEY, at timestamptz)"
    )
    assert get("SELECT ttl_create_index(%s, %s, %s)", "sessions", "at", "30 minutes")
    assert get("SELECT expire_after_seconds FROM ttl_summary") == 1800
    assert get("SELECT ttl_create_index(%s, %s, %s)", "sessions", "at", "60")
    assert get("SELECT ttl_create_index(%s, %s, %s)", "sessions", "at", datetime.timedelta(hours=1))
    assert get("SELECT ttl_create_index(%s, %s, %s, %s, %s)", "sessions", "at", 60, 500, "gone")
    assert get("SELECT ttl_create_index(%s, %s, %s)", "tokens", "at", 0)
    assert get("SELECT expire_after_seconds FROM ttl_summary WHERE table_name = %s", "sessions") == 60

    token = uuid.uuid4()
    connection.execute("INSERT INTO sessions VALUES (42, now())")
    connection.execute("INSERT INTO tokens VALUES (%s, now() + interval '1 hour')", (token,))
    for key in (42, "42", Jsonb({"id": 42}), 2**40 - 2**40 + 42):
        assert get("SELECT ttl_get(%s, %s)", "sessions", key) > 50
        for ttl in (120, 120.5, "2 minutes", datetime.timedelta(minutes=2)):
            assert get("SELECT ttl_set(%s, %s, %s)", "sessions", key, ttl), (key, ttl)
        assert get("SELECT ttl_get(%s, %s)", "sessions", key) > 110
        assert get("SELECT ttl_touch(%s, %s)", "sessions", key)
        assert get(
            "SELECT ttl_expire_at(%s, %s, %s)",
            "sessions",
            key,
            datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1),
        )
    for key in (token, str(token)):
        assert get("SELECT ttl_get(%s, %s)", "tokens", key) > 3500
    assert get("SELECT ttl_get(%s, %s::json)", "sessions", '{"id": 42}') > 50
    assert get("SELECT ttl_persist(%s, %s)", "sessions", 42)

with psycopg.connect(host=sys.argv[1], dbname=sys.argv[2], user="postgres") as connection:
    try:
        connection.execute("CALL ttl_sweep()")
        raise AssertionError("ttl_sweep ran in a transaction")
    except psycopg.errors.InvalidTransactionTermination as error:
        assert "autocommit" in error.diag.message_hint, error.diag.message_hint
print("psycopg", psycopg.__version__)
