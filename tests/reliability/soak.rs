//! A long run under a steady load: nothing may grow that should not.

use crate::reliability::ledger::{Load, TABLES, check, check_log, set_up};
use crate::reliability::memory::kilobytes;
use crate::reliability::{Trial, server};
use harness::{Random, Session};
use plotters::prelude::*;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What is measured, and by which query; the memory of the worker is read from the system.
const MEASURES: [(&str, &str); 4] = [
    ("memory of the worker, MB", ""),
    ("locks of the worker", "SELECT count(*) FROM pg_locks WHERE pid = $worker"),
    ("bytes of tables and indexes a row", ""),
    ("lag, seconds", "SELECT coalesce(extract(epoch FROM max(lag)), 0) FROM ttl_summary"),
];

const WORKER: &str = "SELECT worker_pid FROM ttl_worker_status() WHERE application_name = 'pg_ttl_index worker'";

/// How often it is measured in a run.
const SAMPLES: u32 = 120;

/// Goes on for so long, and draws what was measured.
pub fn run(random: &mut Random, time: Duration) -> Vec<Trial> {
    let server = server(&["autovacuum_naptime=5", "max_wal_size=1GB"]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    set_up(&mut session);
    session.wait_for(&format!("SELECT count(*) FROM ({WORKER}) w"), "1");
    let first_worker = session.get(WORKER);
    let load = Load::start_slow(4, Duration::from_millis(5), random, server.host());
    let begun = Instant::now();
    let mut series = [const { Vec::new() }; MEASURES.len()];
    for sample in 1..=SAMPLES {
        std::thread::sleep((time * sample / SAMPLES).saturating_sub(begun.elapsed()));
        let worker = session.get(WORKER);
        for (points, (name, query)) in series.iter_mut().zip(MEASURES) {
            let value = match query {
                "" if name.starts_with("memory") => kilobytes(&worker) as f64 / 1024.0,
                "" => bytes_a_row(&mut session),
                query => session.get(&query.replace("$worker", &worker)).parse().expect("a number"),
            };
            points.push((begun.elapsed().as_secs_f64() / 60.0, value));
        }
    }
    let mut faults = Vec::new();
    let written = load.stop(&mut faults);
    if session.get(WORKER) != first_worker {
        faults.push("another worker is there".into());
    }
    check(&mut session, &mut faults);
    check_log(&server.log(), &mut faults);
    for (points, (name, _)) in series.iter().zip(MEASURES) {
        let mean = |points: &[(f64, f64)]| points.iter().map(|(_, value)| value).sum::<f64>() / points.len() as f64;
        let (before, after) = points[points.len() / 10..].split_at(points.len() * 9 / 20);
        println!("{name}: {:.1} in the first half, {:.1} in the second", mean(before), mean(after));
        if mean(after) > 1.5 * mean(before) + 5.0 {
            faults.push(format!("{name} grows"));
        }
    }
    draw(&series).expect("drawing");
    vec![Trial {
        name: format!("{} minutes", time.as_secs() / 60),
        tried: written,
        what: "transactions beside the sweeps",
        faults,
    }]
}

/// How large the tables are with their indexes, beside the rows in them.
fn bytes_a_row(session: &mut Session) -> f64 {
    let sum = |each: &str| TABLES.map(|(table, ..)| each.replace('$', table)).join(" + ");
    let sizes = "(SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('$'))";
    let trees = TABLES.map(|(table, ..)| match table {
        "parts" => sizes.replace('$', table),
        _ => format!("pg_total_relation_size('{table}')"),
    });
    let rows = sum("(SELECT count(*) FROM $)");
    session.get(&format!("SELECT ({}) / ({rows} + 1)", trees.join(" + "))).parse().expect("a number")
}

/// A picture with a panel for each measure.
fn draw(series: &[Vec<(f64, f64)>]) -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/images/soak.svg");
    let area = SVGBackend::new(&path, (900, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    for ((panel, points), (name, _)) in area.split_evenly((2, 2)).iter().zip(series).zip(MEASURES) {
        let most = points.iter().fold(1.0, |most: f64, (_, value)| most.max(*value)) * 1.2;
        let end = points.last().map_or(1.0, |(minute, _)| *minute);
        let mut chart = ChartBuilder::on(panel)
            .caption(name, ("sans-serif", 15))
            .margin(10)
            .x_label_area_size(25)
            .y_label_area_size(45)
            .build_cartesian_2d(0.0..end, 0.0..most)?;
        chart.configure_mesh().x_desc("minutes").x_labels(8).y_labels(6).draw()?;
        chart.draw_series(LineSeries::new(points.iter().copied(), BLUE))?;
    }
    area.present()?;
    Ok(())
}
