//! The objects that a rule's names refer to in this database: columns, types, and the meaning of its expressions.

use super::{Catalog, Rule};
use crate::error::{Purpose, TtlError};
use crate::pg::transaction::subtransaction;
use crate::pg::{access, expression, identity, meaning, process, relation, shmem, spi};
use pgrx::pg_sys::Oid;

/// The columns a rule was registered for: those of its TTL value, those it updates, those of the filter.
pub(super) struct Columns {
    pub relid: Oid,
    pub attnums: Vec<i16>,
    /// Their names as stored with the rule.
    pub names: Vec<String>,
    /// The types below all domains that the rule is bound to.
    pub types: Vec<Oid>,
}

/// Reads an array of OIDs, in which a user may have written anything.
pub(super) fn oids(row: &spi::Row<'_>, ordinal: usize) -> pgrx::spi::Result<Vec<Oid>> {
    let oids = row.get::<Vec<Option<Oid>>>(ordinal)?.unwrap_or_default();
    Ok(oids.into_iter().map(Option::unwrap_or_default).collect())
}

/// SQL for a fingerprint of the functions `$1`: what they do, regardless of name, cost and privileges.
pub(super) const FINGERPRINT: &str =
    "SELECT coalesce(string_agg(md5(ROW(oid, prolang, prosecdef, proisstrict, provolatile, proretset, prorettype,
            proargtypes, proargdefaults, prosrc, probin, prosqlbody, proconfig)::text), ' ' ORDER BY oid), '')
     FROM pg_proc WHERE oid = ANY ($1)";

impl Columns {
    /// The four columns that [`Self::read`] reads, as SQL over a rule `t` and its binding `b`.
    pub const SQL: &str =
        "b.relid, coalesce(b.expression_attnums, ARRAY[b.attnum]) || b.soft_delete_attnum || b.clear_attnums || b.filter_attnums,
         coalesce(t.expression_columns, ARRAY[t.column_name]) || t.soft_delete_column || t.clear_columns || t.filter_columns,
         b.types";

    /// Reads the columns of [`Self::SQL`] from a row, starting at ordinal `place`.
    pub fn read(row: &spi::Row<'_>, place: usize) -> Result<Self, TtlError> {
        Ok(Self {
            relid: row.get(place)?.unwrap_or_default(),
            attnums: row.get::<Vec<Option<i16>>>(place + 1)?.unwrap_or_default().into_iter().flatten().collect(),
            names: row.get::<Vec<Option<String>>>(place + 2)?.unwrap_or_default().into_iter().flatten().collect(),
            types: oids(row, place + 3)?,
        })
    }

    /// Fails if a column is gone, no longer has its name, or has another type, or if the rule was written to use others.
    pub fn check(&self) -> Result<(), TtlError> {
        if self.attnums.len() != self.names.len() {
            return Err(TtlError::ColumnMissing(self.names.last().cloned().unwrap_or_default()));
        }
        for (place, (attnum, name)) in self.attnums.iter().zip(&self.names).enumerate() {
            match access::column(self.relid, *attnum) {
                Some((present, type_oid)) if present == *name => {
                    if self.types.get(place) != Some(&type_oid) {
                        return Err(TtlError::TypeChanged(name.clone()));
                    }
                }
                _ => return Err(TtlError::ColumnMissing(name.clone())),
            }
        }
        Ok(())
    }
}

/// The meaning of a rule's filter and expression as stored in its binding.
#[derive(Default)]
pub struct Meanings {
    pub(super) expression: Option<String>,
    pub(super) filter: Option<String>,
    pub(super) called: Vec<Oid>,
    pub(super) functions: Option<String>,
    /// Whether the running major version of PostgreSQL wrote the trees.
    pub(super) is_comparable: bool,
}

impl Meanings {
    /// Whether filter and expression, if present, call no user code. Decided without running anything.
    pub fn are_harmless(&self, has_filter: bool, has_expression: bool) -> bool {
        let is_harmless = |has_one: bool, tree: &Option<String>| {
            !has_one || (self.is_comparable && tree.as_deref().is_some_and(meaning::is_harmless))
        };
        is_harmless(has_filter, &self.filter) && is_harmless(has_expression, &self.expression)
    }
}

/// Returns the values of defaults, as constants in SQL. A column without a default is cleared to NULL.
fn values_of(relid: Oid, attnums: &[i16], defaults: &[Option<String>]) -> Result<Vec<String>, TtlError> {
    let value = |(attnum, default): (&i16, &Option<String>)| {
        default.as_ref().map_or(Ok("NULL".into()), |default| expression::constant(relid, *attnum, default))
    };
    attnums.iter().zip(defaults).map(value).collect()
}

