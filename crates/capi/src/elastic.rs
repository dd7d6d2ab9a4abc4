//! Elastic buffers and their uses.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_pool::{Contents, ElasticBuffer, Move, Place, Use};
use vmm_sys::Access;

use crate::border::{device_id, not_forked, status};
use crate::failure::Failure;
use crate::handle::{self, Kind, VmmElastic, VmmPool, VmmUse};
use crate::lanes::{self, Key};
use crate::pointers::{put, required, text};
use crate::structs::{
    Answer, VMM_ELASTIC_EXPORTABLE, VMM_ELASTIC_MOVABLE, VMM_ELASTIC_SINGLE_PIECE,
    VmmElasticOptions, VmmElasticState, check_flags, read,
};
use crate::{patience, pools};

/// vmm_elastic_migrate: the memory of a device; the index is its ordinal.
pub const VMM_PLACE_DEVICE: i32 = 0;
/// vmm_elastic_migrate: the memory of a NUMA node of the host; the index is its number.
pub const VMM_PLACE_HOST_NODE: i32 = 1;

/// vmm_elastic_grant: no access. The values are those of CUDA.
pub const VMM_ACCESS_NONE: i32 = 0;
/// vmm_elastic_grant: the device may read.
pub const VMM_ACCESS_READ: i32 = 1;
/// vmm_elastic_grant: the device may read and write.
pub const VMM_ACCESS_READ_WRITE: i32 = 3;

/// What the handles of one kind stand for, with the number of the pool.
struct Table<T> {
    last: u32,
    live: BTreeMap<u32, (T, u32)>,
}

static BUFFERS: Mutex<Table<Arc<ElasticBuffer>>> =
    Mutex::new(Table { last: 0, live: BTreeMap::new() });
static USES: Mutex<Table<Use>> = Mutex::new(Table { last: 0, live: BTreeMap::new() });

/// Enters something of a pool, which is kept from ending by it.
fn enter<T, K: Kind>(table: &Mutex<Table<T>>, value: T, pool: u32) -> Result<*mut K, Failure> {
    pools::add_user(pool)?;
    let mut table = table.lock();
    match handle::next(&mut table.last) {
        Ok(number) => {
            table.live.insert(number, (value, pool));
            Ok(handle::handle(number))
        }
        Err(failure) => {
            drop(table);
            pools::end_user(pool);
            Err(failure)
        }
    }
}

/// Takes something out, and drops it without the table's lock.
fn end<T, K: Kind>(table: &Mutex<Table<T>>, handle: *const K) -> Result<(), Failure> {
    not_forked()?;
    let number = handle::checked(handle)?;
    let removed = table.lock().live.remove(&number);
    let (value, pool) = removed.ok_or_else(|| handle::unknown(handle))?;
    drop(value);
    pools::end_user(pool);
    Ok(())
}

fn buffer(elastic: *const VmmElastic) -> Result<(Arc<ElasticBuffer>, u32), Failure> {
    not_forked()?;
    let number = handle::checked(elastic)?;
    let known = BUFFERS.lock().live.get(&number).cloned();
    known.ok_or_else(|| handle::unknown(elastic))
}

/// Reserves addresses for an elastic buffer. Nothing is committed. *out is NULL on failure.
///
/// # Safety
/// options has as many readable bytes as it says, its tag ends with a 0 within 256 bytes; out is
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_reserve(
    pool: *mut VmmPool,
    options: *const VmmElasticOptions,
    out: *mut *mut VmmElastic,
) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        let (number, pool) = pools::by_handle(pool)?;
        // SAFETY: the caller vouches for the options.
        let options = unsafe { read(options)? };
        let known = VMM_ELASTIC_MOVABLE | VMM_ELASTIC_EXPORTABLE | VMM_ELASTIC_SINGLE_PIECE;
        check_flags(options.flags, known, options.reserved)?;
        let has = |flag| options.flags & flag != 0;
        let mut builder =
            pool.elastic(device_id(options.device)?).movable(has(VMM_ELASTIC_MOVABLE));
        if has(VMM_ELASTIC_EXPORTABLE) {
            builder = builder.exportable(true);
        }
        if has(VMM_ELASTIC_SINGLE_PIECE) {
            builder = builder.single_piece();
        }
        if options.capacity_bytes > 0 {
            builder = builder.capacity_bytes(options.capacity_bytes);
        }
        if options.chunk_bytes > 0 {
            builder = builder.chunk_bytes(options.chunk_bytes);
        }
        if options.quota_bytes > 0 {
            builder = builder.quota_bytes(options.quota_bytes);
        }
        // SAFETY: the caller vouches for the tag.
        if let Some(tag) = unsafe { text(options.tag, "tag")? } {
            builder = builder.tag(&tag);
        }
        let elastic = enter(&BUFFERS, Arc::new(builder.build()?), number)?;
        // SAFETY: as above.
        unsafe { put(out, elastic) };
        Ok(())
    })
}

/// Gives an elastic buffer back. Its memory goes once the work of its uses is done; nobody waits. A call
/// of another thread that is under way ends first.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_elastic_release(elastic: *mut VmmElastic) -> i32 {
    status(|| end(&BUFFERS, elastic))
}

/// Commits what is missing below bytes, in whole chunks; all or nothing. What the memory holds is
/// undefined. *committed_bytes, unless that is NULL, becomes the bytes committed anew.
///
/// # Safety
/// committed_bytes is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_grow(
    elastic: *mut VmmElastic,
    bytes: u64,
    committed_bytes: *mut u64,
) -> i32 {
    status(|| {
        let committed = buffer(elastic)?.0.grow_to(bytes)?;
        // SAFETY: the caller's own condition.
        unsafe { put(committed_bytes, committed) };
        Ok(())
    })
}

