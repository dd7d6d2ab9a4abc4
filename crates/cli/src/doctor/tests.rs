//! The examination of simulated machines, good ones and others. Each ends in the right verdict,
//! with the reason named, and leaves nothing behind.

use vmm_sys::sim::{FaultPlan, Link, Property, Sim, SimBuilder};
use vmm_sys::{Call, DeviceAttribute, DriverKind, MemInfo, ResultCode};

use super::*;

const MIB: u64 = 1 << 20;

struct Exam {
    verdict: Verdict,
    findings: Vec<Finding>,
}

impl Exam {
    fn of(builder: SimBuilder) -> Exam {
        Exam::with_faults(builder, [])
    }

    fn with_faults(builder: SimBuilder, plans: impl IntoIterator<Item = FaultPlan>) -> Exam {
        let sim = builder.build();
        for plan in plans {
            sim.inject(plan);
        }
        let driver: Arc<dyn Driver> = sim.clone();
        let mut findings = Vec::new();
        let verdict = examine(&driver, &mut |finding| findings.push(finding.clone()));
        sim.clear_faults();
        assert_eq!(retry_failed_drops(&driver), 0);
        sim.check_clean().unwrap_or_else(|what| panic!("{what}"));
        let last = findings.last().unwrap();
        assert_eq!(last.id(), "verdict");
        assert_eq!(last.status() == Status::Fail, !verdict.is_usable(), "{last}");
        for finding in &findings {
            let bad = finding.status() != Status::Ok;
            assert!(!bad || finding.advice().is_some(), "no advice: {finding}");
            assert!(!finding.to_string().contains('\n'), "one line: {finding}");
        }
        Exam { verdict, findings }
    }

    #[track_caller]
    fn finding(&self, id: &str) -> &Finding {
        self.findings.iter().find(|f| f.id() == id).unwrap_or_else(|| panic!("no {id}"))
    }

    #[track_caller]
    fn unusable(&self, id: &str, parts: &[&str]) {
        assert!(!self.verdict.is_usable());
        assert_eq!(self.finding(id).status(), Status::Fail, "{}", self.finding(id));
        let last = self.findings.last().unwrap().to_string();
        for part in parts {
            assert!(last.contains(part), "{part} is missing in: {last}");
        }
    }

    fn usable(&self) -> Vec<u32> {
        assert!(self.verdict.is_usable(), "{:?}", self.verdict);
        self.verdict.usable.iter().map(|device| device.0).collect()
    }

    /// Ids of everything that is not ok.
    fn flaws(&self) -> Vec<&str> {
        let bad = |finding: &&Finding| finding.status() != Status::Ok;
        self.findings.iter().filter(bad).map(Finding::id).collect()
    }
}

#[test]
fn one_healthy_device_is_usable_and_everything_was_tried() {
    let exam = Exam::of(Sim::builder());
    assert_eq!(exam.usable(), [0]);
    // The measured machine advertises fabric handles and refuses them.
    assert_eq!(exam.flaws(), ["fabric"]);
    let ids: Vec<_> = exam.findings.iter().map(Finding::id).collect();
    let expected = [
        "driver_version",
        "devices",
        "identity",
        "attributes",
        "granularity",
        "free_memory",
        "memory_calls",
        "addresses",
        "streams",
        "copy",
        "kernel",
        "pool",
        "export_fd",
        "fabric",
        "rdma",
        "host_numa",
        "verdict",
    ];
    assert_eq!(ids, expected);
    let free = exam.finding("free_memory");
    assert_eq!(free.detail("total_bytes"), exam.finding("identity").detail("total_bytes"));
    assert_eq!(exam.finding("granularity").detail("plain_minimum_bytes"), Some(&(2 * MIB).into()));
    let attributes = exam.finding("attributes").detail("attributes").unwrap();
    assert_eq!((&attributes["vmm"], &attributes["compute_major"]), (&1.into(), &9.into()));
}

