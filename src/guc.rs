//! Every setting of the extension.

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

/// Rows per batch for rules that do not say.
static BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(10_000);

pub fn init() {
    GucRegistry::define_int_guc(
        c"pg_ttl_index.batch_size",
        c"Sets how many rows a batch removes for rules without a batch size of their own.",
        c"",
        &BATCH_SIZE,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::default(),
    );
    crate::pg::access::reserve_setting_prefix(c"pg_ttl_index");
}

pub fn batch_size() -> i32 {
    BATCH_SIZE.get()
}
