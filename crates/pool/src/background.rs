//! The thread that keeps the stock's marks, retires old mappings and empties idle lanes, so that
//! requests need not.
//!
//! It makes one driver call at a time and lets requesters go first. If it cannot be started, or
//! dies, requests do the work themselves. A panic in it is counted, and it goes on; after some it ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys::caught::thrown;

use crate::device::Device;
use crate::elastic::operation::is_operating;
use crate::elastic::{ahead, homecoming};
use crate::idle;
use crate::lane::{Wait, sweep};
use crate::places::Places;
use crate::sync::atomic::Ordering;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex};
use crate::turn::Turn;

/// How often the marks and the limbo are looked at while there is something to do, and else.
const BUSY_PERIOD: Duration = Duration::from_millis(1);
const IDLE_PERIOD: Duration = Duration::from_millis(20);
/// How long a drop waits for a thread that is inside a driver call.
const END_WAIT: Duration = Duration::from_secs(5);
/// How long it rests after a panic, and after how many it ends.
const PANIC_REST: Duration = Duration::from_millis(200);
const PANICS_MAX: u32 = 8;

#[derive(Debug, Default)]
struct Flags {
    /// The thread was started.
    started: bool,
    /// Somebody asked for something.
    asked: bool,
    stop: bool,
    ended: bool,
}

/// What the thread and the others tell each other.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    flags: Mutex<Flags>,
    changed: Condvar,
}

impl Signal {
    /// Lets the thread look for work now. False if there is none to do it.
    pub(crate) fn wake(&self) -> bool {
        let mut flags = self.flags.lock();
        let runs = flags.started && !flags.ended && !flags.stop;
        flags.asked |= runs;
        if runs {
            self.changed.notify_all();
        }
        runs
    }
}

/// A running thread. Dropping it ends the thread at once.
#[derive(Debug)]
pub(crate) struct Background {
    signal: Arc<Signal>,
    thread: JoinHandle<()>,
}

impl Background {
    /// Starts the thread, or says why not in the log: the pool works without.
    pub(crate) fn start(places: Arc<Places>) -> Option<Background> {
        let signal = places.signal.clone();
        let shared = signal.clone();
        signal.flags.lock().started = true;
        let thread =
            thread::Builder::new().name("vmm-pool".into()).spawn(move || run(places, &shared));
        match thread {
            Ok(thread) => Some(Background { signal, thread }),
            Err(error) => {
                vmm_sys::say!(warn, %error, "no background thread; requests do its work");
                signal.flags.lock().started = false;
                None
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if vmm_sys::process::is_forked_child() {
            return;
        }
        let mut flags = self.signal.flags.lock();
        flags.stop = true;
        self.signal.changed.notify_all();
        // A callback may drop the last handle in the thread itself, and a hook in a thread that it waits
        // for: then it ends after this.
        if self.thread.thread().id() == thread::current().id() || is_operating() {
            return;
        }
        let deadline = Instant::now() + END_WAIT;
        while !flags.ended {
            if self.signal.changed.wait_until(&mut flags, deadline).timed_out() {
                break; // stuck in the driver: it ends by itself when the call returns
            }
        }
    }
}

/// Says that the thread has ended, also if it panicked.
struct Ended<'a>(&'a Signal);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.flags.lock().ended = true;
        self.0.changed.notify_all();
    }
}

/// The places of the thread. While it lives, requests leave its work to it.
struct Watched(Arc<Places>);

impl Watched {
    fn new(places: Arc<Places>) -> Watched {
        places.devices.iter().for_each(|device| device.watch.keep(true));
        Watched(places)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.devices.iter().for_each(|device| device.watch.keep(false));
        // Nobody is told any more that the thread would do it: who waits for it would wait for ever.
        self.0.bodies().iter().for_each(|body| body.ahead.end());
    }
}

fn run(places: Arc<Places>, signal: &Signal) {
    let _ended = Ended(signal);
    // Made after the guard, so that it is dropped before: whoever waits for the end finds that
    // this thread holds nothing of the devices any more.
    let watched = Watched::new(places);
    let places = &watched.0;
    let mut panics = 0;
    loop {
        {
            let mut flags = signal.flags.lock();
            if flags.stop {
                return;
            }
            let busy = places.devices.iter().any(|device| device.has_limbo())
                || places.hosts.iter().any(|host| !host.depot.leaving.is_empty());
            let period = if busy { BUSY_PERIOD } else { IDLE_PERIOD };
            if !flags.asked {
                signal.changed.wait_for(&mut flags, period);
            }
            flags.asked = false;
        }
        match thrown(|| look(places, signal)) {
            Ok(true) => {}
            Ok(false) => {
                signal.flags.lock().stop = true;
                return;
            }
            Err(words) => {
                panics += 1;
                places.thread_panics.fetch_add(1, Ordering::Relaxed);
                vmm_sys::say!(error, words, panics, "the background thread of a pool panicked");
                let mut flags = signal.flags.lock();
                flags.stop |= panics >= PANICS_MAX;
                if !flags.stop {
                    signal.changed.wait_for(&mut flags, PANIC_REST);
                }
            }
        }
    }
}

/// One look at everything. False if there is nothing to look at any more.
fn look(places: &Places, signal: &Signal) -> bool {
    let stopped = || signal.flags.lock().stop;
    for body in places.bodies() {
        if stopped() {
            return false;
        }
        ahead::serve(&body, Turn::Background);
        homecoming::look(&body);
    }
    for device in &places.devices {
        if stopped() || device.driver.is_gone() {
            return false;
        }
        serve(device, &stopped);
    }
    serve_hosts(places, &stopped);
    if let Some(balancer) = &places.balancer {
        balancer.look(places, false);
    }
    true
}

/// One look at the host's nodes, a driver call at a time.
fn serve_hosts(places: &Places, stopped: &dyn Fn() -> bool) {
    let sites = places.sites().filter(|site| site.place.device().is_none());
    for (site, host) in sites.zip(&places.hosts) {
        if stopped() || places.driver.is_gone() {
            return;
        }
        site.sweep(Wait::No, Turn::Background);
        let made = host.depot.stock_up(host.stock_bytes, u64::MAX, Turn::Background, stopped);
        if let Err(shortage) = made {
            vmm_sys::say!(debug, ?shortage, "the stock of host memory stays below its mark");
        }
    }
}

/// One look at a device, a driver call at a time.
fn serve(device: &Device, stopped: &dyn Fn() -> bool) {
    if device.has_limbo() {
        let lanes = device.lanes.lock().all();
        for lane in lanes {
            if stopped() {
                return;
            }
            sweep(lane.cell, Wait::No, Turn::Background);
        }
        device.sweep_leaving(Wait::No, Turn::Background);
    }
    idle::look(device, stopped);
    let (low, high) = (device.plan.stock_low_bytes, device.plan.stock_high_bytes);
    if let Err(shortage) = device.depot.stock_up(low, high, Turn::Background, stopped) {
        // No memory to be had now; the next period asks again.
        vmm_sys::say!(debug, ?shortage, "the stock stays below its low mark");
    }
}
