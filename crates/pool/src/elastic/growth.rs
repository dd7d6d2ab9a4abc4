//! [`Growth`]: what a buffer is to grow by, and who may lend for it.

use std::ops::Range;

use vmm_sys::caught::caught;
use vmm_sys::{Call, DeviceId, PeerAttribute};

use super::body::Body;
use crate::error::Error;
use crate::place::Place;
use crate::places::{Places, Site};

/// What a buffer is to grow by: see [`ElasticBuffer::grow`](super::ElasticBuffer::grow).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Growth {
    ranges: Vec<Range<u64>>,
    /// Where the memory lies, if not at home.
    pub(super) place: Option<Place>,
    pub(super) lenders: Lenders,
}

impl Growth {
    /// Whatever is missing below `bytes`.
    pub fn to(bytes: u64) -> Growth {
        Growth::range(0..bytes)
    }

    /// Whatever is missing in these bytes.
    pub fn range(range: Range<u64>) -> Growth {
        Growth::ranges([range])
    }

    /// Whatever is missing in all of these ranges, which may touch or overlap: one growth, all or
    /// nothing over them together, with one new generation. Hooks are told once, of everything
    /// between the first chunk and the last.
    pub fn ranges(ranges: impl IntoIterator<Item = Range<u64>>) -> Growth {
        let ranges = ranges.into_iter().collect();
        Growth { ranges, place: None, lenders: Lenders::Nobody }
    }

    /// What the home cannot give may be borrowed from these places, as far as their budgets go
    /// ([`PoolBuilder::lend`](crate::PoolBuilder::lend)): the one with the fastest link first,
    /// nodes of the host last.
    #[must_use]
    pub fn borrow_from(self, lenders: impl IntoIterator<Item = impl Into<Place>>) -> Growth {
        let lenders = lenders.into_iter().map(Into::into).collect();
        Growth { lenders: Lenders::Named(lenders), ..self }
    }

    /// The same from every place that lends.
    #[must_use]
    pub fn borrow_from_any(self) -> Growth {
        Growth { lenders: Lenders::Any, ..self }
    }

    /// All of it at a place that the caller names.
    pub(super) fn at(self, place: Place) -> Growth {
        Growth { place: Some(place), ..self }
    }

    /// The slots that it touches, each once, in order.
    pub(super) fn slots(&self, body: &Body) -> Result<Vec<u32>, Error> {
        let mut slots = Vec::new();
        for Range { start, end } in &self.ranges {
            slots.extend(body.slots_over(*start, end.saturating_sub(*start))?);
        }
        if self.ranges.len() > 1 {
            slots.sort_unstable();
            slots.dedup();
        }
        Ok(slots)
    }
}

impl From<u64> for Growth {
    fn from(bytes: u64) -> Growth {
        Growth::to(bytes)
    }
}

impl From<Range<u64>> for Growth {
    fn from(range: Range<u64>) -> Growth {
        Growth::range(range)
    }
}

/// What a growth brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grown {
    /// Memory that was committed anew, in bytes.
    pub bytes: u64,
    /// What of that is borrowed, by lender.
    pub borrowed: Vec<(Place, u64)>,
}

/// Who may lend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lenders {
    #[default]
    Nobody,
    Named(Vec<Place>),
    Any,
}

impl Lenders {
    /// The first of those named that is no place of the pool's.
    pub(super) fn unknown(&self, places: &Places) -> Option<Place> {
        match self {
            Lenders::Named(named) => {
                named.iter().copied().find(|place| places.site(*place).is_err())
            }
            Lenders::Nobody | Lenders::Any => None,
        }
    }

    /// The lenders for a buffer, those first that its home reaches fastest. Devices that lend nothing
    /// are among them, so that they can be named in an answer.
    ///
    /// Asks the driver about links, which makes no context.
    pub(crate) fn in_order<'a>(&self, body: &'a Body) -> Vec<Site<'a>> {
        by_distance(&body.places, body.home(), |site| self.include(site))
    }

    /// Whether a place may lend.
    pub(super) fn include(&self, site: &Site<'_>) -> bool {
        match (self, site.place) {
            (Lenders::Nobody, _) => false,
            (Lenders::Named(named), place) => named.contains(&place),
            (Lenders::Any, Place::Device(_)) => true,
            (Lenders::Any, Place::HostNuma(_)) => site.depot.lending.is_for_any(),
        }
    }
}

/// The other places that `include` says, those first that `home` reaches fastest.
pub(crate) fn by_distance<'a>(
    places: &'a Places,
    home: DeviceId,
    include: impl Fn(&Site<'a>) -> bool,
) -> Vec<Site<'a>> {
    let others = places.sites().filter(|site| site.place != Place::Device(home));
    let mut sites: Vec<Site<'a>> = others.filter(include).collect();
    if sites.len() > 1 {
        sites.sort_by_cached_key(|site| (rank(places, home, site.place), site.place));
    }
    sites
}

/// How far a place is from a home: 0 is the fastest link. The host is farther than every device.
fn rank(places: &Places, home: DeviceId, place: Place) -> (bool, i32) {
    match place {
        Place::Device(owner) => {
            let rank = caught(Call::DeviceGetP2pAttribute, || {
                places.driver.peer_attribute(PeerAttribute::PerformanceRank, home, owner)
            });
            (false, rank.unwrap_or(i32::MAX))
        }
        Place::HostNuma(_) => (true, 0),
    }
}
