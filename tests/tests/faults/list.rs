//! What has no case, and why: operations and driver calls. Whatever is new must have one or be here.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use vmm_sys::Call;

use crate::engine::Case;

/// Where the public operations are.
const SOURCES: [&str; 5] = [
    "crates/pool/src",
    "crates/vmm-sys/src/object",
    "crates/vmm-sys/src/topology.rs",
    "crates/kv/src",
    "crates/share/src",
];

/// Where the functions of the C library are: of these sources only what C sees.
const C_SOURCES: [&str; 3] = ["crates/capi/src", "crates/torch/src", "crates/cupy/src"];

/// Operations without a case. `Type::` stands for all of a type's.
const WITHOUT_CASE: &[(&str, &[&str])] = &[
    (
        "plain values, with no driver behind them",
        &[
            "AccessMatrix::",
            "BlockLayout::",
            "Budget::",
            "DeviceStats::",
            "Dtype::",
            "Error::",
            "Finding::",
            "Growth::",
            "HostStats::",
            "KvCapacity::",
            "KvError::",
            "KvShape::",
            "KvStats::",
            "LadderStats::",
            "Move::",
            "NamedBuffer::",
            "OutOfMemory::",
            "Part::",
            "PeerRule::",
            "Place::",
            "Request::",
            "Room::",
            "SequenceLayout::",
            "Abilities::",
            "Topology::device",
            "Topology::link",
            "Topology::reaches",
        ],
    ),
    (
        "settings read from text",
        &[
            "bytes",
            "bytes_or_off",
            "chunk",
            "debug_mode",
            "debug_mode_name",
            "fuzz_decode",
            "ms_or_off",
            "placement",
            "placement_name",
            "soft_limit",
            "switch",
        ],
    ),
    (
        "settings of what is built later",
        &[
            "ContiguousCache::builder",
            "PagedCache::builder",
            "Exporter::builder",
            "Owner::builder",
            "ImporterOptions::new",
            "PoolBuilder::on_shortage",
            "PoolBuilder::variables",
            "ElasticBuilder::quota_bytes",
        ],
    ),
    (
        "reads what an object or shared memory holds",
        &[
            "BlockTables::",
            "Buffer::address",
            "Buffer::bytes",
            "Buffer::device",
            "Buffer::is_empty",
            "Chunk::bytes",
            "Chunk::driver",
            "Chunk::handle",
            "Chunk::props",
            "Chunk::receipt",
            "Event::device",
            "Exporter::address",
            "Exporter::stats",
            "GrowAhead::is_finished",
            "GrowAhead::state",
            "GrowAhead::target_bytes",
            "Import::access",
            "Import::address",
            "Import::address_for",
            "Import::bytes",
            "Import::check",
            "Import::chunk_bytes",
            "Import::devices",
            "Import::generation",
            "Import::name",
            "Import::pieces",
            "Import::published",
            "Import::reserved_bytes",
            "ImportUse::stream",
            "Importer::exporter_id",
            "Importer::is_owner_alive",
            "Lane::device",
            "Lane::stream",
            "Latch::reached",
            "Mapping::address",
            "Mapping::bytes",
            "Mapping::chunk",
            "Migration::is_finished",
            "Migration::state",
            "Offer::buffer",
            "Offer::is_writable",
            "Offer::name",
            "Owner::address",
            "Owner::status",
            "OwnerClient::is_owner_alive",
            "OwnerStatus::",
            "Range::address",
            "Range::bytes",
            "Range::driver",
            "Stream::device",
            "Stream::driver",
            "Stream::handle",
            "Stream::has_ended",
            "Stream::id",
            "Stream::is_borrowed",
            "Stream::is_elsewhere",
            "Stream::is_legacy",
            "Stream::is_named_by",
            "Stream::is_per_thread",
            "Stream::may_follow_legacy",
            "Use::stream",
        ],
    ),
    (
        "asks the other process only; what that does to memory are a pool's and an exporter's operations",
        &["OwnerBuilder::bind", "OwnerClient::leave", "OwnerClient::release"],
    ),
    (
        "the simulated device shares no events between processes (row D-X7)",
        &["Event::create_interprocess", "Event::export", "Event::open"],
    ),
    (
        "C functions that look at what the library itself holds",
        &[
            "vmm_import_check",
            "vmm_import_info",
            "vmm_pool_abi_version",
            "vmm_pool_last_error",
            "vmm_pool_last_status",
            "vmm_pool_torch_last_error",
            "vmm_pool_version",
        ],
    ),
    ("tells a cache's own threads what the calling thread is doing", &["is_operating"]),
    ("what every case ends with", &["failed_drops", "retry_failed_drops"]),
];

