//! The calls of the real driver without a GPU: this program and the GPU suite as child processes with
//! the stand-in `libcuda` on their library path, whole or with symbols taken out of it. Ids F-… are
//! those of the reports that the tests come from.

#![expect(clippy::unwrap_used, reason = "a failure ends the test")]

use std::any::Any;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vmm_pool::{ChunkSize, Pool};
use vmm_standin_directory::{library, library_directory};
use vmm_sys::cuda::{Cuda, LoadError};
use vmm_sys::object::Stream;
use vmm_sys::{Call, DeviceId, Driver};

const ROLE: &str = "VMM_LIBCUDA_TEST_ROLE";
const LOG: &str = "VMM_STANDIN_LOG";
const MIB: u64 = 1 << 20;

/// Runs a role of this program on a search path for libraries, and gives what it prints.
fn child(role: &str, search_path: &std::ffi::OsStr, more: &[(&str, &Path)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role", "--exact", "--nocapture"]).env(ROLE, role);
    command.env("LD_LIBRARY_PATH", search_path).envs(more.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{role}: {}\n{text}\n{errors}", output.status);
    text
}

/// What the child processes run; does nothing in the first.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // As a program that is built with `panic = "abort"`, and stricter: a panic that somebody would
    // catch ends the process too.
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        told(panic);
        std::process::abort();
    }));
    match role.as_str() {
        "orders" => every_order(),
        "lacking" => full_use(),
        "nothing" => println!("{:?}", Cuda::open().unwrap_err()),
        other => panic!("no such role: {other}"),
    }
}

/// Stories that look at contexts, orders of calls and the driver's own answers.
#[test]
fn f_d3_the_stories_hold_on_the_calls_of_the_real_driver() {
    let directory = library_directory().unwrap();
    let mut suite = Command::new(env!("CARGO_BIN_EXE_gpu_suite"));
    suite.args(["--driver", "cuda", "f_"]).env("LD_LIBRARY_PATH", directory.search_path());
    let output = suite.env("VMM_STANDIN_DEVICES", "9").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for story in
        ["f_d3_no_operation_changes", "f_k2_the_pieces", "f_x14_many_peers", "f_c5_no_memory"]
    {
        assert!(text.contains(&format!("ok    {story}")), "{story} was not told: {text}");
    }
}

/// Every order of four things.
fn orders() -> Vec<[usize; 4]> {
    let all = (0..256).map(|n| [n % 4, n / 4 % 4, n / 16 % 4, n / 64]);
    all.filter(|order| (0..4).all(|thing| order.contains(&thing))).collect()
}

/// Both devices' handles, a pool over both, and a block, dropped in each order; each round opens the
/// driver anew and ends with it.
fn every_order() {
    let log = PathBuf::from(std::env::var_os(LOG).unwrap());
    let mut read = 0;
    for order in orders() {
        let driver: Arc<dyn Driver> = Cuda::open().unwrap();
        let pool = Pool::builder(driver.clone()).device(DeviceId(0)).device(DeviceId(1));
        let pool = pool.background(false).build().unwrap();
        let streams = [0, 1].map(|device| Stream::create(&driver, DeviceId(device)).unwrap());
        let block = pool.lane(&streams[0]).unwrap().alloc(3 * MIB).unwrap();
        block.write(5, b"bytes").unwrap();
        drop(driver);
        let [zero, one] = streams;
        let things: [Box<dyn Any>; 4] =
            [Box::new(zero), Box::new(one), Box::new(pool), Box::new(block)];
        let mut things = things.map(Some);
        order.into_iter().for_each(|thing| drop(things[thing].take()));
        let text = fs::read_to_string(&log).unwrap();
        let calls: Vec<&str> =
            text[read..].lines().filter_map(|line| line.split(' ').next()).collect();
        read = text.len();
        let count = |name: &str| calls.iter().filter(|call| **call == name).count();
        let (made, given) = ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2");
        assert_eq!((count(made), count(given)), (2, 2), "{order:?}: once a device");
        let first = calls.iter().position(|call| *call == given).unwrap();
        assert!(calls[first..].iter().all(|call| *call == given), "{order:?}: contexts go last");
        for (taken, back) in [
            ("cuMemCreate", "cuMemRelease"),
            ("cuMemMap", "cuMemUnmap"),
            ("cuMemAddressReserve", "cuMemAddressFree"),
            ("cuStreamCreate", "cuStreamDestroy_v2"),
            ("cuEventCreate", "cuEventDestroy_v2"),
        ] {
            assert_eq!(count(taken), count(back), "{order:?}: {taken}");
        }
    }
    println!("24 orders");
}

