//! [`Room`]: what a growth could get now, by the pool's own figures.

use vmm_sys::{ChunkProps, DeviceId};

use crate::elastic::by_distance;
use crate::lane::idle_bytes;
use crate::lanes::LaneRef;
use crate::out_of_memory::device_memory;
use crate::place::Place;
use crate::places::{Places, Site};
use crate::verify::leaving_bytes;

/// What an elastic buffer could grow by now, by whole chunks: see [`Pool::room`](crate::Pool::room).
///
/// An estimate, and a figure of the moment: other threads take and give meanwhile, and other
/// programs use the devices. Nothing is reserved by asking.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Room {
    /// The home.
    pub device: DeviceId,
    /// The length of the chunks that it is counted in, in bytes.
    pub chunk_bytes: u64,
    /// What the home would give, in bytes. What the pool's limit and a shared budget leave and the
    /// driver says is free; the stock, in whatever lengths; what is in limbo and is waited for; and
    /// the wholly free chunks of lanes, which the growth would take from them. Not counted: what is
    /// freed but parked for other streams, other pools of the process, callbacks, quotas. In limbo
    /// behind a guard that is alive, or a capture, it cannot be waited for after all.
    pub own_bytes: u64,
    /// What others would lend, in the order in which they would be asked.
    pub lenders: Vec<LenderRoom>,
}

/// What one place would lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LenderRoom {
    /// The lender.
    pub place: Place,
    /// Whether that is memory of the host.
    pub is_host: bool,
    /// What it would give, in bytes: its stock of such chunks, and what its limit leaves and the driver
    /// says is free; no more than its lending budget leaves. Of a device that holds nothing yet, its
    /// whole memory stands for what is free. The anchor of its first loan is not in it.
    pub bytes: u64,
    /// Whether a growth must name it ([`Growth::borrow_from`](crate::Growth::borrow_from)), since it
    /// lends nothing to those who name nobody.
    pub only_if_named: bool,
}

impl Room {
    /// What a growth that may borrow from anybody would get, in bytes.
    pub fn with_any_lender_bytes(&self) -> u64 {
        let any = self.lenders.iter().filter(|lender| !lender.only_if_named);
        any.map(|lender| lender.bytes).fold(self.own_bytes, u64::saturating_add)
    }
}

/// What a buffer with this home and such chunks could get.
pub(crate) fn room(
    places: &Places,
    home: DeviceId,
    props: impl Fn(Place) -> ChunkProps,
    chunk_bytes: u64,
) -> Room {
    if vmm_sys::process::is_forked_child() {
        return Room { device: home, chunk_bytes, own_bytes: 0, lenders: Vec::new() };
    }
    let lends = |site: &Site<'_>| site.depot.lending.budget_bytes() > 0;
    let lenders = by_distance(places, home, lends).into_iter();
    let whole = |bytes: u64| bytes - bytes % chunk_bytes;
    // The first loan takes a chunk more to keep the link up.
    let anchor_bytes = |site: Site<'_>| match site.place {
        Place::Device(_) if site.depot.anchor_bytes() == 0 => site.depot.terms.granularity_bytes,
        _ => 0,
    };
    let lender = |site: Site<'_>| {
        let lending = &site.depot.lending;
        let bytes = match site.check_chunk(chunk_bytes) {
            Ok(()) => lendable_bytes(&site, &props(site.place), chunk_bytes, anchor_bytes(site)),
            Err(_) => 0,
        };
        LenderRoom {
            place: site.place,
            is_host: site.place.device().is_none(),
            bytes: whole(bytes.min(lending.room_bytes())),
            only_if_named: !lending.is_for_any(),
        }
    };
    Room {
        device: home,
        chunk_bytes,
        own_bytes: whole(own_bytes(places, home)),
        lenders: lenders.map(lender).collect(),
    }
}

/// What a home gives that is pressed by all means of its own.
fn own_bytes(places: &Places, home: DeviceId) -> u64 {
    let Some(device) = places.device(home) else { return 0 };
    let idle_bytes = {
        // Held on, so that two threads never lock the same lanes in two orders.
        let lanes = device.lanes.lock();
        let guards: Vec<_> = lanes.all().into_iter().filter_map(LaneRef::lock).collect();
        let states: Vec<_> = guards.iter().map(|guard| &**guard).collect();
        let free_bytes: u64 = states.iter().map(|state| idle_bytes(state)).sum();
        free_bytes + leaving_bytes(&states, device)
    };
    let ready_bytes = device.depot.stock.lock().bytes() + idle_bytes;
    let free_bytes = device_memory(device).map_or(u64::MAX, |info| info.free_bytes);
    device.depot.room_bytes().min(free_bytes).saturating_add(ready_bytes)
}

/// What a lender gives, its budget apart.
fn lendable_bytes(site: &Site<'_>, props: &ChunkProps, chunk_bytes: u64, anchor_bytes: u64) -> u64 {
    let stock_bytes: u64 = {
        let stock = site.depot.stock.lock();
        let fit = stock.counts_of_all(props).filter(|(bytes, _)| *bytes == chunk_bytes);
        fit.map(|(bytes, count)| bytes * count as u64).sum()
    };
    let made_bytes = site.depot.room_bytes().min(site.free_bytes()).saturating_sub(anchor_bytes);
    // Chunk by chunk: no two rests make one.
    (made_bytes - made_bytes % chunk_bytes).saturating_add(stock_bytes)
}
