use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use vmm_pool::{Error, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{DeviceId, Driver};

/// Not those that name files.
const NAMES: [&str; 10] = [
    "VMM_POOL_CHUNK",
    "VMM_POOL_PLACEMENT",
    "VMM_POOL_SOFT_LIMIT",
    "VMM_POOL_LIMIT",
    "VMM_POOL_STOCK_LOW",
    "VMM_POOL_STOCK_HIGH",
    "VMM_POOL_BACKGROUND",
    "VMM_POOL_IDLE_LANE_MS",
    "VMM_POOL_SCRUB",
    "VMM_POOL_DEBUG",
];

/// Lines are the values of variables, in the order of `NAMES`: an error that names the variable, or a
/// pool that works.
///
/// # Panics
/// If it does not hold.
pub fn environment(bytes: &[u8]) -> bool {
    let values: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    let lookup = |name: &str| {
        let value = values.get(NAMES.iter().position(|known| *known == name)?)?;
        Some(OsString::from_vec(value.to_vec()))
    };
    let sim = Sim::builder().device_bytes(256 << 20).build();
    let driver: Arc<dyn Driver> = sim.clone();
    let built = Pool::builder(driver.clone()).variables(&lookup).and_then(|pool| pool.build());
    let is_built = built.is_ok();
    match built {
        Ok(pool) => {
            let stream = Stream::create(&driver, DeviceId(0)).expect("a stream");
            let lane = pool.lane(&stream).expect("a lane");
            match lane.alloc(1000) {
                Ok(buffer) => buffer.write(0, b"bytes").expect("written"),
                // A limit may be that low.
                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
            }
            pool.verify().expect("sound");
        }
        Err(Error::BadSetting { setting, expected, .. }) => {
            assert!(NAMES.contains(&setting) && !expected.is_empty(), "{setting}: {expected}");
        }
        // Stock that the device has no room for.
        Err(error) => assert!(error.is_out_of_memory(), "{error}"),
    }
    sim.check_clean().expect("nothing is left");
    is_built
}
