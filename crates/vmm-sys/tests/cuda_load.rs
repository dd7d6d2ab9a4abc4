//! What is missing is a value: library, symbol, device, a driver that starts.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod fake;

use fake::Fake;
use vmm_sys::cuda::{Cuda, LoadError};
use vmm_sys::{Call, DeviceId, Driver, DriverKind, ResultCode, StreamHandle};

fn refused(test: &str, flags: &[&str]) -> Option<LoadError> {
    let fake = Fake::build(test, flags)?;
    match Cuda::open_from(&fake.path) {
        Ok(cuda) => panic!("{cuda:?} opened"),
        Err(error) => {
            let file = fake.path.file_name().unwrap().to_str().unwrap();
            assert!(error.to_string().contains(file), "the file is not named: {error}");
            Some(error)
        }
    }
}

#[test]
fn opening_the_machines_own_driver_works_or_says_why_not() {
    match Cuda::open() {
        Ok(cuda) => {
            assert_eq!(cuda.kind(), DriverKind::Cuda);
            assert!(cuda.device_count().unwrap() > 0, "a driver without a device opened");
        }
        Err(LoadError::NoLibrary { tried, reasons }) => {
            assert_eq!(tried, ["libcuda.so.1", "libcuda.so"]);
            assert!(reasons.iter().all(|why| !why.is_empty()), "{reasons:?}");
        }
        // A machine may well have a library and no GPU.
        Err(
            LoadError::NoDevice { .. } | LoadError::Init { .. } | LoadError::StubLibrary { .. },
        ) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_path_without_a_library() {
    let error = Cuda::open_from("/nowhere/libcuda.so").unwrap_err();
    assert!(matches!(&error, LoadError::NoLibrary { tried, .. } if tried.len() == 1), "{error}");
}

#[test]
fn a_required_symbol_is_missing() {
    let Some(error) = refused("no_create", &["-DcuMemCreate=lacking"]) else { return };
    let LoadError::MissingSymbol { call, symbol, .. } = error else { panic!("{error}") };
    assert_eq!((call, symbol), (Call::MemCreate, "cuMemCreate"));
}

#[test]
fn a_stub_says_so_at_its_first_answer() {
    for (test, flag) in [("stub_init", "-DFAKE_INIT=34"), ("stub", "-DFAKE_VERSION_CODE=34")] {
        let Some(error) = refused(test, &[flag]) else { return };
        assert!(matches!(error, LoadError::StubLibrary { .. }), "{error}");
    }
}

#[test]
fn a_stub_is_known_by_its_folder_before_it_is_asked() {
    let Some(fake) = Fake::build("in_stubs", &[]) else { return };
    let folder = fake.path.with_extension("d").join("stubs");
    std::fs::create_dir_all(&folder).unwrap();
    let copy = folder.join("libcuda.so");
    std::fs::copy(&fake.path, &copy).unwrap();
    let error = Cuda::open_from(&copy).unwrap_err();
    assert!(matches!(&error, LoadError::StubLibrary { library } if library.contains("/stubs/")));
    std::fs::remove_dir_all(fake.path.with_extension("d")).unwrap();
}

#[test]
fn a_driver_before_the_vmm_calls_is_called_old_and_not_incomplete() {
    let flags = ["-DFAKE_VERSION=10010", "-DcuMemCreate=lacking"];
    let Some(error) = refused("old", &flags) else { return };
    let LoadError::TooOld { version, oldest, .. } = error else { panic!("{error}") };
    assert_eq!((version, oldest), (10_010, 10_020));
}

#[test]
fn no_device_in_both_of_its_forms() {
    for (test, flag) in [("no_device", "-DFAKE_INIT=100"), ("zero_devices", "-DFAKE_DEVICES=0")] {
        let Some(error) = refused(test, &[flag]) else { return };
        assert!(matches!(error, LoadError::NoDevice { .. }), "{error}");
    }
}

#[test]
fn a_code_that_nobody_knows_keeps_its_number() {
    let Some(error) = refused("init_4711", &["-DFAKE_INIT=4711"]) else { return };
    assert!(error.to_string().contains("4711"), "{error}");
    let LoadError::Init { source, .. } = error else { panic!("{error}") };
    assert_eq!((source.call(), source.code()), (Call::Init, ResultCode(4711)));

    let Some((fake, cuda)) = Fake::open("later_4711", &[]) else { return };
    fake.fail("cuMemGetInfo_v2", 4711);
    let error = cuda.mem_info(DeviceId(0)).unwrap_err();
    assert_eq!((error.call(), error.code()), (Call::MemGetInfo, ResultCode(4711)));
    assert_eq!(error.device(), Some(DeviceId(0)));
}

#[test]
fn a_missing_newer_symbol_costs_only_its_feature() {
    let flags = ["-DcuStreamGetId=lacking", "-DcuDeviceGetUuid_v2=cuDeviceGetUuid"];
    let Some((fake, cuda)) = Fake::open("no_stream_id", &flags) else { return };
    assert_eq!(cuda.missing_calls(), [Call::StreamGetId]);
    // SAFETY: the per-thread stream is always there.
    let error = unsafe { cuda.stream_id(DeviceId(0), StreamHandle::PER_THREAD) }.unwrap_err();
    assert_eq!((error.call(), error.code()), (Call::StreamGetId, ResultCode::NOT_FOUND));
    assert!(error.to_string().contains("this driver lacks cuStreamGetId"), "{error}");
    assert_eq!(fake.log(), Vec::<String>::new(), "the library was not called");
    // The older name of a call serves as well.
    assert_eq!(cuda.device_uuid(DeviceId(0)).unwrap().0[0], 0xf0);
    assert!(cuda.mem_info(DeviceId(0)).is_ok(), "all else works");
}
