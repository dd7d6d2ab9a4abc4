//! [`Setup`]: the machine and the pool of one run, in one line of text.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_pool::{ChunkSize, DebugMode, Error, Placement, Pool};
use vmm_sys::DeviceId;

use crate::machine::{Machine, MachineSpec};

/// What a run is made on.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Number of devices, all of them the pool's.
    pub devices: u32,
    /// Granularity of device memory, in bytes.
    pub granularity_bytes: u64,
    /// Memory of each device, in bytes.
    pub device_bytes: u64,
    /// Whether work takes its modelled time on the virtual clock.
    pub modelled_time: bool,
    /// Length of the growth chunks; `None` is automatic.
    pub chunk_bytes: Option<u64>,
    /// How large blocks are placed.
    pub placement: Placement,
    /// The soft limit; `None` is off.
    pub soft_limit: Option<f64>,
    /// The hard limit, in bytes a device.
    pub limit_bytes: Option<u64>,
    /// The low mark of the stock, in bytes.
    pub stock_low_bytes: u64,
    /// The high mark of the stock, in bytes.
    pub stock_high_bytes: Option<u64>,
    /// Whether the pool has its background thread. Then a run does not repeat exactly.
    pub background: bool,
    /// After which time of the run's own clock a lane is idle, in milliseconds; `None` is off.
    pub idle_lane_ms: Option<u64>,
    /// Whether each block has mappings of its own and a gap behind it.
    pub guard: bool,
    /// Memory that elastic buffers may have on node 0 of the host, in bytes; `None` is none.
    pub host_bytes: Option<u64>,
}

/// The time of a run, in milliseconds: it passes when the script says so.
pub type RunClock = Arc<AtomicU64>;

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            devices: 1,
            granularity_bytes: 2 << 20,
            device_bytes: 16 << 30,
            modelled_time: false,
            chunk_bytes: None,
            placement: Placement::default(),
            soft_limit: Some(0.01),
            limit_bytes: None,
            stock_low_bytes: 0,
            stock_high_bytes: None,
            background: false,
            idle_lane_ms: None,
            guard: false,
            host_bytes: None,
        }
    }
}

impl Setup {
    /// What the machine must offer.
    pub fn machine(&self) -> MachineSpec {
        MachineSpec {
            devices: self.devices,
            granularity_bytes: self.granularity_bytes,
            device_bytes: Some(self.device_bytes),
            modelled_time: self.modelled_time,
            // A run waits for held streams only where the pool is wrong.
            blocked_limit: Duration::from_secs(1),
        }
    }

    /// A pool with these settings.
    ///
    /// # Errors
    /// The pool's.
    pub fn build_pool(&self, machine: &Machine, clock: &RunClock) -> Result<Pool, Error> {
        let clock = clock.clone();
        let mut builder = Pool::builder(machine.driver().clone())
            .chunk(self.chunk_bytes.map_or(ChunkSize::Auto, ChunkSize::Fixed))
            .placement(self.placement)
            .soft_limit(self.soft_limit)
            .stock_marks(self.stock_low_bytes, self.stock_high_bytes.unwrap_or(u64::MAX))
            .background(self.background)
            .idle_lane_ms(self.idle_lane_ms)
            .debug_mode(if self.guard { DebugMode::Guard } else { DebugMode::Off })
            .clock(move || Duration::from_millis(clock.load(Ordering::Relaxed)));
        for device in 0..self.devices {
            builder = builder.device(DeviceId(device));
        }
        if let Some(limit_bytes) = self.limit_bytes {
            builder = builder.limit_bytes(limit_bytes);
        }
        if let Some(host_bytes) = self.host_bytes {
            builder = builder.host_memory(0, host_bytes, 0);
        }
        builder.build()
    }
}