/// Why a rule is being bound.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Binding {
    /// A user has just defined the rule: names mean what they mean now.
    Registered,
    /// The rule was restored: the dump says what its names meant.
    Restored,
    /// The server was upgraded: names still mean the same, but functions have new OIDs.
    Upgraded,
}

/// The parts of a rule that [`Catalog::bind`] reads.
struct Unbound {
    relid: Oid,
    owner: Oid,
    attnums: Vec<i16>,
    /// The column types named in its row, and those it is bound to.
    named_types: Option<Vec<Oid>>,
    bound_types: Vec<Oid>,
    filter: Option<String>,
    expression: Option<String>,
    /// The defaults of the columns that it clears, and what tells them from others.
    clear_defaults: Option<Vec<Option<String>>>,
    clear_marks: Option<Vec<Option<String>>>,
    clear_attnums: Vec<i16>,
}

impl Catalog {
    /// Binds a rule, whose table and columns exist, to all objects it refers to.
    pub(super) fn bind(&self, id: i64, how: Binding) -> Result<(), TtlError> {
        let Some(rule) = self.bind_names(id, how)? else { return Ok(()) };
        self.bind_meanings(id, &rule, how)?;
        self.bind_defaults(id, &rule, how)?;
        self.know_uses(id)?;
        self.count_guards(id, rule.relid)?;
        match how {
            Binding::Registered | Binding::Upgraded => self.know_probe(id),
            // The restore has yet to create its index.
            Binding::Restored => Ok(()),
        }
    }

    /// Looks up the names in a rule, and returns what else there is to bind.
    fn bind_names(&self, id: i64, how: Binding) -> Result<Option<Unbound>, TtlError> {
        let numbers = format!(
            "UPDATE {schema}.ttl_binding b
             SET owner = CASE WHEN $2 THEN b.owner
                              WHEN $3 AND t.last_error_code = '55000' THEN 0
                              ELSE coalesce((SELECT relowner FROM pg_class WHERE oid = b.relid), 0) END,
                 filter_attnums = {schema}.ttl_attnums(b.relid, t.filter_columns),
                 expression_attnums = {schema}.ttl_attnums(b.relid, t.expression_columns),
                 soft_delete_attnum = ({schema}.ttl_attnums(b.relid, ARRAY[t.soft_delete_column]))[1],
                 clear_attnums = {schema}.ttl_attnums(b.relid, t.clear_columns), clear_defaults = NULL, clear_values = NULL,
                 index_relid = {schema}.ttl_ready_index(b.relid, t.index_name, t.concurrently),
                 archive_relid = to_regclass(t.archive_to), on_expire_oid = {schema}.ttl_on_expire_oid(t.on_expire)
             FROM {schema}.ttl_index_table t
             WHERE t.id = b.rule_id AND t.id = $1",
            schema = self.schema
        );
        let read = format!(
            "SELECT b.relid, c.relowner, coalesce(b.expression_attnums, ARRAY[b.attnum]) || b.soft_delete_attnum || b.clear_attnums
                        || b.filter_attnums,
                    (SELECT array_agg(coalesce(to_regtype(name)::oid, 'unknown'::regtype::oid) ORDER BY place)
                     FROM unnest(t.column_types) WITH ORDINALITY AS named (name, place)),
                    t.filter, CASE WHEN b.attnum IS NULL THEN t.column_name END, b.types,
                    {schema}.ttl_defaults(b.relid, b.clear_attnums), b.clear_attnums,
                    {schema}.ttl_default_marks(b.relid, b.clear_attnums)
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             JOIN pg_class c ON c.oid = b.relid WHERE t.id = $1",
            schema = self.schema
        );
        let unbound = self.with_rights(|| {
            // A restore does not restart a rule that had stopped because its table or its functions had changed.
            let (is_upgraded, is_restored) = (how == Binding::Upgraded, how == Binding::Restored);
            spi::execute(&numbers, &[id.into(), is_upgraded.into(), is_restored.into()])?;
            spi::query(&read, &[id.into()], |row| {
                Ok(Unbound {
                    relid: row.get(1)?.unwrap_or_default(),
                    owner: row.get(2)?.unwrap_or_default(),
                    attnums: row.get::<Vec<Option<i16>>>(3)?.unwrap_or_default().into_iter().flatten().collect(),
                    named_types: row.get(4)?,
                    bound_types: oids(&row, 7)?,
                    filter: row.get(5)?,
                    expression: row.get(6)?,
                    clear_defaults: row.get(8)?,
                    clear_attnums: row.get::<Vec<Option<i16>>>(9)?.unwrap_or_default().into_iter().flatten().collect(),
                    clear_marks: row.get(10)?,
                })
            })
        })?;
        Ok(unbound.into_iter().next())
    }

