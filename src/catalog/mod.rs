//! The only code that reads or writes the extension's own tables. It does so with the rights of their owner; callers
//! check permissions first.

mod binding;
mod claim;
mod clock;
mod find;
mod follow;
mod outcome;
mod probe;
mod restore;
mod rule;
mod rules;
mod schema;
mod switch;
mod visible;

pub use claim::Claim;
pub use clock::Change as ClockChange;
pub use outcome::{Blocked, Initiator, Outcome};
pub use probe::Probe;
pub use restore::DumpedRule;
pub use rule::{Broken, Rule, State};
pub use rules::{Definition, RuleIndex, StoredRule};

use crate::error::TtlError;
use crate::pg::transaction::{Failure, reading};
use crate::pg::{access, citus, identity, spi};
use crate::rule::{Expiry, Options, Source};
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_literal};

/// The extension's tables: their schema and their owner.
#[derive(Clone)]
pub struct Catalog {
    /// The name of the schema, quoted.
    pub schema: String,
    owner: Oid,
    /// The table of rules, `ttl_index_table`.
    pub relid: Oid,
}

impl Catalog {
    /// Opens the catalog of this database. Fails if there is none, or none that this library serves.
    pub fn open() -> Result<Self, TtlError> {
        // The tables are looked up once; the name of their schema and their owner, each time.
        let relid = schema::tables()?.first().copied().unwrap_or_default();
        let (schema, owner) = access::place_of(relid).ok_or(TtlError::NotInstalled)?;
        Ok(Self { schema: quote_identifier(schema), owner, relid })
    }

    /// Like [`Self::open`], but returns `None` where no catalog is served, for callers that must not fail then.
    pub fn open_if_served() -> Result<Option<Self>, TtlError> {
        match Self::open() {
            Err(TtlError::NotInstalled | TtlError::Unserved(_)) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Reads the catalog on behalf of an unrelated query, and holds no lock on it afterwards. If the extension is
    /// dropped or moved meanwhile, reads it again.
    pub fn read_for_query<T>(read: impl Fn() -> Result<T, TtlError>) -> Result<T, Failure> {
        let place = || Ok::<_, TtlError>(Self::open_if_served()?.map(|catalog| (catalog.relid, catalog.schema)));
        loop {
            let before = place()?;
            if before.is_none() {
                return Ok(read()?);
            }
            let locked = || {
                // DROP EXTENSION locks the tables in an arbitrary order.
                access::lock_for_reading(&schema::tables()?);
                read()
            };
            match reading(locked) {
                Err(_) if place()? != before => {}
                result => return result,
            }
        }
    }

    /// Returns the relations that change when a served catalog appears or disappears.
    pub fn watched() -> Result<Vec<Oid>, TtlError> {
        schema::watched()
    }

    /// Returns how rows expire by a value in them.
    pub fn expiry(&self, source: Source, value: String, options: &Options) -> Expiry {
        Expiry::new(source, value, options.expire_after, &options.time_zone, &self.schema)
    }

    /// Whether the current role has the rights of the catalog's owner.
    pub fn is_callers(&self) -> bool {
        access::is_member_of(self.owner)
    }

    /// Returns the qualified name of one of the extension's functions.
    pub fn function(&self, name: &str) -> String {
        format!("{}.{name}", self.schema)
    }

    /// Returns the OID of one of the extension's functions by its name and argument types.
    pub fn function_oid(&self, signature: &str) -> Result<Oid, TtlError> {
        let sql = format!("SELECT to_regprocedure({})::oid", quote_literal(self.function(signature)));
        Ok(self.with_rights(|| spi::peek(&sql, |row| row.get(1)))?.into_iter().flatten().next().unwrap_or_default())
    }

    /// Runs `work` with the rights of the catalog's owner, and intervals in the style [`crate::rule::Ttl`] reads.
    pub fn with_rights<R>(&self, work: impl FnOnce() -> R) -> R {
        // JIT-compiling these queries would take longer than running them, however many rules the planner expects.
        let style = [(c"IntervalStyle", c"postgres_verbose"), (c"jit", c"off")];
        let pinned = || identity::with_settings(&style, || citus::seeing_shards(work));
        identity::with_rights_of(self.owner, || identity::with_pinned_values(pinned))
    }
}
