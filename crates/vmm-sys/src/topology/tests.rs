//! Probing on the simulated device: lies, shortages, missing links, and a failure at every call.

use super::*;
use crate::object::failed_drops;
use crate::sim::{FaultPlan, Link, Property, Sim, SimBuilder};
use crate::types::DeviceAttribute;

const ZERO: DeviceId = DeviceId(0);
const ONE: DeviceId = DeviceId(1);
const TWO: DeviceId = DeviceId(2);

fn machine(builder: SimBuilder) -> (Arc<Sim>, Arc<dyn Driver>) {
    let sim = builder.build();
    (sim.clone(), sim)
}

#[test]
fn the_measured_machine_is_described_as_it_was_measured() {
    let (sim, driver) = machine(Sim::builder().devices(2));
    let topology = Topology::probe(&driver, &[ZERO, ONE]).unwrap();
    sim.check_clean().unwrap();
    assert_eq!(topology.driver_version, 13_000);
    assert_eq!((topology.devices.len(), topology.links.len()), (2, 2));
    let facts = topology.device(ONE).unwrap();
    assert_eq!(facts.uuid, driver.device_uuid(ONE).unwrap());
    assert_eq!(facts.total_bytes, driver.device_total_bytes(ONE).unwrap());
    let granule = Granularity { minimum_bytes: 2 << 20, recommended_bytes: 2 << 20 };
    assert_eq!([&facts.plain, &facts.exportable, &facts.rdma], [&Ok(granule); 3]);
    let works: Vec<_> =
        facts.abilities.named().into_iter().filter(|(_, finding)| finding.works()).collect();
    assert_eq!(works.len(), 4, "all but fabric: {works:?}");
    // Row D-C7: advertised, and not permitted.
    let fabric = &facts.abilities.fabric;
    assert_eq!(fabric.advertised, Some(true));
    assert_eq!(fabric.error().map(DriverError::code), Some(ResultCode::NOT_PERMITTED));
    assert!(fabric.to_string().starts_with("refused (advertised)"), "{fabric}");
    assert!(topology.reaches(ZERO, ONE) && topology.reaches(ONE, ZERO));
    assert!(topology.reaches(ZERO, ZERO) && !topology.reaches(TWO, TWO));
    assert_eq!(topology.link(ZERO, ONE).unwrap().rank, Some(0));
}

#[test]
fn f_x3_only_the_devices_asked_about_are_touched_and_no_context_is_made() {
    let (sim, driver) = machine(Sim::builder().devices(3));
    let topology = Topology::probe(&driver, &[TWO, ZERO]).unwrap();
    let order: Vec<_> = topology.devices.iter().map(|facts| facts.device).collect();
    assert_eq!(order, [TWO, ZERO]);
    assert_eq!(topology.device(ONE), None);
    assert_eq!(topology.link(ZERO, ONE), None);
    assert_eq!(sim.ledger_summary().context_references(), 0);
    assert_eq!(driver.ledger().snapshot().of(Call::DevicePrimaryCtxRetain), 0);
}

#[test]
fn granularities_are_kept_apart() {
    let builder = Sim::builder()
        .granularity(64 << 10, 2 << 20)
        .granularity_exportable(4 << 20, 8 << 20)
        .granularity_rdma(16 << 20, 16 << 20);
    let (sim, driver) = machine(builder);
    let topology = Topology::probe(&driver, &[ZERO]).unwrap();
    sim.check_clean().unwrap();
    let facts = topology.device(ZERO).unwrap();
    let kinds = [&facts.plain, &facts.exportable, &facts.rdma];
    let minima = kinds.map(|kind| kind.as_ref().unwrap().minimum_bytes);
    assert_eq!(minima, [64 << 10, 4 << 20, 16 << 20]);
    assert_eq!(facts.plain.as_ref().unwrap().recommended_bytes, 2 << 20);
    assert!(facts.abilities.export_fd.works() && facts.abilities.rdma.works());
}

#[test]
fn the_try_decides_and_not_the_attribute() {
    let builder = Sim::builder()
        .attribute(0, DeviceAttribute::HandleTypePosixFdSupported, 0)
        .attribute(0, DeviceAttribute::GpuDirectRdmaWithVmmSupported, 1)
        .refuse(Property::Rdma, Call::MemMap, ResultCode::NOT_SUPPORTED)
        .refuse(Property::HostNuma, Call::MemSetAccess, ResultCode::INVALID_VALUE);
    let (sim, driver) = machine(builder);
    let topology = Topology::probe(&driver, &[ZERO]).unwrap();
    sim.check_clean().unwrap();
    let Abilities { export_fd, rdma, host_numa, .. } = &topology.devices[0].abilities;
    assert_eq!((export_fd.advertised, &export_fd.tried), (Some(false), &Tried::Works));
    assert_eq!(export_fd.to_string(), "works, though not advertised");
    assert_eq!(rdma.advertised, Some(true));
    assert!(matches!(&rdma.tried, Tried::Refused(error) if error.call() == Call::MemMap));
    assert!(matches!(&host_numa.tried, Tried::Refused(e) if e.call() == Call::MemSetAccess));
}

