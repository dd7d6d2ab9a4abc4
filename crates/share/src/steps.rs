//! The named steps of the protocol, at which a test can end the process.

/// Marks a step. With the feature `fault-steps`, a process whose environment has
/// `VMM_SHARE_DIE_AT` with that name ends here as if it had been killed; else nothing is compiled.
macro_rules! step {
    ($name:literal) => {
        #[cfg(any(test, feature = "fault-steps"))]
        crate::steps::reached($name);
    };
}
pub(crate) use step;

/// The steps of an exporter, in the order of a hand-over.
#[cfg(any(test, feature = "fault-steps"))]
pub const EXPORTER_STEPS: &[&str] = &[
    "exporter-accepted",
    "exporter-hello",
    "exporter-open",
    "exporter-opened",
    "exporter-describe",
    "exporter-described",
    "exporter-fetch",
    "exporter-made",
    "exporter-sent",
    "exporter-before",
    "exporter-after",
];

/// The steps of an importer, in the order of a hand-over.
#[cfg(any(test, feature = "fault-steps"))]
pub const IMPORTER_STEPS: &[&str] = &[
    "importer-connected",
    "importer-welcomed",
    "importer-opened",
    "importer-described",
    "importer-received",
    "importer-imported",
    "importer-reserved",
    "importer-mapped",
    "importer-granted",
    "importer-refresh",
    "importer-unmapped",
    "importer-replaced",
];

/// The steps of an owner process, in the order of a buffer's life.
#[cfg(any(test, feature = "fault-steps"))]
pub const OWNER_STEPS: &[&str] = &[
    "owner-create",
    "owner-made",
    "owner-offered",
    "owner-entered",
    "owner-answers",
    "owner-found",
    "owner-status",
    "owner-leave",
    "owner-left",
    "owner-release",
    "owner-released",
];

/// The steps of a worker of an owner process, in the order of a buffer's life.
#[cfg(any(test, feature = "fault-steps"))]
pub const WORKER_STEPS: &[&str] =
    &["worker-create", "worker-created", "worker-left", "worker-released"];

#[cfg(any(test, feature = "fault-steps"))]
pub(crate) fn reached(name: &str) {
    use std::sync::OnceLock;
    static DIE_AT: OnceLock<Option<String>> = OnceLock::new();
    let die_at = DIE_AT.get_or_init(|| std::env::var("VMM_SHARE_DIE_AT").ok());
    if die_at.as_deref() == Some(name) {
        let me = rustix::process::getpid();
        // Cannot fail for the own process; a process that lived on would fail the test.
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    }
}