#[test]
fn f_e1_the_context_is_released_last_and_once_in_every_order() {
    let directory = library_directory().unwrap();
    let log = directory.path().join("log");
    let text = child("orders", &directory.search_path(), &[(LOG, &log)]);
    assert!(text.contains("24 orders"), "{text}");
}

/// The stand-in without some of its functions: in its table of names they are called otherwise. `dT`
/// has the loader's hash of `cu`, so the library's own references still find them.
fn without(symbols: &[&str]) -> (PathBuf, std::ffi::OsString) {
    static MADE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let mut bytes = fs::read(library().unwrap()).unwrap();
    for symbol in symbols {
        let name = format!("\0{symbol}\0");
        let at = bytes.windows(name.len()).position(|window| window == name.as_bytes());
        let at = at.unwrap_or_else(|| panic!("the stand-in has no {symbol}"));
        bytes[at + 1..at + 3].copy_from_slice(b"dT");
    }
    let number = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("vmm-lacking-{}-{number}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("libcuda.so.1"), bytes).unwrap();
    (directory.clone(), directory.into_os_string())
}

/// A pool in full use on whatever library is found; prints what that lacks.
fn full_use() {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) => return println!("{error:?}"),
    };
    let missing: Vec<&str> = cuda.missing_calls().into_iter().map(Call::name).collect();
    let driver: Arc<dyn Driver> = cuda;
    let builder = Pool::builder(driver.clone()).background(false).limit_bytes(64 * MIB);
    let pool = match builder.chunk(ChunkSize::Fixed(2 * MIB)).build() {
        Ok(pool) => pool,
        Err(error) => return println!("{error:?}"),
    };
    let streams = [(); 2].map(|()| Stream::create(&driver, DeviceId(0)).unwrap());
    let lane = pool.lane(&streams[0]).unwrap();
    for _ in 0..3 {
        let mut crossed = lane.alloc(3 * MIB).unwrap();
        crossed.write(5, b"bytes").unwrap();
        crossed.record_stream(&streams[1]).unwrap();
        drop(crossed);
        drop(lane.alloc(64 * MIB).unwrap());
        pool.trim(DeviceId(0)).unwrap();
    }
    let elastic = pool.elastic(DeviceId(0)).capacity_bytes(16 * MIB).build().unwrap();
    elastic.grow_to(8 * MIB).unwrap();
    elastic.write(7 * MIB, b"bytes").unwrap();
    elastic.shrink_to(2 * MIB).unwrap();
    pool.verify().unwrap();
    drop((elastic, lane, streams, pool, driver));
    println!("works without {missing:?}");
}

/// Multicast, fabric and the newer contexts the stand-in never has; here go more.
#[test]
fn f_h3_a_library_that_lacks_later_symbols_serves_a_pool() {
    let features: &[&[&str]] = &[
        &[],
        &["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"],
        &["cuMemGetHandleForAddressRange"],
        &["cuIpcGetEventHandle", "cuIpcOpenEventHandle"],
        &["cuMemGetAddressRange_v2", "cuPointerGetAttributes"],
        &["cuStreamWaitValue32_v2"],
        &["cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute"],
        &["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphLaunch"],
        &["cuModuleLoadData", "cuLaunchKernel", "cuLaunchHostFunc"],
    ];
    let all = features.concat();
    for symbols in features.iter().copied().chain([&all[..]]) {
        let (directory, path) = without(symbols);
        let text = child("lacking", &path, &[]);
        assert!(text.contains("works without ["), "{symbols:?}: {text}");
        for symbol in symbols {
            let name = symbol.split("_v").next().unwrap();
            assert!(text.contains(&format!("\"{name}\"")), "{symbol}: {text}");
        }
        fs::remove_dir_all(directory).unwrap();
    }
}

#[test]
fn f_h3_what_nothing_works_without_is_a_typed_reason() {
    for (symbol, words) in [
        ("cuMemCreate", "MissingSymbol { call: MemCreate"),
        ("cuMemSetAccess", "MissingSymbol { call: MemSetAccess"),
        ("cuInit", "MissingSymbol { call: Init"),
        // Found when the pool is built: streams could not be told apart.
        ("cuStreamGetId", "step: StreamGetId"),
    ] {
        let (directory, path) = without(&[symbol]);
        let text = child("lacking", &path, &[]);
        assert!(text.contains(words), "{symbol}: {text}");
        fs::remove_dir_all(directory).unwrap();
    }
    let library = library_directory().unwrap();
    let none = Path::new("0");
    let devices = [("VMM_STANDIN_DEVICES", none)];
    let text = child("nothing", &library.search_path(), &devices);
    assert!(text.contains("NoDevice"), "{text}");
    let missing = Cuda::open_from("/nowhere/libcuda.so").unwrap_err();
    assert!(matches!(missing, LoadError::NoLibrary { .. }), "{missing}");
}
