//! A pool finds out when it is built whether a device can serve it, not at the first allocation.

use std::sync::Arc;

use crate::common::{HOME, MIB, Rig};
use vmm_pool::{Error, Pool};
use vmm_sys::sim::{FaultPlan, Sim, SimBuilder};
use vmm_sys::{Call, DeviceAttribute, DeviceId, Driver, ResultCode};

fn build(builder: SimBuilder, plan: Option<FaultPlan>) -> Result<Pool, Error> {
    let sim = builder.build();
    if let Some(plan) = plan {
        sim.inject(plan);
    }
    let driver: Arc<dyn Driver> = sim.clone();
    let pool = Pool::builder(driver.clone()).background(false).build();
    sim.clear_faults();
    assert_eq!(vmm_sys::object::retry_failed_drops(&driver), 0);
    sim.check_clean().unwrap();
    pool
}

#[test]
fn f_h1_whatever_call_refuses_is_the_reason_and_nothing_is_left_behind() {
    let calls = [
        Call::MemGetAllocationGranularity,
        Call::MemAddressReserve,
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemUnmap,
    ];
    for call in calls {
        for code in [999, 800, 801, 1, 101].map(ResultCode) {
            let error = build(Sim::builder(), Some(FaultPlan::fail(code).on(call))).unwrap_err();
            let Error::Unsupported { device, step, cause } = &error else { panic!("{error}") };
            assert_eq!((*device, *step, cause.code()), (HOME, call, code));
            let text = error.to_string();
            assert!(text.contains("device 0 cannot serve a pool"), "{text}");
            assert!(text.contains(call.name()), "{text}");
            assert!(!error.is_out_of_memory());
        }
    }
}

#[test]
fn f_h1_a_device_that_denies_the_ability_is_believed() {
    let vmm = DeviceAttribute::VirtualMemoryManagementSupported;
    let error = build(Sim::builder().attribute(0, vmm, 0), None).unwrap_err();
    let Error::Unsupported { step, .. } = &error else { panic!("{error}") };
    assert_eq!(*step, Call::DeviceGetAttribute);
    assert!(error.to_string().contains("the device says that it cannot"), "{error}");
}

#[test]
fn an_attribute_that_the_driver_does_not_know_leaves_it_to_the_try() {
    let plan = FaultPlan::fail(ResultCode::INVALID_VALUE).on(Call::DeviceGetAttribute);
    build(Sim::builder(), Some(plan)).unwrap();
}

#[test]
fn only_devices_that_were_named_are_tried() {
    let vmm = DeviceAttribute::VirtualMemoryManagementSupported;
    let sim = Sim::builder().devices(2).attribute(1, vmm, 0).build();
    let driver: Arc<dyn Driver> = sim;
    Pool::builder(driver.clone()).build().unwrap();
    let error = Pool::builder(driver).device(HOME).device(DeviceId(1)).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { device: DeviceId(1), .. }), "{error}");
}

#[test]
fn a_full_device_is_not_an_unable_one() {
    let sim = Sim::builder().build();
    let shortage = sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate));
    let rig = Rig::on(sim, |b| b);
    assert!(rig.lane.alloc(MIB).unwrap_err().is_out_of_memory());
    rig.sim.clear_fault(shortage);
    drop(rig.lane.alloc(MIB).unwrap());
    rig.end();
}

#[test]
fn f_h4_a_lack_of_addresses_is_told_from_a_lack_of_support() {
    let error = build(Sim::builder().max_reservation_bytes(MIB), None).unwrap_err();
    assert!(matches!(error, Error::OutOfAddresses { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("2097152 bytes") && text.contains("cuMemAddressReserve"), "{text}");
}