    /// Stores the types of a rule's columns, and what its filter and expression mean.
    fn bind_meanings(&self, id: i64, rule: &Unbound, how: Binding) -> Result<(), TtlError> {
        let present =
            || rule.attnums.iter().filter_map(|attnum| Some(access::column(rule.relid, *attnum)?.1)).collect();
        let types: Vec<Oid> = match how {
            Binding::Registered => present(),
            Binding::Restored => rule.named_types.clone().unwrap_or_else(present),
            Binding::Upgraded => rule.bound_types.clone(),
        };
        let meaning = |text: &Option<String>, purpose| {
            let read = || text.as_deref().map(|text| meaning::of(rule.relid, text, purpose)).transpose();
            let read = || identity::sandboxed_as(rule.owner, read);
            match how {
                Binding::Registered | Binding::Upgraded => read(),
                // A text that cannot be read yet has no meaning, and its rule does not run: objects may be missing.
                Binding::Restored => Ok(subtransaction(read).unwrap_or_default()),
            }
        };
        let filter = meaning(&rule.filter, Purpose::Filter)?;
        let expression = meaning(&rule.expression, Purpose::Value)?;
        let meanings = || [&filter, &expression].into_iter().flatten();
        let called: Vec<Oid> = meanings().flat_map(|meaning| meaning.functions.clone()).collect();
        let uses: Vec<Oid> = meanings().flat_map(|meaning| meaning.others.clone()).chain(called.clone()).collect();
        let functions = self.fingerprint(&called)?;
        let bind = format!(
            "UPDATE {}.ttl_binding SET types = $2, filter_tree = $3, expression_tree = $4, tree_version = $5, called = $6,
                 functions = $7, uses = $8 WHERE rule_id = $1",
            self.schema,
        );
        let args = [
            id.into(),
            types.clone().into(),
            filter.map(|meaning| meaning.tree).into(),
            expression.map(|meaning| meaning.tree).into(),
            meaning::version().into(),
            called.into(),
            functions.into(),
            uses.into(),
        ];
        let describe = format!(
            "UPDATE {}.ttl_index_table SET column_types = (
                 SELECT coalesce(array_agg(format_type(oid, NULL) ORDER BY place), '{{}}')
                 FROM unnest($2) WITH ORDINALITY AS type (oid, place))
             WHERE id = $1",
            self.schema
        );
        self.with_rights(|| {
            spi::execute(&bind, &args)?;
            if how == Binding::Registered {
                spi::execute(&describe, &[id.into(), types.into()])?;
            }
            Ok::<_, TtlError>(())
        })
    }

    /// Stores the defaults of the columns that a rule clears, and their values.
    fn bind_defaults(&self, id: i64, rule: &Unbound, how: Binding) -> Result<(), TtlError> {
        let Some(defaults) = &rule.clear_defaults else { return Ok(()) };
        let read = || identity::sandboxed_as(rule.owner, || values_of(rule.relid, &rule.clear_attnums, defaults));
        let values = match how {
            Binding::Registered | Binding::Upgraded => read()?,
            // Without values, the rule does not run.
            Binding::Restored => match subtransaction(read) {
                Ok(values) => values,
                Err(_) => return Ok(()),
            },
        };
        let sql =
            format!("UPDATE {}.ttl_binding SET clear_defaults = $2, clear_values = $3 WHERE rule_id = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[id.into(), rule.clear_marks.clone().into(), values.into()]))
            .map(|_| ())
    }

    /// Returns the values of the defaults of columns, as constants in SQL, read as the owner of the table.
    pub fn default_values(&self, relid: Oid, owner: Oid, attnums: &[i16]) -> Result<Vec<String>, TtlError> {
        let sql = format!("SELECT {}.ttl_defaults($1, $2)", self.schema);
        let args = [relid.into(), attnums.to_vec().into()];
        let read = || spi::query(&sql, &args, |row| row.get::<Vec<Option<String>>>(1));
        let defaults = self.with_rights(read)?.into_iter().flatten().next().unwrap_or_default();
        identity::sandboxed_as(owner, || values_of(relid, attnums, &defaults))
    }

    /// Adds the objects a rule uses by name, and the schemas of all objects, to those its expressions use.
    pub(super) fn know_uses(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_binding b SET uses = known.uses
             FROM (SELECT array_agg(DISTINCT object) AS uses
                   FROM (SELECT b.relid, b.archive_relid, b.on_expire_oid, b.uses || b.types FROM {schema}.ttl_binding b WHERE rule_id = $1)
                            AS bound (relid, archive, function, others)
                   CROSS JOIN LATERAL (SELECT others || relid || archive || function) AS objects (all_of)
                   CROSS JOIN LATERAL (
                       SELECT unnest(all_of)
                       UNION ALL SELECT relnamespace FROM pg_class WHERE oid = ANY (all_of)
                       UNION ALL SELECT pronamespace FROM pg_proc WHERE oid = ANY (all_of)
                       UNION ALL SELECT typnamespace FROM pg_type WHERE oid = ANY (all_of)
                       UNION ALL SELECT oprnamespace FROM pg_operator WHERE oid = ANY (all_of)) AS used (object)
                   WHERE object >= 16384) AS known
             WHERE b.rule_id = $1 AND b.uses IS DISTINCT FROM known.uses",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Counts the triggers and rewrite rules on a rule's tables, and stores the number for a dump. While there are
    /// fewer than the rule's row says, the others are still to be restored, and the row's number is not lowered.
    pub(super) fn count_guards(&self, id: i64, relid: Oid) -> Result<(), TtlError> {
        let count = "(SELECT count(*)::integer FROM pg_trigger WHERE tgrelid = ANY ($2) AND tgparentid = 0)
                     + (SELECT count(*)::integer FROM pg_rewrite WHERE ev_class = ANY ($2))";
        let is_news = format!("SELECT FROM {}.ttl_binding WHERE rule_id = $1 AND guards_found <> {count}", self.schema);
        // Another session may be adding one to another part of the table: the second session counts again.
        let lock = format!("SELECT FROM {}.ttl_binding WHERE rule_id = $1 FOR UPDATE", self.schema);
        let follow = format!(
            "UPDATE {schema}.ttl_index_table t
             SET guards = CASE WHEN b.guards_found < t.guards THEN greatest(t.guards, present.guards) ELSE present.guards END
             FROM {schema}.ttl_binding b, (SELECT {count}) AS present (guards)
             WHERE t.id = $1 AND b.rule_id = $1",
            schema = self.schema
        );
        let find = format!("UPDATE {}.ttl_binding SET guards_found = {count} WHERE rule_id = $1", self.schema);
        let tree = relation::tree(relid);
        let args = [id.into(), tree.clone().into()];
        self.with_rights(|| {
            if spi::execute(&is_news, &args)? > 0 {
                spi::execute(&lock, &[id.into()])?;
                spi::execute(&follow, &args)?;
                spi::execute(&find, &args)?;
                process::at_commit(shmem::wake);
            }
            Ok(())
        })
    }

    /// Fails if a rule's filter or expression has come to mean something else: a name in it now refers to another
    /// function, a function was replaced, an enum label was given to another value.
    ///
    /// A sweep calls this before it looks for rows, before each batch and again after it, in the batch's transaction: a
    /// replacement in between rolls the batch back.
    pub fn check_meaning(&self, rule: &Rule) -> Result<(), TtlError> {
        let texts = [
            (rule.options.filter.as_deref(), &rule.meanings.filter, Purpose::Filter),
            (rule.attnum.is_none().then_some(rule.name.as_str()), &rule.meanings.expression, Purpose::Value),
        ];
        if texts.iter().all(|(text, ..)| text.is_none()) {
            return Ok(());
        }
        for (text, tree, purpose) in texts {
            let Some(text) = text else { continue };
            let tree = tree.as_deref().ok_or(TtlError::MeaningChanged(purpose))?;
            // After a server upgrade, functions have other OIDs and trees another format.
            let is_same = !rule.meanings.is_comparable
                || identity::sandboxed_as(rule.owner, || meaning::is(rule.relid, text, purpose, tree))?
                    && (rule.meanings.called.is_empty()
                        || self.fingerprint(&rule.meanings.called)? == rule.meanings.functions);
            if !is_same {
                return Err(TtlError::MeaningChanged(purpose));
            }
        }
        Ok(())
    }
}
