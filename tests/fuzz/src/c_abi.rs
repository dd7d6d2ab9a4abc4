use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use vmm_pool_capi as c;
use vmm_sys::sim::Sim;

use crate::reader::Reader;

/// The status of a call that did what it was asked.
const OK: i32 = c::vmm_pool_status::VMM_POOL_OK as i32;

/// Calls of one input.
const CALLS_MAX: usize = 40;
/// The longest answer in words.
const TEXT_BYTES: usize = 64;

/// The machine of all inputs: the C functions choose their driver once.
fn machine() -> &'static Arc<Sim> {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let sim = Sim::builder().devices(2).device_bytes(256 << 20).build();
        c::use_driver(sim.clone()).expect("nobody has chosen one");
        sim
    })
}

/// What calls gave, and what they are given: mostly the same.
#[derive(Default)]
struct Known {
    pools: Vec<*mut c::VmmPool>,
    elastics: Vec<*mut c::VmmElastic>,
    uses: Vec<*mut c::VmmUse>,
    /// With what was asked for.
    blocks: Vec<(*mut c_void, u64)>,
}

/// One that a call gave, or any number: handles and addresses are looked up and never followed.
fn some<T>(reader: &mut Reader<'_>, known: &[*mut T]) -> *mut T {
    let choice = usize::from(reader.byte());
    match known.get(choice % (known.len() + 1)) {
        Some(one) if choice < 224 => *one,
        _ => reader.number() as usize as *mut T,
    }
}

fn some_block(reader: &mut Reader<'_>, known: &Known) -> *mut c_void {
    let blocks: Vec<_> = known.blocks.iter().map(|(block, _)| *block).collect();
    some(reader, &blocks)
}

fn text(reader: &mut Reader<'_>) -> Option<CString> {
    let length = usize::from(reader.byte());
    (length < 250).then(|| {
        let bytes: Vec<u8> = reader.take(length).iter().copied().filter(|it| *it != 0).collect();
        CString::new(bytes).unwrap_or_default()
    })
}

fn pointer(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(null(), |text| text.as_ptr())
}

/// Calls of the C functions with any numbers: a status each time, and nothing is lost. Pointers are as
/// the functions ask for them: NULL, or to what can be read or written.
///
/// # Panics
/// If it does not hold.
pub fn c_abi(bytes: &[u8]) -> bool {
    let sim = machine();
    let mut reader = Reader(bytes);
    let (mut known, mut done) = (Known::default(), 0);
    for _ in 0..CALLS_MAX {
        if reader.is_empty() {
            break;
        }
        let status = call(&mut reader, &mut known);
        done += u32::from(status == OK);
        if status != OK {
            // SAFETY: text of this thread, until its next failure.
            let words = unsafe { CStr::from_ptr(c::vmm_pool_last_error()) };
            assert!(!words.is_empty(), "a failure without words: {status}");
            assert_eq!(c::vmm_pool_last_status(), status);
        }
    }
    end(known);
    assert_eq!(
        sim.ledger_summary().chunks,
        0,
        "memory without an owner: {:?}",
        sim.ledger_summary()
    );
    done >= 3
}