#[test]
fn two_healthy_devices_read_each_other() {
    let exam = Exam::of(Sim::builder().devices(2));
    assert_eq!(exam.usable(), [0, 1]);
    let peers: Vec<_> = exam.findings.iter().filter(|f| f.id() == "peer").collect();
    assert_eq!(peers.len(), 2);
    for (peer, (accessor, owner)) in peers.into_iter().zip([(1, 0), (0, 1)]) {
        assert_eq!(peer.status(), Status::Ok, "{peer}");
        assert_eq!(peer.device(), Some(DeviceId(accessor)));
        assert_eq!(peer.detail("owner"), Some(&owner.into()));
        let start =
            format!("ok    device {accessor} reads device {owner}: granted; bytes read right");
        assert!(peer.to_string().starts_with(&start), "{peer}");
    }
    assert_eq!(
        exam.findings.last().unwrap().to_string(),
        "ok    verdict: usable on device 0, device 1"
    );
}

#[test]
fn devices_without_a_link_work_alone() {
    let exam = Exam::of(Sim::builder().devices(2).links(Link::None));
    assert_eq!(exam.usable(), [0, 1]);
    let peer = exam.finding("peer");
    assert_eq!(peer.status(), Status::Warn);
    assert_eq!(peer.detail("advertised"), Some(&false.into()));
    assert!(peer.text().starts_with("not granted"), "{peer}");
    assert!(peer.advice().unwrap().contains("each device works alone"), "{peer}");
}

#[test]
fn a_grant_that_does_not_hold_is_told_from_one_that_is_refused() {
    // Set access of a pair succeeds, the copy through it does not: the next copy after
    // those of the single devices.
    let builder = Sim::builder().devices(2);
    let reads = {
        let sim = builder.clone().build();
        let driver: Arc<dyn Driver> = sim.clone();
        let mut before = 0;
        examine(&driver, &mut |finding| {
            if finding.id() != "peer" && finding.id() != "verdict" {
                before = sim.ledger().snapshot().of(Call::MemcpyDtoH);
            }
        });
        before
    };
    let plan = FaultPlan::fail(ResultCode::INVALID_VALUE).on(Call::MemcpyDtoH).at(reads + 1).once();
    let exam = Exam::with_faults(builder, [plan]);
    assert_eq!(exam.usable(), [0, 1]);
    let peer = exam.finding("peer");
    assert_eq!(peer.status(), Status::Warn);
    assert!(peer.text().starts_with("granted, then refused: cuMemcpyDtoH"), "{peer}");
}

#[test]
fn a_device_that_denies_vmm_is_not_used_whatever_its_calls_answer() {
    let vmm = DeviceAttribute::VirtualMemoryManagementSupported;
    let exam = Exam::of(Sim::builder().attribute(0, vmm, 0));
    exam.unusable("memory_calls", &["device 0", "says that it cannot"]);
    let exam = Exam::of(Sim::builder().devices(2).attribute(0, vmm, 0));
    assert_eq!(exam.usable(), [1]);
    let last = exam.findings.last().unwrap();
    assert_eq!(last.status(), Status::Warn);
    assert!(
        last.text().starts_with("usable on device 1; not on device 0: cuDeviceGetAttribute failed"),
        "{last}"
    );
}

#[test]
fn vmm_that_is_advertised_and_refused_by_a_later_call_is_named_with_the_call() {
    for call in
        [Call::MemGetAllocationGranularity, Call::MemCreate, Call::MemMap, Call::MemSetAccess]
    {
        for code in [ResultCode::NOT_SUPPORTED, ResultCode::NOT_PERMITTED, ResultCode::UNKNOWN] {
            let exam = Exam::with_faults(Sim::builder(), [FaultPlan::fail(code).on(call)]);
            exam.unusable("memory_calls", &["device 0", call.name(), code.name().unwrap()]);
            let finding = exam.finding("memory_calls");
            assert_eq!(finding.detail("advertised"), Some(&true.into()));
            assert_eq!(finding.detail("call"), Some(&call.name().into()));
            assert!(finding.text().contains("advertised all the same"), "{finding}");
        }
    }
}

