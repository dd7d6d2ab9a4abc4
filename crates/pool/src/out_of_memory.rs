//! [`OutOfMemory`]: the facts of a shortage, so that a message needs no guess.
//!
//! Taking them asks the driver one question and allocates nothing on the device.

use std::fmt;

use vmm_sys::caught::caught;
use vmm_sys::{Call, DeviceId, DriverError, MemInfo};

use crate::config::DebugMode;
use crate::device::Device;
use crate::obstacle;
use crate::stats::DeviceStats;

/// The facts of an out-of-memory error. All figures are bytes of one device, after everything
/// that could help was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The device.
    pub device: DeviceId,
    /// What was asked for.
    pub asked_bytes: u64,
    /// What that takes: rounded up to the granule, or to the granularity for stock and in guard mode.
    pub rounded_bytes: u64,
    /// The statistics when it failed.
    pub stats: DeviceStats,
    /// New memory that could still be made: what the limits leave, at most what the driver says is
    /// free. If it does not say, 0 once it has refused.
    pub room_bytes: u64,
    /// The largest request of the same kind that would succeed in the asking lane now, new memory
    /// included; one granule more would fail. `None` if no lane asked.
    pub largest_bytes: Option<u64>,
    /// The device's free memory, if the driver could say.
    pub device_free_bytes: Option<u64>,
    /// The device's memory, if the driver could say.
    pub device_total_bytes: Option<u64>,
    /// The driver's refusal, unless the pool's own limit came first.
    pub cause: Option<DriverError>,
    /// What the driver refused last to something that was tried to make room: with it the request
    /// might have been served. It is tried again later.
    pub hindrance: Option<DriverError>,
    /// What may help, with this configuration.
    pub hints: Vec<Hint>,
}

/// What may help against a shortage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// The pool's own limit refused, and the device has at least what it leaves.
    RaiseLimit {
        /// The limit.
        limit_bytes: u64,
    },
    /// The budget that pools share refused.
    RaiseBudget {
        /// The budget.
        limit_bytes: u64,
    },
    /// Enough is free, in pieces, and chunks are longer than they have to be.
    SmallerChunks {
        /// The length that lanes grow by at most.
        chunk_bytes: u64,
    },
    /// Memory is only held up by unfinished work, which the request would not wait for.
    Wait {
        /// How much.
        limbo_bytes: u64,
    },
    /// Memory is held up by work whose end could not be waited for, as during stream capture.
    EndCapture {
        /// How much.
        limbo_bytes: u64,
    },
    /// Guard mode is on: each block takes whole granules.
    LeaveGuardMode {
        /// What live buffers occupy beyond what was asked.
        rounding_bytes: u64,
    },
    /// Memory is kept for captured graphs.
    DropGraphs {
        /// How much.
        private_bytes: u64,
    },
    /// The device is full, and not of this pool's memory.
    OthersHold {
        /// How much: of other pools, contexts and processes.
        bytes: u64,
    },
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hint::RaiseLimit { limit_bytes } => {
                write!(f, "raise the pool's limit of {limit_bytes} (VMM_POOL_LIMIT)")
            }
            Hint::RaiseBudget { limit_bytes } => {
                write!(f, "raise the budget of {limit_bytes} that pools share")
            }
            Hint::SmallerChunks { chunk_bytes } => write!(
                f,
                "set chunks shorter than {chunk_bytes} (VMM_POOL_CHUNK): short ones are free sooner"
            ),
            Hint::Wait { limbo_bytes } => {
                write!(f, "let the request wait: {limbo_bytes} are held up by unfinished work")
            }
            Hint::EndCapture { limbo_bytes } => write!(
                f,
                "end stream captures: {limbo_bytes} are held up by work that cannot be waited for"
            ),
            Hint::LeaveGuardMode { rounding_bytes } => {
                write!(f, "leave guard mode (VMM_POOL_DEBUG), which rounds by {rounding_bytes}")
            }
            Hint::DropGraphs { private_bytes } => {
                write!(f, "drop captured graphs: {private_bytes} are kept for them")
            }
            Hint::OthersHold { bytes } => write!(
                f,
                "{bytes} of the device are held by other pools, contexts and processes (nvidia-smi)"
            ),
        }
    }
}

/// What was asked for when memory fell short.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) bytes: u64,
    pub(crate) rounded_bytes: u64,
    pub(crate) may_wait: bool,
}

/// What the driver says of the device's memory; an answer that cannot be is none.
pub(crate) fn device_memory(device: &Device) -> Option<MemInfo> {
    let ask = || device.driver.mem_info(device.plan.device);
    let info = caught(Call::MemGetInfo, ask).ok()?;
    (info.free_bytes <= info.total_bytes).then_some(info)
}

/// What could still be made: see [`OutOfMemory::room_bytes`].
pub(crate) fn room_bytes(
    device: &Device,
    info: Option<MemInfo>,
    cause: Option<&DriverError>,
) -> u64 {
    let unknown = if cause.is_some() { 0 } else { u64::MAX };
    device.depot.room_bytes().min(info.map_or(unknown, |info| info.free_bytes))
}

