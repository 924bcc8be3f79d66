//! Tests that talk to a real server the way a user does, by topic.

mod bad_input;
mod docs;
mod dump;
mod escalation;
mod filter;
mod following;
mod hidden;
mod index;
mod names;
mod obstacles;
mod passes;
mod permissions;
mod races;
mod registration;
mod rows;
mod sources;
mod sweep;
mod worker;
