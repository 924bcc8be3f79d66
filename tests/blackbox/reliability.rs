//! A short part of `make test-reliability`.

#[path = "../reliability/mod.rs"]
pub mod trials;

use harness::Random;
use std::time::Duration;
use trials::{Trial, chaos, disk, fuzz, isolation, memory, replication, settings, touches, twins, upserts};

fn check(trials: Vec<Trial>) {
    for Trial { name, tried, what, faults } in trials {
        assert!(tried > 0, "{name}: {what}");
        assert!(faults.is_empty(), "{name}: {faults:#?}");
    }
}

#[test]
fn rows_touched_as_they_expire_live() {
    check(touches::run(2_000, 3));
}

#[test]
fn upserts_onto_hot_keys_have_their_effect() {
    check(upserts::run(20_000));
}

#[test]
fn odd_arguments_meet_clear_errors() {
    check(fuzz::run(&mut Random(15), 2_000));
}

#[test]
fn what_happens_to_hidden_rows_changes_no_query() {
    check(twins::run(&mut Random(15), 300));
}

#[test]
fn a_failover_in_the_middle_of_a_sweep_loses_no_row() {
    check(replication::run(&mut Random(15), 1));
}

#[test]
fn a_full_disk_loses_no_row() {
    // Only root may mount a small one.
    let trials = disk::run(&mut Random(15), 1);
    if trials[0].tried > 0 {
        check(trials);
    }
}

#[test]
fn a_worker_does_not_grow() {
    check(memory::run(300));
}

#[test]
fn every_row_has_its_fate_whatever_happens_around_it() {
    check(chaos::run(&mut Random(15), Duration::ZERO, 12));
}

#[test]
fn sessions_around_a_sweep_end_well_in_every_order() {
    check(isolation::run(2));
}

#[test]
fn no_setting_changes_what_is_swept() {
    check(settings::run(&["DATABASE"], 4));
}
