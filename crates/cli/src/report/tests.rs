use std::path::Path;

use vmm_sys::CallLedger;

use super::*;
use crate::replay::Latency;
use crate::trace::Trace;

fn rows(setting: &Setting, kind: DriverKind, names: &[&str]) -> Vec<Row> {
    let ledger = CallLedger::default();
    for call in [
        Call::MemCreate,
        Call::MemMap,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemAddressReserve,
        Call::EventRecord,
        Call::StreamWaitEvent,
        Call::EventSynchronize,
    ] {
        ledger.book(call, 1000);
    }
    let pass = PassFigures {
        pass: 2,
        ops: 4,
        mean_ns: 12.3456,
        latency: Latency { median_ns: 11, p99_ns: 99, max_ns: 123_456 },
        peak_held_bytes: 3 << 20,
        calls: ledger.snapshot(),
        driver_ns: 7_500,
    };
    names
        .iter()
        .map(|name| {
            let trace = Trace::read(&b"a 1 2097152 0 0"[..], Path::new(name)).unwrap();
            Row::new(&Plan::new(&trace, None), kind, setting, &pass)
        })
        .collect()
}

fn pool() -> Setting {
    Setting {
        allocator: "vmm-pool",
        placement: Some("buddy"),
        chunk: Some("auto".to_owned()),
        soft_limit: Some(0.01),
        idle_lane_ms: Some("auto".to_owned()),
        debug_mode: Some("off"),
        streams: 1,
        seed: None,
        late_us: None,
    }
}

fn driver_setting() -> Setting {
    let (placement, chunk, soft_limit, idle_lane_ms, debug_mode) = Default::default();
    let allocator = "cudaMalloc";
    Setting { allocator, placement, chunk, soft_limit, idle_lane_ms, debug_mode, ..pool() }
}

#[test]
fn a_json_row_has_exactly_the_promised_fields() {
    let mut out = Vec::new();
    write_json(&mut out, &rows(&pool(), DriverKind::Sim, &["gnn.trace.gz", "x"])).unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "one object a line");
    let row: serde_json::Value = serde_json::from_str(lines[0]).unwrap();
    let expected = serde_json::json!({
        "trace": "gnn", "driver": "sim", "pass": 2, "ops": 4,
        "mean_ns": 12.3, "median_ns": 11, "p99_ns": 99, "max_us": 123.456,
        "peak_live_bytes": 2097152, "peak_held_bytes": 3145728, "ratio": 1.5,
        "driver_calls": {
            "create": 1, "map": 2, "set_access": 1, "unmap": 0, "release": 0, "reserve": 1,
            "address_free": 0, "other": 3,
        },
        "host_waits": 1, "driver_us": 7.5,
        "driver_us_by_call": {
            "create": 1, "map": 2, "set_access": 1, "unmap": 0, "release": 0, "reserve": 1,
            "address_free": 0, "other": 3,
        },
        "allocator": "vmm-pool", "placement": "buddy", "chunk": "auto", "soft_limit": 0.01,
        "idle_lane_ms": "auto", "debug_mode": "off", "streams": 1, "seed": null, "late_us": null, "driver_time": "modelled",
    });
    assert_eq!(row, expected);
}

#[test]
fn settings_of_the_pool_are_null_for_the_driver() {
    let row = &rows(&driver_setting(), DriverKind::Cuda, &["x"])[0];
    let row = serde_json::to_value(row).unwrap();
    for field in ["placement", "chunk", "soft_limit", "idle_lane_ms", "debug_mode"] {
        assert_eq!(row.get(field), Some(&serde_json::Value::Null), "{field}");
    }
    assert_eq!(row["driver_time"], "measured");
}

#[test]
fn the_table_is_aligned_and_says_what_is_modelled() {
    let text = Table(&rows(&pool(), DriverKind::Sim, &["gnn", "a_long_name"])).to_string();
    let lines: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
    // Header, two rows, and a summary, because there are two traces.
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
    assert!(lines[3].starts_with("geometric mean of 2  vmm-pool"), "{text}");
    assert!(lines[3].contains("1.5000"), "{text}");
    assert!(text.contains("MODELLED") && !text.contains("cudaMalloc"), "{text}");
}

#[test]
fn the_table_of_one_trace_has_no_summary_and_explains_the_driver_rows() {
    let text = Table(&rows(&driver_setting(), DriverKind::Cuda, &["gnn"])).to_string();
    assert!(!text.contains("geometric mean"), "{text}");
    assert!(text.contains("the driver call is the operation"), "{text}");
    assert!(text.contains("measured") && !text.contains("MODELLED"), "{text}");
}