fn call(reader: &mut Reader<'_>, known: &mut Known) -> i32 {
    let mut number = 0_u64;
    // Where answers go: often nowhere.
    let wanted = !reader.byte().is_multiple_of(4);
    let out: *mut u64 = if wanted { &mut number } else { null_mut() };
    let device = (reader.byte() % 4) as i32 - 1;
    match reader.byte() % 16 {
        0 | 1 => create_pool(reader, known),
        2 => c::vmm_pool_destroy(some(reader, &known.pools)),
        3 | 4 => {
            let (pool, bytes) = (some(reader, &known.pools), reader.number());
            let mut block = null_mut();
            let to: *mut *mut c_void = if wanted { &mut block } else { null_mut() };
            // SAFETY: the default stream; `to` is NULL or writable.
            let status = unsafe { c::vmm_pool_alloc(pool, device, bytes, null_mut(), to) };
            known.blocks.extend((!block.is_null()).then_some((block, bytes)));
            status
        }
        5 => {
            let block = some_block(reader, known);
            let asked = known.blocks.iter().find(|known| known.0 == block);
            let bytes = match (asked, reader.byte()) {
                (Some(known), 0..200) => known.1,
                _ => reader.number(),
            };
            // SAFETY: the default stream.
            unsafe { c::vmm_pool_free(block, bytes, null_mut()) }
        }
        6 => {
            let block = some_block(reader, known);
            // SAFETY: the default stream.
            unsafe { c::vmm_pool_record_stream(block, null_mut()) }
        }
        7 => block_info(some_block(reader, known), reader.number() as u32),
        // SAFETY: `out` is NULL or writable, here and below.
        8 => unsafe { c::vmm_pool_trim(some(reader, &known.pools), device, out) },
        9 => {
            let pool = some(reader, &known.pools);
            words(reader, pool, device, wanted)
        }
        10 => sleep_or_wake(reader, known, out),
        11 | 12 => reserve(reader, known),
        13 => elastic(reader, known, device, out),
        14 => begin_use(reader, known, device),
        _ => c::vmm_use_end(some(reader, &known.uses)),
    }
}

/// Room for a struct that says any length: as long as the longest that a function reads.
#[repr(C, align(16))]
struct Room([u8; 8192]);

fn create_pool(reader: &mut Reader<'_>, known: &mut Known) -> i32 {
    // Each has a thread, if it is not told otherwise.
    if known.pools.len() >= 4 {
        return OK;
    }
    let mut pool = null_mut();
    let devices = [(reader.byte() % 4) as i32 - 1, 1];
    let mut options = c::VmmPoolOptions {
        struct_bytes: size_of::<c::VmmPoolOptions>() as u32,
        flags: u32::from(reader.byte() % 24) & !c::VMM_POOL_USE_ENVIRONMENT,
        devices: devices.as_ptr(),
        device_count: u64::from(reader.byte() % 4).min(2),
        chunk_bytes: reader.number(),
        limit_bytes: reader.number(),
        stock_low_bytes: reader.number(),
        stock_high_bytes: reader.number(),
        host_bytes: reader.number(),
        host_node: u32::from(reader.byte()),
        reserved: u32::from(reader.byte() / 200),
    };
    if reader.byte().is_multiple_of(2) {
        // What a program asks for that sets nothing.
        options.chunk_bytes = 0;
        options.limit_bytes = 0;
        options.stock_low_bytes = 0;
        options.stock_high_bytes = 0;
        options.host_bytes = 64 << 20;
        options.host_node = 0;
        options.reserved = 0;
    }
    if reader.byte() > 250 {
        options.struct_bytes = reader.number() as u32;
    }
    let mut room = Room([0; 8192]);
    // SAFETY: a plain struct fits into the room, which is aligned for it.
    unsafe { room.0.as_mut_ptr().cast::<c::VmmPoolOptions>().write(options) };
    // SAFETY: the room is as long as any struct that is read; its devices are readable.
    let status = unsafe { c::vmm_pool_create(room.0.as_ptr().cast(), &mut pool) };
    known.pools.extend((!pool.is_null()).then_some(pool));
    status
}

fn block_info(block: *mut c_void, struct_bytes: u32) -> i32 {
    let mut room = Room([0; 8192]);
    // SAFETY: the first field, in a room that is aligned and as long as any struct that is written.
    unsafe {
        room.0.as_mut_ptr().cast::<u32>().write(struct_bytes);
        c::vmm_pool_block(block, room.0.as_mut_ptr().cast())
    }
}

fn words(reader: &mut Reader<'_>, pool: *mut c::VmmPool, device: i32, wanted: bool) -> i32 {
    let mut room = [1 as c_char; TEXT_BYTES];
    let capacity = usize::from(reader.byte()).min(TEXT_BYTES);
    let mut needed = 0_usize;
    let needed: *mut usize = if wanted { &mut needed } else { null_mut() };
    // SAFETY: as many bytes as the capacity says; `needed` is NULL or writable.
    unsafe {
        match reader.byte() % 2 {
            0 => c::vmm_pool_report(pool, device, room.as_mut_ptr(), capacity, needed),
            _ => c::vmm_pool_stats_json(pool, room.as_mut_ptr(), capacity, needed),
        }
    }
}