/// Every flag, refused by every call with every code that was seen: the flag alone is lost, and why
/// is told.
#[test]
fn f_h2_whatever_call_refuses_a_flag_with_whatever_code_the_flag_alone_is_lost() {
    let calls = [
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemExportToShareableHandle,
        Call::MemImportFromShareableHandle,
    ];
    let flags = [Property::Rdma, Property::Fabric, Property::PosixFd, Property::HostNuma];
    for (flag, call) in flags.into_iter().flat_map(|flag| calls.map(|call| (flag, call))) {
        // Only descriptors are exported in the try: a NIC or an IMEX channel is on the other side of
        // the others, and one's own import would prove nothing for it.
        if flag != Property::PosixFd && calls[3..].contains(&call) {
            continue;
        }
        for code in [999, 800, 801, 1, 101].map(ResultCode) {
            let builder = Sim::builder()
                .refuse(Property::Fabric, Call::MemCreate, ResultCode::SUCCESS)
                .refuse(flag, call, code);
            let (sim, driver) = machine(builder);
            let topology = Topology::probe(&driver, &[ZERO]).unwrap();
            sim.check_clean().unwrap();
            let Abilities { vmm, export_fd, fabric, rdma, host_numa } =
                &topology.devices[0].abilities;
            let all = [
                (Property::Rdma, rdma),
                (Property::Fabric, fabric),
                (Property::PosixFd, export_fd),
                (Property::HostNuma, host_numa),
            ];
            assert!(vmm.works());
            for (of, finding) in all {
                if of != flag {
                    assert!(finding.works(), "{of:?} beside {flag:?}: {finding}");
                    continue;
                }
                let Tried::Refused(error) = &finding.tried else { panic!("{flag:?}: {finding}") };
                assert_eq!((error.call(), error.code()), (call, code), "{flag:?}");
                assert_eq!(finding.advertised, Some(true));
                assert!(finding.usable().is_err(), "an attribute is no promise");
            }
        }
    }
}

#[test]
fn an_ability_is_usable_if_it_works_and_is_not_denied() {
    let vmm = DeviceAttribute::VirtualMemoryManagementSupported;
    let (sim, driver) = machine(Sim::builder().devices(2).attribute(1, vmm, 0));
    assert_eq!(try_vmm(&driver, ZERO).usable(), Ok(()));
    let denied = try_vmm(&driver, ONE);
    assert!(denied.works());
    assert_eq!(denied.usable().unwrap_err().call(), Call::DeviceGetAttribute);
    sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemMap));
    assert_eq!(try_vmm(&driver, ZERO).usable().unwrap_err().call(), Call::MemMap);
    sim.check_clean().unwrap();
}

#[test]
fn f_h2_a_full_device_is_not_an_unable_one() {
    let (sim, driver) = machine(Sim::builder().devices(2));
    sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate));
    let topology = Topology::probe(&driver, &[ZERO, ONE]).unwrap();
    for (name, finding) in topology.devices[0].abilities.named() {
        assert!(matches!(&finding.tried, Tried::Undecided(e) if e.is_out_of_memory()), "{name}");
        assert!(finding.to_string().starts_with("undecided"), "{finding}");
    }
    let access = &topology.link(ZERO, ONE).unwrap().access;
    assert!(matches!(access.tried, Tried::Undecided(_)), "{access}");
    assert_eq!(access.advertised, Some(true));
    assert!(!topology.reaches(ZERO, ONE), "not seen to work");
}

#[test]
fn a_missing_link_says_so_in_both_its_forms() {
    let builder = Sim::builder().devices(3).link(0, 1, Link::None).link(0, 2, Link::Pcie);
    let (sim, driver) = machine(builder);
    let topology = Topology::probe(&driver, &[ZERO, ONE, TWO]).unwrap();
    sim.check_clean().unwrap();
    assert_eq!(topology.links.len(), 6);
    for (accessor, owner) in [(ZERO, ONE), (ONE, ZERO)] {
        let link = topology.link(accessor, owner).unwrap();
        assert_eq!(link.access.advertised, Some(false));
        assert!(matches!(link.access.tried, Tried::Refused(_)), "{}", link.access);
        assert!(!topology.reaches(accessor, owner));
    }
    assert!(topology.reaches(ZERO, TWO) && topology.reaches(ONE, TWO));
    let rank = |a, b| topology.link(a, b).unwrap().rank;
    assert!(rank(ZERO, TWO) > rank(ONE, TWO), "PCIe is slower than NVLink");
}

#[test]
fn a_device_that_does_not_exist_is_an_error() {
    let (_, driver) = machine(Sim::builder());
    let error = Topology::probe(&driver, &[ZERO, DeviceId(9)]).unwrap_err();
    assert_eq!(error.code(), ResultCode::INVALID_DEVICE);
    let none = Topology::probe(&driver, &[]).unwrap();
    assert_eq!((none.devices.len(), none.links.len()), (0, 0));
}

#[test]
fn nothing_is_left_behind_whichever_call_fails() {
    let calls = {
        let (_, driver) = machine(Sim::builder().devices(2));
        Topology::probe(&driver, &[ZERO, ONE]).unwrap();
        driver.ledger().snapshot().total()
    };
    assert!(calls > 80, "{calls}");
    for code in [ResultCode::OUT_OF_MEMORY, ResultCode::NOT_SUPPORTED] {
        for k in 1..=calls {
            let (sim, driver) = machine(Sim::builder().devices(2));
            sim.inject(FaultPlan::fail(code).at(k).once());
            let result = Topology::probe(&driver, &[ZERO, ONE]);
            assert_eq!(sim.faults_fired(), 1, "call {k}");
            // What a drop could not give back is kept, and goes back at the next try.
            if !failed_drops(&driver).is_empty() {
                assert_eq!(crate::object::retry_failed_drops(&driver), 0, "call {k}");
            }
            sim.check_clean().unwrap_or_else(|what| panic!("call {k}: {what}; {result:?}"));
        }
    }
}