/// Takes the memory beyond bytes away, in whole chunks; it goes once the work of its uses is done, and
/// nobody waits. *freed_bytes, unless that is NULL, becomes the bytes taken away.
///
/// # Safety
/// freed_bytes is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_shrink(
    elastic: *mut VmmElastic,
    bytes: u64,
    freed_bytes: *mut u64,
) -> i32 {
    status(|| {
        let freed = buffer(elastic)?.0.shrink_to(bytes)?;
        // SAFETY: the caller's own condition.
        unsafe { put(freed_bytes, freed) };
        Ok(())
    })
}

/// Moves all of the memory to another place, contents and all, at the same addresses. place_kind is
/// VMM_PLACE_DEVICE or VMM_PLACE_HOST_NODE; a device becomes its home. Uses that are open are waited for,
/// patience_us microseconds at most. *moved_bytes, unless that is NULL, becomes the bytes moved.
///
/// # Safety
/// moved_bytes is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_migrate(
    elastic: *mut VmmElastic,
    place_kind: i32,
    place_index: u32,
    patience_us: u64,
    moved_bytes: *mut u64,
) -> i32 {
    status(|| {
        let place = match place_kind {
            VMM_PLACE_DEVICE => Place::Device(vmm_sys::DeviceId(place_index)),
            VMM_PLACE_HOST_NODE => Place::HostNuma(place_index),
            _ => {
                let expected = "VMM_PLACE_DEVICE (0) or VMM_PLACE_HOST_NODE (1)";
                return Err(Failure::argument("place_kind", place_kind, expected));
            }
        };
        let to = Move::to(place).patience(patience(patience_us));
        let moved = buffer(elastic)?.0.migrate(to)?;
        // SAFETY: the caller's own condition.
        unsafe { put(moved_bytes, moved.bytes) };
        Ok(())
    })
}

/// Lets another device of the pool use the buffer, memory that is committed later included. access is
/// VMM_ACCESS_NONE, VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_elastic_grant(elastic: *mut VmmElastic, device: i32, access: i32) -> i32 {
    status(|| {
        let access = match access {
            VMM_ACCESS_NONE => Access::None,
            VMM_ACCESS_READ => Access::Read,
            VMM_ACCESS_READ_WRITE => Access::ReadWrite,
            _ => {
                let expected = "VMM_ACCESS_NONE (0), _READ (1) or _READ_WRITE (3)";
                return Err(Failure::argument("access", access, expected));
            }
        };
        Ok(buffer(elastic)?.0.grant(device_id(device)?, access)?)
    })
}

/// Takes a device's access away: the same as VMM_ACCESS_NONE. Work of that device that still uses the
/// buffer faults, so wait for it first.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_elastic_revoke(elastic: *mut VmmElastic, device: i32) -> i32 {
    status(|| Ok(buffer(elastic)?.0.revoke(device_id(device)?)?))
}

/// What is known of the buffer now.
///
/// # Safety
/// out has as many writable bytes as its first field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_info(
    elastic: *mut VmmElastic,
    out: *mut VmmElasticState,
) -> i32 {
    status(|| {
        // SAFETY: the caller's own condition.
        let answer = unsafe { Answer::to(out)? };
        let (buffer, _) = buffer(elastic)?;
        let stats = buffer.stats();
        let on_devices = stats.by_place.iter().filter(|(place, _)| place.device().is_some());
        let device_bytes = on_devices.map(|(_, bytes)| bytes).sum();
        answer.give(&VmmElasticState {
            struct_bytes: 0,
            device: stats.device.0 as i32,
            address: buffer.address(),
            capacity_bytes: buffer.capacity_bytes(),
            committed_bytes: stats.committed_bytes,
            chunk_bytes: stats.chunk_bytes,
            generation: stats.generation,
            open_uses: stats.open_uses,
            device_bytes,
            host_bytes: stats.committed_bytes - device_bytes,
            asleep: match stats.asleep {
                None => 0,
                Some(Contents::Dropped) => 2,
                Some(_) => 1,
            },
            reserved: 0,
        });
        Ok(())
    })
}

/// Says that work of stream, one of that device, is going to use the buffer. Call vmm_use_end once all
/// of that work is enqueued: the memory stays until it is done, however the buffer shrinks, moves or ends
/// meanwhile. *out is NULL on failure.
///
/// # Safety
/// stream is live until vmm_use_end at least, and vmm_pool_stream_destroyed is called before it is
/// destroyed; out is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmm_elastic_use_on(
    elastic: *mut VmmElastic,
    device: i32,
    stream: *mut c_void,
    out: *mut *mut VmmUse,
) -> i32 {
    status(|| {
        required(out, "out")?;
        // SAFETY: writable by this function's own condition, here and below.
        unsafe { put(out, std::ptr::null_mut()) };
        let (buffer, pool) = buffer(elastic)?;
        let handle = Key::new(device, stream.addr()).handle();
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { lanes::stream(device_id(device)?, handle)? };
        let begun = enter(&USES, buffer.use_on(&stream)?, pool)?;
        // SAFETY: as above.
        unsafe { put(out, begun) };
        Ok(())
    })
}

/// Says that all work of the use is enqueued. In any thread.
#[unsafe(no_mangle)]
pub extern "C" fn vmm_use_end(begun: *mut VmmUse) -> i32 {
    status(|| end(&USES, begun))
}
