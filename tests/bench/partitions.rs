//! Dropping partitions, beside deleting their rows.

use crate::report::{part, say};
use harness::{Server, Session};
use std::time::Instant;

const LEAVES: u32 = 10;
const ROWS: u32 = 1_000_000;

pub fn run(server: &Server) {
    part("Whole partitions", "```");
    say(format!(
        "\n{LEAVES} partitions of {ROWS} rows that have all expired, and one that has not. Time on the clock, one round.\n"
    ));
    let sweep = "CALL ttl_sweep('p')";
    let rows = [
        (
            "DELETE FROM p WHERE at <= cutoff",
            measure(server, "delete", "DELETE FROM p WHERE at <= now() - interval '1 day'"),
        ),
        ("partition_action => 'delete'", measure(server, "delete", sweep)),
        ("partition_action => 'detach'", measure(server, "detach", sweep)),
        ("partition_action => 'drop'", measure(server, "drop", sweep)),
    ];
    for (name, seconds) in rows {
        say(format!("{name:<34}{seconds:>9.3}s {:>9.5}x", seconds / rows[0].1));
    }
    say("```");
}

fn measure(server: &Server, action: &str, sql: &str) -> f64 {
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(&format!(
        "DROP TABLE IF EXISTS p; CREATE TABLE p (id int, at timestamptz, pad text) PARTITION BY RANGE (at);
         DO $$ BEGIN FOR i IN 0..{LEAVES} LOOP
             EXECUTE format('DROP TABLE IF EXISTS p%s', i);
             EXECUTE format('CREATE TABLE p%s PARTITION OF p FOR VALUES FROM (%L) TO (%L)', i,
                            timestamptz '2020-01-01' + i * interval '1 day', timestamptz '2020-01-01' + (i + 1) * interval '1 day');
         END LOOP; ALTER TABLE p DETACH PARTITION p{LEAVES};
         ALTER TABLE p ATTACH PARTITION p{LEAVES} FOR VALUES FROM ('2021-01-01') TO ('2100-01-01'); END $$;
         INSERT INTO p SELECT i, timestamptz '2020-01-01' + i * interval '1 day' / {ROWS}, repeat('x', 60)
         FROM generate_series(0, {LEAVES} * {ROWS} - 1) AS i; INSERT INTO p VALUES (0, now())"
    ));
    session.run(&format!("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => '{action}')"));
    session.run("VACUUM ANALYZE p");
    session.run("CHECKPOINT");
    session.run("SELECT count(*), sum(id) FROM p");
    let started = Instant::now();
    session.run(sql);
    let spent = started.elapsed().as_secs_f64();
    assert_eq!(session.get("SELECT count(*) FROM p"), "1");
    spent
}
