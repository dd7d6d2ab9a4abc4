//! [`Balance`]: cold elastic buffers move from a device that is full to one that is empty. Off unless
//! asked for.
//!
//! A look at the devices finds at most one move, which the mover makes; the next begins when it has
//! ended. Full and empty lie apart, so that what moved does not move back, and bytes are counted
//! against a budget, so that the links stay the programs'.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use vmm_sys::caught::caught;
use vmm_sys::object::RelaxedCapture;
use vmm_sys::{Call, DeviceId, DriverError, DriverResult};

use crate::device::Device;
use crate::elastic::Move;
use crate::elastic::body::Body;
use crate::elastic::migrate::{Migration, MigrationState, Task};
use crate::error::Error;
use crate::idle::Clock;
use crate::mover::Job;
use crate::places::Places;
use crate::sync::Mutex;

/// Time between two looks, in milliseconds.
const PERIOD_MS: u64 = 100;

/// When elastic buffers move by themselves: [`PoolBuilder::balance`](crate::PoolBuilder::balance).
///
/// Only buffers that allow it do ([`ElasticBuilder::movable`](crate::ElasticBuilder::movable)), and
/// only while nobody uses them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// From this part of its memory on a device is full, 0 to 1.
    pub full: f64,
    /// A buffer moves only to where no more than this part is taken afterwards, 0 to `full`.
    pub empty: f64,
    /// A buffer is cold that was not used for so long, in milliseconds.
    pub cold_ms: u64,
    /// What may be moved, in bytes a second.
    pub bytes_per_s: u64,
}

impl Default for Balance {
    /// Full from nine tenths on, empty to six; cold after 5 s; 1 GiB a second.
    fn default() -> Balance {
        Balance { full: 0.9, empty: 0.6, cold_ms: 5000, bytes_per_s: 1 << 30 }
    }
}

impl Balance {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |setting, value: f64, expected: &str| {
            Err(Error::BadSetting { setting, value: value.to_string(), expected: expected.into() })
        };
        if !(self.full > 0.0 && self.full <= 1.0) {
            return refuse("balance: full", self.full, "more than 0, at most 1");
        }
        if !(self.empty > 0.0 && self.empty < self.full) {
            return refuse("balance: empty", self.empty, "more than 0, less than full");
        }
        if self.bytes_per_s == 0 {
            return refuse("balance: bytes_per_s", 0.0, "at least 1");
        }
        Ok(())
    }
}

/// What the last look found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BalanceVerdict {
    /// Nobody has looked.
    #[default]
    NotLooked,
    /// No device is full.
    Balanced,
    /// A move is under way.
    Moving,
    /// A device is full, but no buffer there is movable, unused and cold.
    NothingCold {
        /// The device.
        device: DeviceId,
    },
    /// A device is full, but nowhere is room for any of its cold buffers.
    NowhereEmpty {
        /// The device.
        device: DeviceId,
    },
    /// A device is full, and the budget is spent for now.
    BudgetSpent {
        /// The device.
        device: DeviceId,
    },
    /// The driver did not say how full a device is, and no other is full.
    NotSeen {
        /// The device.
        device: DeviceId,
        /// What it said instead.
        refused: DriverError,
    },
}

impl fmt::Display for BalanceVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BalanceVerdict::NotLooked => f.write_str("not looked yet"),
            BalanceVerdict::Balanced => f.write_str("no device is full"),
            BalanceVerdict::Moving => f.write_str("a buffer is moving"),
            BalanceVerdict::NothingCold { device } => {
                write!(f, "{device} is full, but nothing there is movable, unused and cold")
            }
            BalanceVerdict::NowhereEmpty { device } => {
                write!(f, "{device} is full, but nowhere is room for its cold buffers")
            }
            BalanceVerdict::BudgetSpent { device } => {
                write!(f, "{device} is full, and the budget is spent for now")
            }
            BalanceVerdict::NotSeen { device, refused } => {
                write!(f, "{device}: how full it is could not be asked: {refused}")
            }
        }
    }
}