/// Driver calls that no operation with a case makes.
const NOT_REACHED: &[(&str, &[Call])] = &[
    (
        "made within the CUDA driver's side of other calls: opening it, contexts, kernels",
        &[
            Call::Init,
            Call::DeviceGet,
            Call::DevicePrimaryCtxRetain,
            Call::DevicePrimaryCtxRelease,
            Call::CtxGetCurrent,
            Call::CtxSetCurrent,
            Call::ModuleLoadData,
            Call::ModuleGetFunction,
            Call::ModuleUnload,
        ],
    ),
    (
        "a program's own work, its captures and graphs",
        &[
            Call::MemcpyDtoD,
            Call::MemcpyPeer,
            Call::MemcpyHtoDAsync,
            Call::MemcpyDtoHAsync,
            Call::MemcpyPeerAsync,
            Call::StreamQuery,
            Call::StreamGetCtx,
            Call::StreamBeginCapture,
            Call::StreamEndCapture,
            Call::GraphInstantiate,
            Call::GraphLaunch,
            Call::GraphDestroy,
            Call::GraphExecDestroy,
        ],
    ),
    (
        "asked by the conformance suite, the doctor and tests",
        &[
            Call::MemRetainAllocationHandle,
            Call::MemGetAllocationProperties,
            Call::MemGetAccess,
            Call::MemGetAddressRange,
            Call::PointerGetAttributes,
            Call::IpcGetMemHandle,
        ],
    ),
    (
        "what the pool is there in place of: comparisons make them",
        &[
            Call::MemAlloc,
            Call::MemFree,
            Call::MemAllocAsync,
            Call::MemFreeAsync,
            Call::DeviceGetDefaultMemPool,
            Call::MemPoolSetAttribute,
        ],
    ),
    (
        "the simulated device shares no events between processes (row D-X7)",
        &[Call::IpcGetEventHandle, Call::IpcOpenEventHandle],
    ),
];

fn files(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        found.push(path.to_owned());
        return;
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Tests within a room.
        if path.is_dir() && name != "hostile" && name != "tests" {
            files(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// The last word of a type's path in the head of an `impl`.
fn type_of(head: &str) -> Option<String> {
    let head = head.strip_prefix("impl")?;
    // Past the parameters of the `impl` itself.
    let head = match head.strip_prefix('<') {
        Some(rest) => {
            let mut depth = 1;
            let end = rest.char_indices().find(|(_, letter)| {
                depth += i32::from(*letter == '<') - i32::from(*letter == '>');
                depth == 0
            });
            &rest[end?.0 + 1..]
        }
        None => head,
    };
    let name = head.split(" for ").last()?.trim_start();
    Some(name.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect())
}

/// The name of a public function that this line begins, but for settings of a builder.
fn function(line: &str) -> Option<&str> {
    let mut rest = line.strip_prefix("pub ")?;
    for word in ["unsafe ", "const "] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    let rest = rest.strip_prefix("fn ")?;
    let name = rest.split(['(', '<']).next()?;
    (!rest.contains("(mut self")).then_some(name)
}

/// The public operations of a source: those of a type as `Type::name`.
fn operations(source: &str, found: &mut BTreeSet<String>) {
    let mut owner = None;
    // A room's tests are at its end, if they are in the same file.
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source);
    for line in source.lines() {
        if line.starts_with("impl") {
            owner = type_of(line);
        } else if let Some(name) = function(line) {
            found.insert(name.to_owned());
        } else if let (Some(owner), Some(line)) = (&owner, line.strip_prefix("    "))
            && let Some(name) = function(line)
        {
            found.insert(format!("{owner}::{name}"));
        }
    }
}

/// The functions of a source that C sees.
fn c_functions(source: &str, found: &mut BTreeSet<String>) {
    let heads = ["pub extern \"C\" fn ", "pub unsafe extern \"C\" fn "];
    for line in source.lines() {
        let rest = heads.iter().find_map(|head| line.strip_prefix(head));
        found.extend(rest.and_then(|rest| rest.split('(').next()).map(str::to_owned));
    }
}

/// Reads the sources below these folders.
fn read(sources: &[&str], of: fn(&str, &mut BTreeSet<String>)) -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut paths, mut all) = (Vec::new(), BTreeSet::new());
    sources.iter().for_each(|source| files(&root.join(source), &mut paths));
    paths.iter().for_each(|path| of(&fs::read_to_string(path).unwrap(), &mut all));
    all
}