fn sleep_or_wake(reader: &mut Reader<'_>, known: &Known, out: *mut u64) -> i32 {
    let (pool, tag) = (some(reader, &known.pools), text(reader));
    let contents = i32::from(reader.byte() % 4) - 1;
    // SAFETY: `tag` is NULL or ends in 0; `out` is NULL or writable.
    unsafe {
        match reader.byte() % 2 {
            0 => c::vmm_pool_sleep(pool, pointer(&tag), contents, 0, out),
            _ => c::vmm_pool_wake(pool, pointer(&tag), out),
        }
    }
}

fn reserve(reader: &mut Reader<'_>, known: &mut Known) -> i32 {
    let pool = some(reader, &known.pools);
    let (tag, mut elastic) = (text(reader), null_mut());
    let mut options = c::VmmElasticOptions {
        struct_bytes: size_of::<c::VmmElasticOptions>() as u32,
        device: (reader.byte() % 4) as i32 - 1,
        capacity_bytes: reader.number(),
        chunk_bytes: if reader.byte().is_multiple_of(2) { 2 << 20 } else { reader.number() },
        tag: pointer(&tag),
        quota_bytes: reader.number(),
        flags: u32::from(reader.byte() % 16),
        reserved: u32::from(reader.byte() / 200),
    };
    if reader.byte() > 250 {
        options.struct_bytes = reader.number() as u32;
    }
    let mut room = Room([0; 8192]);
    // SAFETY: as for pools.
    unsafe { room.0.as_mut_ptr().cast::<c::VmmElasticOptions>().write(options) };
    // SAFETY: as for pools; the tag is NULL or ends in 0.
    let status = unsafe { c::vmm_elastic_reserve(pool, room.0.as_ptr().cast(), &mut elastic) };
    known.elastics.extend((!elastic.is_null()).then_some(elastic));
    status
}

fn elastic(reader: &mut Reader<'_>, known: &Known, device: i32, out: *mut u64) -> i32 {
    let elastic = some(reader, &known.elastics);
    // SAFETY: `out` is NULL or writable; the room is as long as any struct that is written.
    unsafe {
        match reader.byte() % 8 {
            0 | 1 => c::vmm_elastic_grow(elastic, reader.number(), out),
            2 => c::vmm_elastic_shrink(elastic, reader.number(), out),
            3 => {
                let (kind, index) =
                    (i32::from(reader.byte() % 4) - 1, u32::from(reader.byte() % 4));
                c::vmm_elastic_migrate(elastic, kind, index, 0, out)
            }
            4 => c::vmm_elastic_grant(elastic, device, i32::from(reader.byte() % 4) - 1),
            5 => c::vmm_elastic_revoke(elastic, device),
            6 => {
                let mut room = Room([0; 8192]);
                room.0.as_mut_ptr().cast::<u32>().write(reader.number() as u32);
                c::vmm_elastic_info(elastic, room.0.as_mut_ptr().cast())
            }
            _ => c::vmm_elastic_release(elastic),
        }
    }
}

fn begin_use(reader: &mut Reader<'_>, known: &mut Known, device: i32) -> i32 {
    let (elastic, mut begun) = (some(reader, &known.elastics), null_mut());
    // SAFETY: the default stream, and a place for the answer.
    let status = unsafe { c::vmm_elastic_use_on(elastic, device, null_mut(), &mut begun) };
    known.uses.extend((!begun.is_null()).then_some(begun));
    status
}

/// Gives back what is left; what was given back before is refused once more.
fn end(known: Known) {
    for begun in known.uses {
        c::vmm_use_end(begun);
    }
    for elastic in known.elastics {
        c::vmm_elastic_release(elastic);
    }
    for (block, bytes) in known.blocks {
        // SAFETY: the default stream.
        unsafe { c::vmm_pool_free(block, bytes, null_mut()) };
    }
    for pool in known.pools {
        c::vmm_pool_destroy(pool);
    }
}