#[test]
fn optional_abilities_that_are_refused_anywhere_cost_only_themselves() {
    let options =
        [(Property::Rdma, "rdma"), (Property::Fabric, "fabric"), (Property::HostNuma, "host_numa")];
    for (property, id) in options {
        for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
            for code in [999, 800, 801, 1, 101].map(ResultCode) {
                let builder = Sim::builder()
                    .refuse(Property::Fabric, Call::MemCreate, ResultCode::SUCCESS)
                    .refuse(property, call, code);
                let exam = Exam::of(builder);
                assert_eq!(exam.usable(), [0]);
                assert_eq!(exam.flaws(), [id], "{call} {code}");
                let finding = exam.finding(id);
                assert_eq!(finding.detail("code"), Some(&code.0.into()));
                assert!(finding.advice().unwrap().ends_with("all else works"), "{finding}");
            }
        }
    }
    for call in [Call::MemExportToShareableHandle, Call::MemImportFromShareableHandle] {
        let builder = Sim::builder().refuse(Property::PosixFd, call, ResultCode::NOT_SUPPORTED);
        let exam = Exam::of(builder);
        assert_eq!(exam.usable(), [0]);
        assert_eq!(exam.finding("export_fd").status(), Status::Warn);
    }
}

#[test]
fn a_full_device_is_no_verdict_on_what_it_can_do() {
    let plan = FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate);
    let exam = Exam::with_faults(Sim::builder(), [plan]);
    exam.unusable("memory_calls", &["CUDA_ERROR_OUT_OF_MEMORY"]);
    assert!(exam.finding("memory_calls").advice().unwrap().starts_with("this is no verdict"));
}

#[test]
fn few_addresses_are_a_warning_and_none_at_all_is_a_reason() {
    let exam = Exam::of(Sim::builder().max_reservation_bytes(16 << 30));
    assert_eq!(exam.usable(), [0]);
    let finding = exam.finding("addresses");
    assert_eq!(finding.status(), Status::Warn);
    assert!(finding.detail("reserved_bytes").unwrap().as_u64().unwrap() <= 16 << 30, "{finding}");
    let exam = Exam::of(Sim::builder().max_reservation_bytes(MIB));
    exam.unusable("memory_calls", &["cuMemAddressReserve"]);
    assert!(exam.finding("memory_calls").advice().unwrap().contains("address space"));
}

#[test]
fn an_old_driver_is_told_by_what_it_lacks() {
    let exam = Exam::of(Sim::builder().driver_version(11_040));
    exam.unusable("streams", &["device 0", "cuStreamGetId"]);
    assert_eq!(exam.finding("streams").advice(), Some(remedy::UPDATE));
    assert_eq!(exam.finding("driver_version").status(), Status::Warn);
    let exam = Exam::of(Sim::builder().driver_version(9_020));
    exam.unusable("memory_calls", &["CUDA_ERROR_NOT_FOUND"]);
}

#[test]
fn no_device_is_a_reason() {
    let plan = FaultPlan::fail(ResultCode::NO_DEVICE).on(Call::DeviceGetCount);
    let exam = Exam::with_faults(Sim::builder(), [plan]);
    exam.unusable("devices", &["CUDA_ERROR_NO_DEVICE"]);
    assert_eq!(exam.finding("devices").advice(), Some(remedy::NO_DEVICE));
}

#[test]
fn odd_free_memory_never_decides() {
    let plan = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemGetInfo);
    let exam = Exam::with_faults(Sim::builder(), [plan]);
    assert_eq!(exam.usable(), [0]);
    assert_eq!(exam.finding("free_memory").status(), Status::Warn);
    let look = |free_bytes, total_bytes, integrated| {
        identity::free_memory(DeviceId(0), Ok(MemInfo { free_bytes, total_bytes }), integrated)
    };
    assert_eq!(look(0, 1 << 30, false).status(), Status::Warn);
    assert_eq!(look(2 << 30, 1 << 30, false).status(), Status::Warn);
    assert_eq!(look(1 << 29, 1 << 30, false).status(), Status::Ok);
    assert!(look(1 << 29, 1 << 30, true).text().contains("without what the host could give up"));
}

