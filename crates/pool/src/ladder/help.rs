//! Who is asked for room beyond the pool's own memory of a device: reliefs, and elastic buffers that
//! can move.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;

use super::Rung;
use crate::device::Device;
use crate::elastic::relief::{self, Way};
use crate::place::Place;
use crate::request::Request;
use crate::sync::thread_local;

/// Who can make room on a device from beyond it: moves what can move to a neighbour or to the host,
/// or brings memory from there.
pub trait Relief: Send + Sync {
    /// Makes room on `device` for `request`, which may borrow, and says whether it did: then the
    /// request is tried again from the first rung on. Waits only if the request may.
    ///
    /// Called with no lock of the pool held: it may allocate and free. A panic counts as no help.
    fn relieve(&self, device: DeviceId, request: &Request) -> bool;
}

impl<F: Fn(DeviceId, &Request) -> bool + Send + Sync> Relief for F {
    fn relieve(&self, device: DeviceId, request: &Request) -> bool {
        self(device, request)
    }
}

/// What fills the rungs beyond the device.
#[derive(Clone, Default)]
pub(crate) struct Reliefs {
    pub(crate) neighbour: Option<Arc<dyn Relief>>,
    pub(crate) host: Option<Arc<dyn Relief>>,
}

impl fmt::Debug for Reliefs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (neighbour, host) = (self.neighbour.is_some(), self.host.is_some());
        f.debug_struct("Reliefs").field("neighbour", &neighbour).field("host", &host).finish()
    }
}

impl Reliefs {
    /// Who is asked on a rung, for requests that may borrow.
    pub(super) fn of(&self, rung: Rung, request: &Request) -> Option<&Arc<dyn Relief>> {
        let filled = match rung {
            Rung::Neighbour => self.neighbour.as_ref(),
            Rung::Host => self.host.as_ref(),
            _ => None,
        };
        filled.filter(|_| request.can_borrow())
    }
}

thread_local! {
    /// A callback or a relief of this thread is running: its own requests must not ask again.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether anybody is to be asked on a rung beyond the device.
pub(super) fn is_filled(device: &Device, rung: Rung, request: &Request) -> bool {
    if IN_CALLBACK.with(Cell::get) {
        return false;
    }
    let can_help = |way| {
        let here = Place::Device(device.plan.device);
        device.places().is_some_and(|places| relief::can_help(&places, here, way, request))
    };
    device.reliefs.of(rung, request).is_some() || way(rung).is_some_and(can_help)
}

/// Asks who was set to make room; then elastic buffers move, if that did not help.
pub(super) fn relieve(device: &Device, rung: Rung, request: &Request) -> bool {
    let home = device.plan.device;
    let set = device.reliefs.of(rung, request);
    if set.is_some_and(|relief| ask(|| heard(|| relief.relieve(home, request)))) {
        return true;
    }
    let (Some(way), Some(places)) = (way(rung), device.places()) else { return false };
    let here = Place::Device(home);
    relief::can_help(&places, here, way, request)
        && ask(|| heard(|| relief::help(&places, here, way, request)))
}

fn way(rung: Rung) -> Option<Way> {
    match rung {
        Rung::Neighbour => Some(Way::Neighbour),
        Rung::Host => Some(Way::Host),
        _ => None,
    }
}

/// Asks others for room, unless this thread is doing that already.
pub(super) fn ask(others: impl FnOnce() -> bool) -> bool {
    if IN_CALLBACK.with(|it| it.replace(true)) {
        return false;
    }
    let helped = others();
    IN_CALLBACK.with(|it| it.set(false));
    helped
}

/// What somebody says who may panic.
pub(super) fn heard(other: impl FnOnce() -> bool) -> bool {
    thrown(other).unwrap_or_else(|_| {
        vmm_sys::say!(warn, "a callback for short memory panicked");
        false
    })
}
