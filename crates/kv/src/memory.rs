//! [`Memory`]: what both forms of a cache have in common: a buffer, who changes its memory, and what is
//! done when there is none left.

use std::sync::{Arc, Weak};
use std::time::Duration;

use vmm_pool::{ElasticBuffer, ElasticError, Error, Growth, LenderRoom, Place, Pool};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use crate::error::KvError;
use crate::grower::Bell;
use crate::hands::{Hands, Held, is_holding};
use crate::room::{KvRoom, MAPPINGS_MAX};
use crate::shortage::{Hooks, KvShortage};
use crate::stats::KvStats;
use crate::sync::atomic::{AtomicU64, Ordering};

/// How often hooks may say that they freed something, for one request.
const ROUNDS_MAX: u32 = 8;

/// How long who is short elsewhere in the pool waits for a change of the cache that is under way.
const HELP_PATIENCE: Duration = Duration::from_millis(20);

/// Who may lend memory to a cache that its own device has no more for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Lending {
    /// Nobody.
    #[default]
    Nobody,
    /// Every place that lends ([`PoolBuilder::lend`](vmm_pool::PoolBuilder::lend)).
    Any,
    /// These.
    Places(Vec<Place>),
}

impl Lending {
    /// Whether growth asks this one.
    pub(crate) fn includes(&self, lender: &LenderRoom) -> bool {
        match self {
            Lending::Nobody => false,
            Lending::Any => !lender.only_if_named,
            Lending::Places(places) => places.contains(&lender.place),
        }
    }

    /// The same growth, with these lenders.
    pub(crate) fn apply(&self, growth: Growth) -> Growth {
        match self {
            Lending::Nobody => growth,
            Lending::Any => growth.borrow_from_any(),
            Lending::Places(places) => growth.borrow_from(places.iter().copied()),
        }
    }
}

/// What happened to a cache, since it was built.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) background_growths: AtomicU64,
    pub(crate) foreground_growths: AtomicU64,
    pub(crate) evictions: AtomicU64,
}

impl Counts {
    /// The figures that are counts of what happened.
    pub(crate) fn stats(&self) -> KvStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        KvStats {
            background_growths: read(&self.background_growths),
            foreground_growths: read(&self.foreground_growths),
            evictions: read(&self.evictions),
            ..KvStats::default()
        }
    }
}

/// One more.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The memory of a cache.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) pool: Pool,
    pub(crate) buffer: ElasticBuffer,
    pub(crate) stream: Stream,
    pub(crate) lending: Lending,
    pub(crate) hands: Hands,
    pub(crate) hooks: Hooks,
    pub(crate) bell: Arc<Bell>,
    pub(crate) counts: Counts,
}

impl Memory {
    pub(crate) fn new(
        pool: Pool,
        buffer: ElasticBuffer,
        stream: Stream,
        lending: Lending,
    ) -> Memory {
        Memory {
            pool,
            buffer,
            stream,
            lending,
            hands: Hands::default(),
            hooks: Hooks::default(),
            bell: Arc::default(),
            counts: Counts::default(),
        }
    }

    /// Memory that is there without pressing anybody, in bytes: to grow ahead of need is worth no
    /// eviction.
    pub(crate) fn room_bytes(&self) -> u64 {
        let room = self.buffer.room();
        let lent = room.lenders.iter().filter(|lender| self.lending.includes(lender));
        lent.map(|lender| lender.bytes).fold(room.own_bytes, u64::saturating_add)
    }

