"""The same with asyncpg, which asks the server for the types of parameters."""

import asyncio
import sys

import asyncpg


async def main():
    connection = await asyncpg.connect(host=sys.argv[1], database=sys.argv[2], user="postgres")
    await connection.execute("CREATE TABLE jobs (id bigint PRIMARY KEY, at timestamptz)")
    assert await connection.fetchval("SELECT ttl_create_index($1, $2, $3)", "jobs", "at", "30 minutes")
    assert await connection.fetchval("SELECT ttl_create_index('jobs', 'at', $1::int)", 60)
    await connection.execute("INSERT INTO jobs VALUES (7, now())")
    assert await connection.fetchval("SELECT ttl_get($1, $2)", "jobs", "7") > 50
    assert await connection.fetchval("SELECT ttl_set($1, $2, $3)", "jobs", "7", "2 minutes")
    assert await connection.fetchval("SELECT ttl_set('jobs', $1::bigint, $2::float8)", 7, 120.0)
    assert await connection.fetchval("SELECT ttl_get('jobs', $1::bigint)", 7) > 110
    await connection.execute("CALL ttl_sweep()")
    print("asyncpg", asyncpg.__version__)


asyncio.run(main())
