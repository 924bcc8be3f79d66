// The same with node-postgres, which sends every parameter as text without a type.
const { Client } = require('pg');
const assert = require('node:assert');

(async () => {
    const client = new Client({ host: process.argv[2], database: process.argv[3], user: 'postgres' });
    await client.connect();
    const get = async (sql, parameters) => Object.values((await client.query(sql, parameters)).rows[0])[0];
    await client.query('CREATE TABLE carts (id bigint PRIMARY KEY, at timestamptz)');
    assert(await get('SELECT ttl_create_index($1, $2, $3)', ['carts', 'at', '30 minutes']));
    assert(await get('SELECT ttl_create_index($1, $2, $3)', ['carts', 'at', 60]));
    assert.equal(await get("SELECT expire_after_seconds FROM ttl_summary WHERE table_name = 'carts'"), '60');
    await client.query('INSERT INTO carts VALUES (7, now())');
    assert((await get('SELECT ttl_get($1, $2)', ['carts', 7])) > 50);
    assert(await get('SELECT ttl_set($1, $2, $3)', ['carts', 7, 120]));
    assert(await get('SELECT ttl_set($1, $2, $3)', ['carts', '7', '2 minutes']));
    assert((await get('SELECT ttl_get($1, $2)', ['carts', '7'])) > 110);
    await client.query('CALL ttl_sweep()');
    await client.end();
    console.log('node-postgres');
})();
