//! Settings that a role would get if it logged in to this database.

use super::spi;
use crate::error::TtlError;
use pgrx::pg_sys::Oid;
use std::ffi::CString;

/// Returns a role's search path: that of the role in this database, of the role, of the database, or of the server.
/// `pg_temp` comes last unless the path names it, because this session's temporary relations need not be the role's.
/// Must be called as a superuser, who may read the configuration.
pub fn search_path(role: Oid) -> Result<CString, TtlError> {
    let sql = "SELECT coalesce(
                   (SELECT substr(setting, length('search_path=') + 1)
                    FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS setting
                    WHERE s.setrole IN (0, $1) AND starts_with(setting, 'search_path=')
                      AND s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
                    ORDER BY s.setrole = $1 DESC, s.setdatabase <> 0 DESC LIMIT 1),
                   (SELECT setting FROM pg_file_settings WHERE name = 'search_path' AND applied ORDER BY seqno DESC LIMIT 1),
                   (SELECT boot_val FROM pg_settings WHERE name = 'search_path'))";
    let found: Vec<Option<String>> = spi::read(sql, &[role.into()], |row| row.get(1))?;
    let path = found.into_iter().flatten().next().unwrap_or_default();
    let names_temporary = path.split(',').any(|schema| schema.trim().trim_matches('"') == "pg_temp");
    let path = match path.trim() {
        "" => "pg_temp".to_owned(),
        path if names_temporary => path.to_owned(),
        path => format!("{path}, pg_temp"),
    };
    Ok(CString::new(path).unwrap_or_default())
}
