//! A hidden row that is still there must not be in the way of a new one with its key: before a row is written, expired
//! rows that it would collide with are removed.

use super::PRESENT;
use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::memo::Memo;
use crate::pg::plan::Plan;
use crate::pg::planner::MARK;
use crate::pg::trigger::Change;
use crate::pg::{access, identity, relation, spi};
use crate::sweep;
use pgrx::pg_sys::{self, Datum, Oid};
use std::rc::Rc;

/// How room is made in a table.
struct Room {
    owner: Oid,
    clearings: Vec<Clearing>,
}

/// The removal of what one unique index has under the key of a row, if it has expired.
struct Clearing {
    /// The columns that decide about the key; `None` if they are not easily told.
    columns: Option<Vec<String>>,
    plan: Plan,
}

thread_local! {
    static ROOMS: Memo<(i64, Oid), Option<Room>> = Memo::new();
}

/// The row as it is to be written, when nothing that has expired is in its way any more.
pub fn made_room(change: &Change<'_>) -> Result<Datum, TtlError> {
    let rule_id = change.argument().and_then(|id| id.parse().ok()).ok_or(TtlError::NotOurTrigger)?;
    if !sweep::is_under_way_in(change.relid())
        && let Some(room) = room_in(rule_id, change.relid())?.as_ref()
    {
        let in_the_way = |clearing: &&Clearing| clearing.columns.as_ref().is_none_or(|columns| change.changes(columns));
        for clearing in room.clearings.iter().filter(in_the_way) {
            // As the owner, as a sweep would, and with the same condition.
            identity::sandboxed_as(room.owner, || {
                clearing.plan.call::<i32>(&mut [change.as_value(), change.old_place()])
            });
        }
    }
    Ok(change.row())
}

fn room_in(rule_id: i64, relid: Oid) -> Result<Rc<Option<Room>>, TtlError> {
    ROOMS.with(|memo| match memo.get(&(rule_id, relid)) {
        Some(room) => Ok(room),
        None => memo.remember(&(rule_id, relid), || {
            let catalog = Catalog::open()?;
            let rule = catalog.rule_with_id(rule_id)?.filter(|rule| rule.options.makes_room() && rule.hold.is_none());
            let about = vec![catalog.relid, relid, rule.as_ref().map_or(relid, |rule| rule.relid)];
            // Anybody who may make triggers on a table can give them any number.
            let rule = rule.filter(|rule| relation::tree(rule.relid).contains(&relid));
            Ok((about, rule.map(|rule| Room::of(&rule, relid)).transpose()?))
        }),
    })
}

impl Room {
    fn of(rule: &Rule, relid: Oid) -> Result<Self, TtlError> {
        let expired = rule.has_expired(&rule.expiry.cutoff_at(PRESENT)).join(" AND ");
        let indexes = spi::read(
            "SELECT format('%I.%I', n.nspname, c.relname), c.relowner,
                    array_agg(a.attname::text ORDER BY k.position), i.indpred IS NULL AND bool_and(k.attnum <> 0),
                    string_agg(CASE WHEN k.attnum <> 0 THEN format('%1$I %2$s ($1).%1$I', a.attname, e.equals)
                                    ELSE format('(%1$s) %2$s (SELECT %1$s FROM (SELECT ($1).*) AS new)',
                                                pg_get_indexdef(i.indexrelid, k.position::int, false), e.equals)
                               END, ' AND ' ORDER BY k.position)
                    || CASE WHEN i.indpred IS NULL THEN ''
                            ELSE format(' AND (%1$s) AND (SELECT %1$s FROM (SELECT ($1).*) AS new)',
                                        pg_get_expr(i.indpred, i.indrelid))
                       END
             FROM pg_index i
             JOIN pg_class c ON c.oid = i.indrelid
             JOIN pg_namespace n ON n.oid = c.relnamespace
             CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[])
                        WITH ORDINALITY AS k (attnum, opclass, position)
             LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             JOIN LATERAL (SELECT format('OPERATOR(%I.%s)', s.nspname, o.oprname) AS equals
                           FROM pg_opclass p
                           JOIN pg_amop m ON m.amopfamily = p.opcfamily AND m.amopstrategy = 3
                                         AND m.amoplefttype = p.opcintype AND m.amoprighttype = p.opcintype
                           JOIN pg_operator o ON o.oid = m.amopopr
                           JOIN pg_namespace s ON s.oid = o.oprnamespace
                           WHERE p.oid = k.opclass) AS e ON true
             WHERE i.indrelid = $1 AND i.indisunique AND NOT i.indisexclusion AND i.indislive AND k.position <= i.indnkeyatts
             GROUP BY i.indexrelid, i.indrelid, i.indpred, n.nspname, c.relname, c.relowner",
            &[relid.into()],
            |row| {
                let text = |ordinal| Ok::<String, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
                let columns = row.get::<Vec<Option<String>>>(3)?.unwrap_or_default();
                let is_plain = row.get(4)?.unwrap_or(false);
                let columns = is_plain.then(|| columns.into_iter().flatten().collect());
                Ok((text(1)?, row.get::<Oid>(2)?.unwrap_or_default(), columns, text(5)?))
            },
        )?;
        let row_type = access::row_type(relid);
        let clearings = indexes
            .into_iter()
            // A sweep leaves the parts of other owners alone, too.
            .filter(|index| index.1 == rule.owner)
            .map(|(table, _, columns, same_key)| Clearing {
                columns,
                plan: Plan::new(
                    &format!("{MARK}DELETE FROM ONLY {table} WHERE {same_key} AND {expired} AND ctid <> $2"),
                    &mut [row_type, pg_sys::TIDOID],
                ),
            })
            .collect();
        Ok(Self { owner: rule.owner, clearings })
    }
}