#[test]
fn bytes_that_come_back_wrong_make_the_whole_machine_unusable() {
    // The honest driver cannot be made to lie about bytes: the verdict is asked directly.
    let verdict = Verdict {
        usable: vec![DeviceId(0), DeviceId(1)],
        reasons: vec!["granted, but 3 bytes came back wrong".into()],
        wrong_bytes: true,
    };
    assert!(!verdict.is_usable());
    let last = sum_up(&verdict);
    assert_eq!(last.status(), Status::Fail);
    assert!(last.text().contains("3 bytes came back wrong"), "{last}");
}

#[test]
fn whichever_call_fails_there_is_a_verdict_and_nothing_is_left_behind() {
    // Short granules, so that the many runs have few bytes to write.
    let builder = || Sim::builder().devices(2).granularity(64 << 10, 64 << 10);
    let calls = {
        let driver: Arc<dyn Driver> = builder().build();
        examine(&driver, &mut |_| {});
        driver.ledger().snapshot()
    };
    assert!(calls.total() > 200, "{calls}");
    // What the driver does not destroy is lost for good: there is nothing to try again with.
    let lost = [Call::EventDestroy, Call::StreamDestroy];
    for &call in Call::ALL.iter().filter(|call| !lost.contains(call)) {
        for k in 1..=calls.of(call) {
            let plan = FaultPlan::fail(ResultCode::NOT_SUPPORTED).on(call).at(k).once();
            Exam::with_faults(builder(), [plan]);
        }
    }
}

#[test]
fn a_missing_driver_is_explained() {
    use vmm_sys::cuda::LoadError;
    let library = || "/lib/libcuda.so.1".to_owned();
    let init = |code| DriverError::new(Call::Init, code);
    for (error, id, part) in [
        (
            LoadError::NoLibrary { tried: vec!["x".into()], reasons: vec!["no such file".into()] },
            "library",
            "x: no such file",
        ),
        (LoadError::StubLibrary { library: library() }, "library", "stub"),
        (
            LoadError::TooOld { library: library(), version: 9_020, oldest: 10_020 },
            "library",
            "9020",
        ),
        (
            LoadError::MissingSymbol {
                call: Call::MemCreate,
                symbol: "cuMemCreate",
                library: library(),
            },
            "library",
            "cuMemCreate",
        ),
        (
            LoadError::Init {
                library: library(),
                source: init(ResultCode::SYSTEM_DRIVER_MISMATCH),
            },
            "library",
            "803",
        ),
        (LoadError::NoDevice { library: library() }, "devices", "finds no device"),
    ] {
        let finding = no_driver(&error);
        assert_eq!((finding.id(), finding.status()), (id, Status::Fail));
        assert!(finding.text().contains(part) && finding.advice().is_some(), "{finding}");
    }
    let last = unusable("no library");
    assert_eq!((last.status(), last.text()), (Status::Fail, "not usable: no library"));
}

#[test]
fn json_has_the_named_fields_and_nothing_else() {
    let exam = Exam::of(Sim::builder());
    for finding in &exam.findings {
        let value = serde_json::to_value(finding).unwrap();
        let object = value.as_object().unwrap();
        let keys: Vec<_> = object.keys().map(String::as_str).collect();
        assert_eq!(keys, ["advice", "detail", "device", "finding", "status", "text"]);
        assert_eq!(object["finding"], finding.id());
    }
    let fabric = serde_json::to_value(exam.finding("fabric")).unwrap();
    assert_eq!((&fabric["status"], &fabric["device"]), (&"warn".into(), &0.into()));
    assert_eq!(fabric["detail"]["code_name"], "CUDA_ERROR_NOT_PERMITTED");
    assert_eq!(
        exam.finding("driver_version").text(),
        format!("{} driver for CUDA 13.0", DriverKind::Sim)
    );
}