impl OutOfMemory {
    pub(crate) fn new(
        device: &Device,
        asked: Asked,
        largest_bytes: Option<u64>,
        info: Option<MemInfo>,
        cause: Option<DriverError>,
    ) -> OutOfMemory {
        let mut facts = OutOfMemory {
            device: device.plan.device,
            asked_bytes: asked.bytes,
            rounded_bytes: asked.rounded_bytes,
            stats: device.stats(),
            room_bytes: room_bytes(device, info, cause.as_ref()),
            largest_bytes,
            device_free_bytes: info.map(|info| info.free_bytes),
            device_total_bytes: info.map(|info| info.total_bytes),
            cause,
            hindrance: None,
            hints: Vec::new(),
        };
        facts.hints = facts.find_hints(device, asked);
        facts
    }

    /// With what hindered the calling thread's request.
    pub(crate) fn hindered(self) -> OutOfMemory {
        OutOfMemory { hindrance: obstacle::take(), ..self }
    }

    /// Free bytes would suffice, but in no one place, or in no place that this lane may use.
    pub fn is_scattered(&self) -> bool {
        self.free_bytes() >= self.rounded_bytes
    }

    /// Everything that is not in use, wherever it is.
    fn free_bytes(&self) -> u64 {
        let stats = &self.stats;
        (stats.idle_bytes + stats.limbo_bytes + stats.stock_bytes).saturating_add(self.room_bytes)
    }

    fn find_hints(&self, device: &Device, asked: Asked) -> Vec<Hint> {
        let (stats, plan) = (&self.stats, &device.plan);
        let mut hints = Vec::new();
        // The device has not more than the limits leave: no use in raising them.
        let is_full = self.cause.is_some()
            || self.device_free_bytes.is_some_and(|free| free < device.depot.room_bytes());
        if !is_full {
            match device.depot.binding_budget_bytes() {
                Some(limit_bytes) => hints.push(Hint::RaiseBudget { limit_bytes }),
                None if self.device_total_bytes.is_none_or(|total| plan.limit_bytes < total) => {
                    hints.push(Hint::RaiseLimit { limit_bytes: plan.limit_bytes });
                }
                None => {}
            }
        }
        let is_guarded = plan.debug_mode == DebugMode::Guard;
        if is_guarded {
            hints.push(Hint::LeaveGuardMode { rounding_bytes: stats.rounding_bytes });
        }
        if self.is_scattered() && !is_guarded && plan.chunk_max_bytes > plan.granularity_bytes {
            hints.push(Hint::SmallerChunks { chunk_bytes: plan.chunk_max_bytes });
        }
        match stats.limbo_bytes {
            0 => {}
            limbo_bytes if asked.may_wait => hints.push(Hint::EndCapture { limbo_bytes }),
            limbo_bytes => hints.push(Hint::Wait { limbo_bytes }),
        }
        if stats.private_bytes > 0 {
            hints.push(Hint::DropGraphs { private_bytes: stats.private_bytes });
        }
        if let (true, Some(free), Some(total)) =
            (is_full, self.device_free_bytes, self.device_total_bytes)
        {
            let bytes = (total - free).saturating_sub(stats.held_bytes);
            if bytes > 0 {
                hints.push(Hint::OthersHold { bytes });
            }
        }
        hints
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.stats;
        write!(f, "out of memory on {}: asked {} bytes", self.device, self.asked_bytes)?;
        write!(f, " (rounded {}); ", self.rounded_bytes)?;
        write!(
            f,
            "held {} = live {} + rounding {} + idle {} + limbo {} + private {} + elastic {} + anchor {} + \
             stock {}; ",
            s.held_bytes,
            s.live_bytes,
            s.rounding_bytes,
            s.idle_bytes,
            s.limbo_bytes,
            s.private_bytes,
            s.elastic_bytes,
            s.anchor_bytes,
            s.stock_bytes
        )?;
        match s.limit_bytes {
            u64::MAX => write!(f, "no limit set; ")?,
            limit => write!(f, "limit {limit}; ")?,
        }
        if let Some(largest) = self.largest_bytes {
            write!(f, "largest piece that would succeed {largest}; ")?;
        }
        let say = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |b| b.to_string());
        write!(
            f,
            "device free {} of {}; ",
            say(self.device_free_bytes),
            say(self.device_total_bytes)
        )?;
        f.write_str(if self.is_scattered() {
            "too scattered: enough bytes are free, but not in one place"
        } else {
            "too full: fewer bytes are free than were asked for"
        })?;
        if let Some(cause) = &self.cause {
            write!(f, " ({cause})")?;
        }
        if let Some(hindrance) = &self.hindrance {
            write!(f, "; what was tried to make room was refused ({hindrance})")?;
        }
        for (index, hint) in self.hints.iter().enumerate() {
            write!(f, "{}{hint}", if index == 0 { "; what may help: " } else { ", or " })?;
        }
        Ok(())
    }
}
