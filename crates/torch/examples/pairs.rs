//! Warm pairs through the C functions of a built library, as a program that loads it pays for them.
//!
//! ```text
//! pairs LIBRARY [hot|replace|general] [BYTES] [PAIRS]
//! ```
//!
//! `general` does what `hot` does by `vmm_pool_alloc` and `vmm_pool_free`, the others by PyTorch's
//! functions.
//!
//! `rust` in place of the library is the same pool called from Rust in this program: the difference is what
//! the C functions cost.
//!
//! Under callgrind, `--toggle-collect='countme*'` counts the pairs alone; `nothing` in place of the
//! library measures the loop itself. Set VMM_POOL_DRIVER=sim where there is no GPU.

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::time::Instant;

use libloading::Library;
use vmm_pool::{Lane, Pool, free_raw_on};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, StreamHandle};

type Take = unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Give = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);

type PoolOf = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;
type PoolTake = unsafe extern "C" fn(*mut c_void, i32, u64, *mut c_void, *mut *mut c_void) -> i32;
type PoolGive = unsafe extern "C" fn(*mut c_void, u64, *mut c_void) -> i32;

/// Blocks that live meanwhile, a power of two.
const LIVE: usize = 1024;

unsafe extern "C" fn take_nothing(_: isize, _: c_int, stream: *mut c_void) -> *mut c_void {
    stream.wrapping_byte_add(512)
}

unsafe extern "C" fn give_nothing(block: *mut c_void, _: isize, _: c_int, _: *mut c_void) {
    black_box(block);
}

thread_local! {
    /// The lane that `rust` takes from.
    static LANE: std::cell::OnceCell<Lane> = const { std::cell::OnceCell::new() };
}

unsafe extern "C" fn take_rust(bytes: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    let address = LANE.with(|lane| lane.get().and_then(|lane| lane.alloc_raw(bytes as u64).ok()));
    std::ptr::without_provenance_mut(address.unwrap_or(0) as usize)
}

unsafe extern "C" fn give_rust(block: *mut c_void, bytes: isize, _: c_int, _: *mut c_void) {
    let freed = free_raw_on(block.addr() as u64, bytes as u64, StreamHandle::LEGACY);
    assert!(freed.is_ok(), "{freed:?}");
}

/// A lane of a pool with the same settings, on the same stream.
fn open_rust() -> Result<(), Box<dyn std::error::Error>> {
    let pool: Pool = vmm_pool_torch::pool(DeviceId(0))?;
    let lane = pool.lane(&Stream::legacy(pool.driver(), DeviceId(0))?)?;
    LANE.with(|kept| kept.set(lane)).map_err(|_| "opened twice")?;
    Ok(())
}

#[inline(never)]
fn countme_hot(take: Take, give: Give, bytes: isize, pairs: u64) {
    for _ in 0..pairs {
        // SAFETY: the legacy stream, and no work that uses the block.
        unsafe { give(take(bytes, 0, std::ptr::null_mut()), bytes, 0, std::ptr::null_mut()) };
    }
}

#[inline(never)]
fn countme_replace(take: Take, give: Give, bytes: isize, pairs: u64, live: &mut [*mut c_void]) {
    let mut random = 20_261_129_u64;
    for _ in 0..pairs {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let slot = &mut live[(random as usize) & (LIVE - 1)];
        // SAFETY: as above.
        unsafe {
            give(*slot, bytes, 0, std::ptr::null_mut());
            *slot = take(bytes, 0, std::ptr::null_mut());
        }
    }
}

#[inline(never)]
fn countme_general(pool: *mut c_void, take: PoolTake, give: PoolGive, bytes: u64, pairs: u64) {
    let (mut block, legacy) = (std::ptr::null_mut(), std::ptr::null_mut());
    for _ in 0..pairs {
        // SAFETY: the legacy stream, a live place for the answer, and no work that uses the block.
        let answers =
            unsafe { (take(pool, 0, bytes, legacy, &raw mut block), give(block, bytes, legacy)) };
        assert_eq!(answers, (0, 0));
    }
}

/// The general functions, in the process's own pool of device 0.
fn general(library: &Library, bytes: u64, pairs: u64) -> Result<(), libloading::Error> {
    // SAFETY: the types are those of include/vmm_pool.h.
    let (pool_of, take, give): (PoolOf, PoolTake, PoolGive) = unsafe {
        let pool_of = *library.get(b"vmm_pool_default")?;
        (pool_of, *library.get(b"vmm_pool_alloc")?, *library.get(b"vmm_pool_free")?)
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: a live place for the answer.
    assert_eq!(unsafe { pool_of(0, &raw mut pool) }, 0);
    // The first call of the thread is a look-up: one in many.
    countme_general(pool, take, give, bytes, pairs);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |nth: usize, otherwise: &str| -> String {
        arguments.get(nth).map_or(otherwise, String::as_str).to_owned()
    };
    let path = argument(0, "nothing");
    let case = argument(1, "hot");
    let bytes: isize = argument(2, "65536").parse()?;
    let pairs: u64 = argument(3, "1000000").parse()?;
    let library = match path.as_str() {
        "nothing" => None,
        "rust" => {
            open_rust()?;
            None
        }
        // SAFETY: its initialisers install hooks only.
        path => Some(unsafe { Library::new(path)? }),
    };
    let (take, give): (Take, Give) = match &library {
        None if path == "rust" => (take_rust, give_rust),
        None => (take_nothing, give_nothing),
        // SAFETY: the types are those of include/vmm_pool_torch.h.
        Some(library) => unsafe {
            (*library.get(b"vmm_pool_torch_alloc")?, *library.get(b"vmm_pool_torch_free")?)
        },
    };
    // SAFETY: the legacy stream.
    let mut live: Vec<_> =
        (0..LIVE).map(|_| unsafe { take(bytes, 0, std::ptr::null_mut()) }).collect();
    // Pairs that fail would be measured like any others.
    if path != "nothing" && live.iter().any(|block| block.is_null()) {
        return Err("no memory: is there a GPU? VMM_POOL_DRIVER=sim simulates one".into());
    }
    // A thread's first call is a look-up.
    for _ in 0..100 {
        // SAFETY: the legacy stream.
        unsafe { give(take(bytes, 0, std::ptr::null_mut()), bytes, 0, std::ptr::null_mut()) };
    }
    let start = Instant::now();
    match case.as_str() {
        "hot" => countme_hot(take, give, bytes, pairs),
        "replace" => countme_replace(take, give, bytes, pairs, &mut live),
        "general" => {
            let library = library.as_ref().ok_or("general: expected a library")?;
            general(library, bytes as u64, pairs)?;
        }
        other => {
            return Err(format!("no case {other}: expected hot, replace or general").into());
        }
    }
    let ns = start.elapsed().as_secs_f64() * 1e9 / pairs as f64;
    println!("{path} {case} {bytes} bytes: {ns:.1} ns a pair");
    for block in live {
        // SAFETY: the legacy stream.
        unsafe { give(block, bytes, 0, std::ptr::null_mut()) };
    }
    Ok(())
}
