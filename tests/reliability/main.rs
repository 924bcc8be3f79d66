//! `make test-reliability`: tries to break the promises for some minutes, and says what was tried and what was lost.

#[path = "mod.rs"]
mod reliability;
#[path = "soak.rs"]
mod soak;

use harness::Random;
use reliability::{Trial, chaos, disk, fuzz, isolation, memory, replication, settings, touches, twins, upserts};
use std::time::{Duration, Instant, SystemTime};

/// A part that runs only where it is named.
const SOAK: &str = "soak";

fn main() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = variable("SEED")
        .unwrap_or_else(|| SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_secs() % 1_000_000));
    let minutes = variable("MINUTES").unwrap_or(3);
    println!("SEED={seed} MINUTES={minutes}");
    let time = Duration::from_secs(60 * minutes);
    // All but one, or those that are named.
    let named: Vec<_> = std::env::args().skip(1).collect();
    type Part<'a> = (&'a str, &'a dyn Fn(&mut Random) -> Vec<Trial>);
    let parts: [Part<'_>; 11] = [
        ("touches", &|_| touches::run(100_000, 1)),
        ("upserts", &|_| upserts::run(1_010_000)),
        ("fuzz", &|random| fuzz::run(random, 200_000)),
        ("twins", &|random| twins::run(random, 10_000)),
        ("memory", &|_| memory::run(10_000)),
        ("isolation", &|_| isolation::run(3)),
        ("settings", &|_| settings::run(&["DATABASE", "ROLE", "session"], 1)),
        ("replication", &|random| replication::run(random, 6)),
        ("disk", &|random| disk::run(random, 6)),
        ("chaos", &|random| chaos::run(random, time, 12)),
        (SOAK, &|random| soak::run(random, time)),
    ];
    let mut faults = 0;
    println!("{:<11} {:<50} {:>9}  {:<32} lost", "", "", "tried", "");
    for (name, run) in parts {
        let is_wanted = if named.is_empty() { name != SOAK } else { named.iter().any(|other| other == name) };
        if !is_wanted {
            continue;
        }
        let begun = Instant::now();
        for Trial { name: trial, tried, what, faults: found } in run(&mut Random(seed)) {
            println!(
                "{name:<11} {trial:<50} {tried:>9}  {what:<32} {}",
                if found.is_empty() { "nothing" } else { "SEE BELOW" }
            );
            found.iter().for_each(|fault| println!("    {fault}"));
            faults += found.len();
        }
        println!("{name:<11} {:.0} s", begun.elapsed().as_secs_f64());
    }
    assert!(faults == 0, "{faults} faults; run it again with SEED={seed}");
}