/// One move that balance asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalanceMove {
    /// The buffer.
    pub address: u64,
    /// What it had, in bytes.
    pub bytes: u64,
    /// From where.
    pub from: DeviceId,
    /// To where.
    pub to: DeviceId,
    /// How much of `from` was taken, in thousandths of its memory.
    pub from_taken_permille: u64,
    /// How long it had not been used, in milliseconds.
    pub cold_ms: u64,
}

/// What balance did, and why it does what it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalanceStats {
    /// What the last look found.
    pub verdict: BalanceVerdict,
    /// Moves that succeeded (count).
    pub moves: u64,
    /// What they moved, in bytes.
    pub moved_bytes: u64,
    /// Moves that failed, most often since the buffer was used after all (count).
    pub failed: u64,
    /// Whether a move is under way.
    pub moving: bool,
    /// The last move that was asked for.
    pub last: Option<BalanceMove>,
}

/// A pool's balance.
#[derive(Debug)]
pub(crate) struct Balancer {
    settings: Balance,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    due_ms: u64,
    /// What may be moved now. Below zero where a buffer was larger than what there was.
    budget_bytes: i64,
    earned_ms: Option<u64>,
    under_way: Option<Migration>,
    stats: BalanceStats,
}

/// A device, as a look finds it.
struct Seen<'a> {
    device: &'a Device,
    taken_bytes: u64,
    total_bytes: u64,
}

impl Seen<'_> {
    fn part(&self, more_bytes: u64) -> f64 {
        (self.taken_bytes + more_bytes) as f64 / self.total_bytes as f64
    }
}

impl Balancer {
    pub(crate) fn new(settings: Balance, clock: Clock) -> Balancer {
        Balancer { settings, clock, state: Mutex::default() }
    }

    pub(crate) fn stats(&self) -> BalanceStats {
        let mut state = self.state.lock();
        state.settle();
        BalanceStats { moving: state.under_way.is_some(), ..state.stats.clone() }
    }

    /// One look, if it is time or `now` asks for it.
    pub(crate) fn look(&self, places: &Places, now: bool) {
        let now_ms = self.clock.now_ms();
        {
            let mut state = self.state.lock();
            if !now && now_ms < state.due_ms {
                return;
            }
            state.due_ms = now_ms.saturating_add(PERIOD_MS);
            state.earn(now_ms, self.settings.bytes_per_s);
            state.settle();
            if state.under_way.is_some() {
                state.stats.verdict = BalanceVerdict::Moving;
                return;
            }
        }
        let found = self.find(places, now_ms);
        let mut state = self.state.lock();
        let (verdict, task) = match found {
            Err(verdict) => (verdict, None),
            Ok((_, plan)) if state.budget_bytes <= 0 => {
                (BalanceVerdict::BudgetSpent { device: plan.from }, None)
            }
            Ok((body, plan)) => {
                let order = Move::to(plan.to).patience(Duration::ZERO);
                let (task, migration) = Task::new(body, order);
                state.budget_bytes = state.budget_bytes.saturating_sub_unsigned(plan.bytes);
                state.stats.last = Some(plan);
                state.under_way = Some(migration);
                (BalanceVerdict::Moving, Some(task))
            }
        };
        state.stats.verdict = verdict;
        drop(state);
        if let Some(task) = task {
            vmm_sys::say!(debug, "balance moves a cold buffer");
            places.mover.submit(Job::Move(task));
        }
    }

