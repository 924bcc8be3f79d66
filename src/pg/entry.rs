//! Symbols that PostgreSQL looks up in the library: C functions and the main functions of background workers.

use pgrx::pg_sys;

/// The version record that PostgreSQL requires of a C function.
pub static VERSION: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// Defines the C function `name`, declared in SQL, from a Rust function that handles the call. `info` is the function
/// `pg_finfo_` plus the name, by which PostgreSQL recognizes it.
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
