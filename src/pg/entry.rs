//! What PostgreSQL finds in the library by name: functions in C, and the main functions of background workers.

use pgrx::pg_sys;

/// What PostgreSQL asks of a function in C.
pub static VERSION: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// Defines a function in C, `name`, that is declared in SQL, by a function of ours that takes the call. `info`, `pg_finfo_` and the name,
/// tells PostgreSQL of it.
macro_rules! c_function {
    ($(#[$doc:meta])* $name:ident, $info:ident, $call:ty, $work:expr) => {
        $(#[$doc])*
        #[pgrx::pg_guard]
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        pub extern "C-unwind" fn $name(call: $call) -> pgrx::pg_sys::Datum {
            let work: fn($call) -> pgrx::pg_sys::Datum = $work;
            work(call)
        }

        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        extern "C" fn $info() -> &'static pgrx::pg_sys::Pg_finfo_record {
            &crate::pg::entry::VERSION
        }
    };
}

/// Defines the main function of a background worker.
macro_rules! worker_main {
    ($name:ident, $work:path) => {
        #[pgrx::pg_guard]
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        pub extern "C-unwind" fn $name(argument: pgrx::pg_sys::Datum) {
            $work(argument);
        }
    };
}

pub(crate) use {c_function, worker_main};