/// Every operation has a case or a reason, and no reason is for what is not there.
pub(crate) fn check_operations(cases: &[Case]) {
    let mut all = read(&SOURCES, operations);
    assert!(all.len() > 200, "the sources are read: {}", all.len());
    let c_functions = read(&C_SOURCES, c_functions);
    assert!(c_functions.len() > 40, "the C functions are read: {}", c_functions.len());
    all.extend(c_functions);
    let covered: BTreeSet<&str> = cases.iter().flat_map(|case| case.covers).copied().collect();
    let reasons: Vec<&str> = WITHOUT_CASE.iter().flat_map(|(_, names)| *names).copied().collect();
    let matches = |name: &str, reason: &str| match reason.ends_with("::") {
        true => name.starts_with(reason),
        false => name == reason,
    };
    let has_reason = |name: &str| reasons.iter().any(|reason| matches(name, reason));
    let without: Vec<_> =
        all.iter().filter(|name| !covered.contains(name.as_str()) && !has_reason(name)).collect();
    assert!(without.is_empty(), "without a case and a reason (tests/tests/faults): {without:?}");
    let idle: Vec<_> =
        reasons.iter().filter(|reason| !all.iter().any(|name| matches(name, reason))).collect();
    assert!(idle.is_empty(), "reasons for what is not there: {idle:?}");
    let is_there = |name: &str| all.contains(name) || name.ends_with("::drop");
    let strange: Vec<_> = covered.iter().filter(|name| !is_there(name)).collect();
    assert!(strange.is_empty(), "cases for what is not there: {strange:?}");
}

/// Every driver call was spoilt in some case, or has a reason not to be.
pub(crate) fn check_calls(hit: &BTreeSet<Call>) {
    let reasons: BTreeSet<Call> =
        NOT_REACHED.iter().flat_map(|(_, calls)| *calls).copied().collect();
    let missed: BTreeSet<Call> = Call::ALL.iter().copied().filter(|it| !hit.contains(it)).collect();
    for (why, calls) in NOT_REACHED {
        println!("  not reached, {why}: {calls:?}");
    }
    assert_eq!(missed, reasons, "calls that no case reaches, and those that are said not to be");
}

#[test]
fn names_are_read_as_they_are_written() {
    let source = "impl<'a, T: Fn(u8)> Some for Thing<'a> {\n    pub fn one(&self) {}\n    pub fn \
                  set(mut self) -> Self {}\n    pub(crate) fn two() {}\n}\npub unsafe fn three<T>() \
                  {}\n#[cfg(test)]\nmod tests {\n    pub fn four() {}\n";
    let mut found = BTreeSet::new();
    operations(source, &mut found);
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["Thing::one", "three"]);
}
