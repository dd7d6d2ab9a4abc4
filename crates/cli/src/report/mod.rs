//! What a replay says: one row a trace, allocator and pass, as JSON or as a table.

mod table;

use std::io::{self, Write};

use serde::Serialize;
use vmm_sys::{Call, CallCounts, DriverKind};

use crate::replay::{PassFigures, Plan};

pub use table::{Table, aligned};

/// The calls in which the host waits for the GPU.
const HOST_WAITS: [Call; 3] =
    [Call::EventSynchronize, Call::StreamSynchronize, Call::CtxSynchronize];

/// The driver calls of a pass by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DriverCalls {
    /// `cuMemCreate`
    pub create: u64,
    /// `cuMemMap`
    pub map: u64,
    /// `cuMemSetAccess`
    pub set_access: u64,
    /// `cuMemUnmap`
    pub unmap: u64,
    /// `cuMemRelease`
    pub release: u64,
    /// `cuMemAddressReserve`
    pub reserve: u64,
    /// `cuMemAddressFree`
    pub address_free: u64,
    /// All others: events, and what the driver's own allocators consist of.
    pub other: u64,
}

impl DriverCalls {
    /// How often each kind was called.
    pub fn of(counts: &CallCounts) -> DriverCalls {
        DriverCalls::sorted(counts.nonzero())
    }

    /// The microseconds that each kind took, rounded down.
    pub fn micros(counts: &CallCounts) -> DriverCalls {
        let nanos = counts.nonzero().map(|(call, _)| (call, counts.nanos_of(call)));
        let DriverCalls { create, map, set_access, unmap, release, reserve, address_free, other } =
            DriverCalls::sorted(nanos);
        DriverCalls {
            create: create / 1000,
            map: map / 1000,
            set_access: set_access / 1000,
            unmap: unmap / 1000,
            release: release / 1000,
            reserve: reserve / 1000,
            address_free: address_free / 1000,
            other: other / 1000,
        }
    }

    /// Sorts numbers into kinds.
    fn sorted(numbers: impl Iterator<Item = (Call, u64)>) -> DriverCalls {
        let mut calls = DriverCalls::default();
        for (call, number) in numbers {
            *match call {
                Call::MemCreate => &mut calls.create,
                Call::MemMap => &mut calls.map,
                Call::MemSetAccess => &mut calls.set_access,
                Call::MemUnmap => &mut calls.unmap,
                Call::MemRelease => &mut calls.release,
                Call::MemAddressReserve => &mut calls.reserve,
                Call::MemAddressFree => &mut calls.address_free,
                _ => &mut calls.other,
            } += number;
        }
        calls
    }

    /// Adds the calls of another pass.
    fn add(&mut self, other: &DriverCalls) {
        self.create += other.create;
        self.map += other.map;
        self.set_access += other.set_access;
        self.unmap += other.unmap;
        self.release += other.release;
        self.reserve += other.reserve;
        self.address_free += other.address_free;
        self.other += other.other;
    }

    /// In the order of the table's columns.
    fn columns(&self) -> [u64; 8] {
        let DriverCalls { create, map, set_access, unmap, release, reserve, address_free, other } =
            *self;
        [create, map, set_access, unmap, release, reserve, address_free, other]
    }
}

/// The settings that a row was measured with. Settings of the pool are `None` for allocators that
/// have no such thing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// `vmm-pool`, `vmm-pool on sim`, `cudaMalloc` or `cudaMallocAsync`.
    pub allocator: &'static str,
    /// `first-fit` or `buddy`.
    pub placement: Option<&'static str>,
    /// `auto`, or the bytes of a growth chunk.
    pub chunk: Option<String>,
    /// Fraction over peak live bytes up to which new memory is made; `None` also where it is off.
    pub soft_limit: Option<f64>,
    /// `auto`, `off`, or the milliseconds after which an idle lane is emptied.
    pub idle_lane_ms: Option<String>,
    /// `off` or `guard`.
    pub debug_mode: Option<&'static str>,
    /// Streams that the blocks are on.
    pub streams: usize,
    /// What spread them, if anything did.
    pub seed: Option<u64>,
    /// Microseconds that GPU work goes on after a free, if any does.
    pub late_us: Option<u64>,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The trace.
    pub trace: String,
    /// `cuda` or `sim`.
    pub driver: String,
    /// Counted from 1; the first finds an empty allocator.
    pub pass: u32,
    /// Allocations and frees.
    pub ops: usize,
    /// Mean host nanoseconds of an operation, driver time excluded (included where the driver
    /// call is the operation).
    pub mean_ns: f64,
    /// Median of single operations, driver time included.
    pub median_ns: u64,
    /// 99th percentile of the same.
    pub p99_ns: u64,
    /// The slowest operation, in microseconds.
    pub max_us: f64,
    /// Largest sum of live bytes, as the trace asked.
    pub peak_live_bytes: u64,
    /// Largest physical memory held.
    pub peak_held_bytes: u64,
    /// `peak_held_bytes / peak_live_bytes`
    pub ratio: f64,
    /// Driver calls of the pass.
    pub driver_calls: DriverCalls,
    /// Those of them in which the host waits for the GPU.
    pub host_waits: u64,
    /// The time of all in microseconds.
    pub driver_us: f64,
    /// The same by kind.
    pub driver_us_by_call: DriverCalls,
    /// What was measured.
    #[serde(flatten)]
    pub setting: Setting,
    /// `measured` on a GPU, `modelled` on the simulated device.
    pub driver_time: &'static str,
}

impl Row {
    /// The row of one pass.
    pub fn new(plan: &Plan<'_>, kind: DriverKind, setting: &Setting, pass: &PassFigures) -> Row {
        let peak_live_bytes = plan.trace.peak_live_bytes;
        Row {
            trace: plan.trace.name.clone(),
            driver: kind.to_string(),
            pass: pass.pass,
            ops: pass.ops,
            mean_ns: rounded(pass.mean_ns, 10.0),
            median_ns: pass.latency.median_ns,
            p99_ns: pass.latency.p99_ns,
            max_us: pass.latency.max_ns as f64 / 1e3,
            peak_live_bytes,
            peak_held_bytes: pass.peak_held_bytes,
            ratio: rounded(pass.peak_held_bytes as f64 / peak_live_bytes as f64, 1e4),
            driver_calls: DriverCalls::of(&pass.calls),
            host_waits: HOST_WAITS.iter().map(|call| pass.calls.of(*call)).sum(),
            driver_us: pass.driver_ns as f64 / 1e3,
            driver_us_by_call: DriverCalls::micros(&pass.calls),
            setting: setting.clone(),
            driver_time: match kind {
                DriverKind::Cuda => "measured",
                DriverKind::Sim => "modelled",
            },
        }
    }
}

/// Digits that are noise only make a line hard to read.
fn rounded(value: f64, scale: f64) -> f64 {
    (value * scale).round() / scale
}

/// Writes one object a line.
///
/// # Errors
/// The writer's.
pub fn write_json(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    for row in rows {
        serde_json::to_writer(&mut *out, row)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

#[cfg(test)]
mod tests;