    /// Whether so much of it is there.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.room_bytes() >= bytes
    }

    /// What the cache could still take, beside `idle_bytes` of its own.
    pub(crate) fn room(&self, token_bytes: u64, idle_bytes: u64, sequences: u64) -> KvRoom {
        let room = self.buffer.room();
        let (mut borrowed_bytes, mut host_bytes) = (0u64, 0u64);
        for lender in &room.lenders {
            if lender.is_host {
                host_bytes = host_bytes.saturating_add(lender.bytes);
            } else if self.lending.includes(lender) {
                borrowed_bytes = borrowed_bytes.saturating_add(lender.bytes);
            }
        }
        // Idle memory is booked already.
        let mut quota_bytes = self.buffer.quota_room_bytes();
        let mut within_quota = |bytes: u64| {
            let bytes = bytes.min(quota_bytes);
            quota_bytes -= bytes;
            bytes
        };
        let here_bytes = within_quota(room.own_bytes).saturating_add(idle_bytes);
        KvRoom {
            here_tokens: here_bytes / token_bytes,
            borrowed_tokens: within_quota(borrowed_bytes) / token_bytes,
            host_tokens: host_bytes / token_bytes,
            sequences,
            mappings: MAPPINGS_MAX.saturating_sub(self.mappings()),
        }
    }

    /// Chunks that elastic buffers of the pool have mapped, this cache's included (count).
    pub(crate) fn mappings(&self) -> u64 {
        self.pool.elastic_mappings()
    }
}

/// What somebody needs memory for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

/// One form of a cache, as far as its memory goes.
pub(crate) trait Form: Send + Sync + 'static {
    fn memory(&self) -> &Memory;

    /// Takes in the memory that sequences left. It makes the driver calls that they did not.
    fn collect(&self, held: &Held<'_>);

    /// Gives memory without tokens back to the pool, until `keep_bytes` of it are left. Returns
    /// the bytes.
    fn give_idle(&self, held: &Held<'_>, keep_bytes: u64) -> u64;

    /// Does `work`, which needs memory. If there is none, the cache's own idle memory goes for it,
    /// and then what hooks evict. They run without the hands.
    fn with_room<T>(
        &self,
        need: Need,
        mut work: impl FnMut(&Held<'_>) -> Result<T, Error>,
    ) -> Result<T, KvError>
    where
        Self: Sized,
    {
        let memory = self.memory();
        let mut round = 0;
        loop {
            let cause = {
                let held = memory.hands.take()?;
                self.collect(&held);
                loop {
                    match work(&held) {
                        Ok(done) => return Ok(done),
                        Err(error) if !is_shortage(&error) => return Err(error.into()),
                        Err(error) if self.give_idle(&held, 0) == 0 => break error,
                        Err(_) => {}
                    }
                }
            };
            let (device, bytes) = (memory.buffer.device(), need.bytes);
            let shortage = KvShortage { device, bytes, is_own: true };
            // A hook must not be asked by what it asks for itself, nor from within another change.
            if round == ROUNDS_MAX || is_holding() || !memory.hooks.ask(&shortage) {
                return Err(KvError::NoMemory { tokens: need.tokens, bytes, cause });
            }
            count(&memory.counts.evictions);
            round += 1;
        }
    }

    /// Somebody else in the pool is short: idle memory goes, and then what hooks evict. Returns
    /// whether something went.
    fn help(&self, device: DeviceId, bytes: u64) -> bool {
        let memory = self.memory();
        let here = Place::Device(device);
        if !memory.buffer.stats().by_place.iter().any(|(place, _)| *place == here) {
            return false;
        }
        // Not for long: whoever changes this cache may be waiting for who is short. A shortage of its own
        // is met by `with_room`.
        let give = || {
            let held = memory.hands.take_within(HELP_PATIENCE)?;
            self.collect(&held);
            Some(self.give_idle(&held, 0))
        };
        match give() {
            None => return false,
            Some(0) => {}
            Some(_) => return true,
        }
        if !memory.hooks.ask(&KvShortage { device, bytes, is_own: false }) {
            return false;
        }
        count(&memory.counts.evictions);
        // Whoever has the hands now takes away what was freed.
        give().is_none_or(|bytes| bytes > 0)
    }
}

/// The callback by which the pool asks a cache, as long as that exists.
pub(crate) fn helper<F: Form>(form: &Arc<F>) -> impl Fn(DeviceId, u64) -> bool + use<F> {
    let form: Weak<F> = Arc::downgrade(form);
    move |device, bytes| form.upgrade().is_some_and(|form| form.help(device, bytes))
}

/// Whether idle memory of the cache, or eviction, can help.
pub(crate) fn is_shortage(error: &Error) -> bool {
    error.is_out_of_memory() || matches!(error, Error::Elastic(ElasticError::OverQuota { .. }))
}
