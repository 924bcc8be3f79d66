//! The only code that reads or writes the extension's own tables. It does so with the rights of their owner; who may
//! ask for it is decided before.

mod outcome;
mod rules;
mod sweepable;

pub use outcome::{Blocked, Outcome, Trigger};
pub use rules::{Definition, RuleIndex, StoredRule};
pub use sweepable::{Broken, Claim, Rule};

use crate::error::TtlError;
use crate::pg::{identity, spi};
use crate::rule::{Expiry, Options, Source};
use pgrx::pg_sys::Oid;

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
        spi::peek(
            "SELECT quote_ident(n.nspname), c.relowner, c.oid
             FROM pg_extension e
             JOIN pg_namespace n ON n.oid = e.extnamespace
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'ttl_index_table'
             WHERE e.extname = 'pg_ttl_index'",
            |row| {
                Ok(Self {
                    schema: row.get(1)?.unwrap_or_default(),
                    owner: row.get(2)?.unwrap_or_default(),
                    relid: row.get(3)?.unwrap_or_default(),
                })
            },
        )?
        .into_iter()
        .next()
        .ok_or(TtlError::NotInstalled)
    }

    /// When rows expire, by a value in them.
    pub fn expiry(&self, source: Source, value: String, options: &Options) -> Expiry {
        Expiry::new(source, value, options.expire_after, &options.time_zone, &self.schema)
    }

    /// One of our functions, qualified.
    pub fn function(&self, name: &str) -> String {
        format!("{}.{name}", self.schema)
    }

    /// Intervals in results are in the style that [`crate::rule::Ttl`] reads.
    pub fn with_rights<R>(&self, work: impl FnOnce() -> R) -> R {
        let style = [(c"IntervalStyle", c"postgres_verbose")];
        identity::with_rights_of(self.owner, || identity::with_settings(&style, work))
    }
}