/// A value, or a word where there is none.
struct Or<T>(Option<T>, &'static str);

impl<T: fmt::Display> fmt::Display for Or<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str(self.1),
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placement = match self.placement {
            Placement::Buddy => "buddy",
            Placement::FirstFit => "first-fit",
        };
        write!(
            f,
            "setup devices={} granularity={} device={} time={} chunk={} placement={placement} \
             soft={} limit={} low={} high={} background={} idle={} debug={} \
             host={}",
            self.devices,
            self.granularity_bytes,
            self.device_bytes,
            if self.modelled_time { "modelled" } else { "instant" },
            Or(self.chunk_bytes, "auto"),
            Or(self.soft_limit, "off"),
            Or(self.limit_bytes, "none"),
            self.stock_low_bytes,
            Or(self.stock_high_bytes, "none"),
            if self.background { "on" } else { "off" },
            Or(self.idle_lane_ms, "off"),
            if self.guard { "guard" } else { "off" },
            Or(self.host_bytes, "none"),
        )
    }
}

fn value<N: FromStr>(name: &str, word: &str) -> Result<N, String> {
    word.parse().map_err(|_| format!("setup: {name}: expected a number, found \"{word}\""))
}

fn optional<N: FromStr>(name: &str, word: &str, none: &str) -> Result<Option<N>, String> {
    if word == none { Ok(None) } else { value(name, word).map(Some) }
}

fn choice<T: Copy>(name: &str, word: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let found = choices.iter().find(|(known, _)| *known == word).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(known, _)| *known).collect();
        format!("setup: {name}: expected {}, found \"{word}\"", names.join(" or "))
    })
}

impl FromStr for Setup {
    type Err = String;

    fn from_str(line: &str) -> Result<Setup, String> {
        let mut words = line.split_whitespace();
        if words.next() != Some("setup") {
            return Err(format!("\"{line}\": expected a line that begins with setup"));
        }
        let mut setup = Setup::default();
        for word in words {
            let Some((name, word)) = word.split_once('=') else {
                return Err(format!("setup: expected NAME=VALUE, found \"{word}\""));
            };
            match name {
                "devices" => setup.devices = value(name, word)?,
                "granularity" => setup.granularity_bytes = value(name, word)?,
                "device" => setup.device_bytes = value(name, word)?,
                "time" => {
                    let times = [("modelled", true), ("instant", false)];
                    setup.modelled_time = choice(name, word, &times)?;
                }
                "chunk" => setup.chunk_bytes = optional(name, word, "auto")?,
                "placement" => {
                    let kinds = [("buddy", Placement::Buddy), ("first-fit", Placement::FirstFit)];
                    setup.placement = choice(name, word, &kinds)?;
                }
                "soft" => setup.soft_limit = optional(name, word, "off")?,
                "limit" => setup.limit_bytes = optional(name, word, "none")?,
                "low" => setup.stock_low_bytes = value(name, word)?,
                "high" => setup.stock_high_bytes = optional(name, word, "none")?,
                "background" => {
                    setup.background = choice(name, word, &[("on", true), ("off", false)])?;
                }
                "idle" => setup.idle_lane_ms = optional(name, word, "off")?,
                "host" => setup.host_bytes = optional(name, word, "none")?,
                "debug" => setup.guard = choice(name, word, &[("guard", true), ("off", false)])?,
                other => return Err(format!("setup: no such name: \"{other}\"")),
            }
        }
        Ok(setup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_is_read_as_it_was_written() {
        let other = Setup {
            devices: 2,
            granularity_bytes: 4096,
            device_bytes: 1 << 28,
            modelled_time: true,
            chunk_bytes: Some(2 << 20),
            placement: Placement::Buddy,
            soft_limit: None,
            limit_bytes: Some(77 << 20),
            stock_low_bytes: 5,
            stock_high_bytes: Some(9),
            background: true,
            idle_lane_ms: Some(250),
            guard: true,
            host_bytes: Some(3 << 20),
        };
        for setup in [Setup::default(), other] {
            assert_eq!(setup.to_string().parse(), Ok(setup));
        }
        let error = "setup time=fast".parse::<Setup>().unwrap_err();
        assert!(error.contains("modelled or instant"), "{error}");
        assert!("setup speed=9".parse::<Setup>().is_err());
        assert!("alloc".parse::<Setup>().is_err());
    }
}
