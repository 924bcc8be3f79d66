//! The only code that reads or writes the extension's own tables. It does so with the rights of their owner; who may
//! ask for it is decided before.

mod outcome;
mod rules;
mod sweepable;

pub use outcome::{Outcome, Trigger};
pub use rules::{Definition, RuleIndex, StoredRule};
pub use sweepable::{Broken, Claim, Rule};

use crate::error::TtlError;
use crate::pg::{identity, spi};
use pgrx::pg_sys::Oid;

/// The extension's tables: where they live and whose they are.
#[derive(Clone)]
pub struct Catalog {
    /// A quoted identifier.
    schema: String,
    owner: Oid,
}

impl Catalog {
    pub fn open() -> Result<Self, TtlError> {
        spi::read(
            "SELECT quote_ident(n.nspname), c.relowner
             FROM pg_extension e
             JOIN pg_namespace n ON n.oid = e.extnamespace
             JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'ttl_index_table'
             WHERE e.extname = 'pg_ttl_index'",
            &[],
            |row| Ok(Self { schema: row.get(1)?.unwrap_or_default(), owner: row.get(2)?.unwrap_or_default() }),
        )?
        .into_iter()
        .next()
        .ok_or(TtlError::NotInstalled)
    }

    fn with_rights<R>(&self, work: impl FnOnce() -> R) -> R {
        identity::with_rights_of(self.owner, work)
    }
}