    /// The coldest buffer of the fullest device that has somewhere to go.
    fn find(
        &self,
        places: &Places,
        now_ms: u64,
    ) -> Result<(Arc<Body>, BalanceMove), BalanceVerdict> {
        let mut verdict = BalanceVerdict::Balanced;
        let mut seen: Vec<Seen<'_>> = Vec::with_capacity(places.devices.len());
        for device in &places.devices {
            match see(device) {
                Ok(it) => seen.push(it),
                Err(refused) => {
                    let device = device.plan.device;
                    vmm_sys::say!(debug, %device, error = %refused, "balance leaves a device out");
                    verdict = BalanceVerdict::NotSeen { device, refused };
                }
            }
        }
        seen.sort_by(|a, b| b.part(0).total_cmp(&a.part(0)));
        for full in seen.iter().filter(|it| it.part(0) >= self.settings.full) {
            let device = full.device.plan.device;
            let mut cold: Vec<(u64, u64, Arc<Body>)> = places
                .bodies()
                .into_iter()
                .filter(|body| body.shape.movable && body.home() == device)
                .filter_map(|body| {
                    let cold_ms = body.uses.idle_ms(now_ms)?;
                    let bytes = body.bytes_at(device.into());
                    (cold_ms >= self.settings.cold_ms && bytes > 0)
                        .then_some((cold_ms, bytes, body))
                })
                .collect();
            if cold.is_empty() {
                verdict = BalanceVerdict::NothingCold { device };
                continue;
            }
            cold.sort_by_key(|(cold_ms, bytes, _)| std::cmp::Reverse((*cold_ms, *bytes)));
            for (cold_ms, bytes, body) in cold {
                // The emptiest is the last.
                let to = seen.iter().rev().find(|it| it.part(bytes) <= self.settings.empty);
                let Some(to) = to else { continue };
                let plan = BalanceMove {
                    address: body.address(),
                    bytes,
                    from: device,
                    to: to.device.plan.device,
                    from_taken_permille: (full.part(0) * 1000.0) as u64,
                    cold_ms,
                };
                return Ok((body, plan));
            }
            verdict = BalanceVerdict::NowhereEmpty { device };
        }
        Err(verdict)
    }
}

impl State {
    /// Adds what the time since the last look allows, a second's worth at most.
    fn earn(&mut self, now_ms: u64, bytes_per_s: u64) {
        let most = i64::try_from(bytes_per_s).unwrap_or(i64::MAX);
        let earned = match self.earned_ms {
            None => most,
            Some(before_ms) => {
                let passed_ms = u128::from(now_ms.saturating_sub(before_ms));
                let bytes = u128::from(bytes_per_s) * passed_ms / 1000;
                i64::try_from(bytes).unwrap_or(i64::MAX)
            }
        };
        self.earned_ms = Some(now_ms);
        self.budget_bytes = self.budget_bytes.saturating_add(earned).min(most);
    }

    /// Counts the move that was under way, if it has ended.
    fn settle(&mut self) {
        let Some(migration) = &self.under_way else { return };
        match migration.state() {
            MigrationState::Done(moved) => {
                self.stats.moves += 1;
                self.stats.moved_bytes += moved.bytes;
            }
            MigrationState::Failed(error) => {
                vmm_sys::say!(debug, %error, "a move for balance failed");
                self.stats.failed += 1;
            }
            MigrationState::Waiting | MigrationState::Moving => return,
        }
        self.under_way = None;
    }
}

/// How full a device is: by the pool's limit, or by what the driver says of everybody's memory, whichever
/// is more. What lies in the stock is not taken: it serves anybody.
fn see(device: &Device) -> DriverResult<Seen<'_>> {
    let stock_bytes = device.depot.stock.lock().bytes();
    let ours = (device.depot.held_bytes().saturating_sub(stock_bytes), device.plan.limit_bytes);
    let info = {
        let _relaxed = RelaxedCapture::enter(&device.driver)?;
        caught(Call::MemGetInfo, || device.driver.mem_info(device.plan.device))?
    };
    let taken = info.total_bytes.saturating_sub(info.free_bytes).saturating_sub(stock_bytes);
    let all = (taken, info.total_bytes);
    let part = |(taken, total): (u64, u64)| taken as f64 / total.max(1) as f64;
    let (taken_bytes, total_bytes) = if part(ours) > part(all) { ours } else { all };
    Ok(Seen { device, taken_bytes, total_bytes: total_bytes.max(1) })
}
