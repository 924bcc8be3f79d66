//! The only code that reads or writes the extension's own tables. It does so with the rights of their owner; who may
//! ask for it is decided before.

mod binding;
mod follow;
mod outcome;
mod probe;
mod restore;
mod rules;
mod sweepable;

pub use outcome::{Blocked, Outcome, Trigger};
pub use probe::Probe;
pub use rules::{Definition, RuleIndex, StoredRule};
pub use sweepable::{Broken, Claim, Rule};

thread_local! {
    /// The table of rules, as far as this process knows. It belongs to one database for all its life.
    static RELID: Cell<Oid> = const { Cell::new(InvalidOid) };
}

use crate::error::TtlError;
use crate::pg::{access, citus, identity, spi};
use crate::rule::{Expiry, Options, Source};
use pgrx::pg_sys::{InvalidOid, Oid};
use pgrx::spi::{quote_identifier, quote_literal};
use std::cell::Cell;

/// The extension's tables: where they live and whose they are.
#[derive(Clone)]
pub struct Catalog {
    /// A quoted identifier.
    schema: String,
    owner: Oid,
    /// The table of rules.
    pub relid: Oid,
}

impl Catalog {
    pub fn open() -> Result<Self, TtlError> {
        // Where the tables are is found out once; what they are called and whose they are, each time.
        let known = RELID.get();
        let is_there = access::relation_name(known).is_some_and(|name| name == "ttl_index_table");
        let relid = if is_there { known } else { Self::find_table()? };
        RELID.set(relid);
        let (schema, owner) = access::place_of(relid).ok_or(TtlError::NotInstalled)?;
        Ok(Self { schema: quote_identifier(schema), owner, relid })
    }

    fn find_table() -> Result<Oid, TtlError> {
        let found = spi::peek(
            "SELECT c.oid FROM pg_extension e
             JOIN pg_class c ON c.relnamespace = e.extnamespace AND c.relname = 'ttl_index_table'
             WHERE e.extname = 'pg_ttl_index'",
            |row| row.get(1),
        )?;
        found.into_iter().flatten().next().ok_or(TtlError::NotInstalled)
    }

    /// When rows expire, by a value in them.
    pub fn expiry(&self, source: Source, value: String, options: &Options) -> Expiry {
        Expiry::new(source, value, options.expire_after, &options.time_zone, &self.schema)
    }

    /// One of our functions, qualified.
    pub fn function(&self, name: &str) -> String {
        format!("{}.{name}", self.schema)
    }

    /// The identifier of one of our functions, by its name and arguments.
    pub fn function_oid(&self, signature: &str) -> Result<Oid, TtlError> {
        let sql = format!("SELECT to_regprocedure({})::oid", quote_literal(self.function(signature)));
        Ok(self.with_rights(|| spi::peek(&sql, |row| row.get(1)))?.into_iter().flatten().next().unwrap_or_default())
    }

    /// Intervals in results are in the style that [`crate::rule::Ttl`] reads.
    pub fn with_rights<R>(&self, work: impl FnOnce() -> R) -> R {
        // Compiling these queries would take longer than running them, however many rules the planner expects.
        let style = [(c"IntervalStyle", c"postgres_verbose"), (c"jit", c"off")];
        let pinned = || identity::with_settings(&style, || citus::seeing_shards(work));
        identity::with_rights_of(self.owner, || identity::with_pinned_values(pinned))
    }
}
