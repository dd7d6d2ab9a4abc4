//! The examination of a machine: can a pool work here, and if not, why not and what can be done.
//!
//! What the driver says of itself is shown, and then tried: an advertised ability that is refused
//! by a later call is a finding, and so is one that works without being advertised. Bytes are
//! written and read back, on each device and across each pair. The last check builds a real pool,
//! so that the doctor and the pool cannot disagree.
//!
//! Figures that platforms are known to get wrong (free memory, total memory) never decide
//! anything. Nothing is left behind, whichever call fails.

mod ability;
mod bytes;
mod finding;
mod identity;
mod library;
mod pair;
mod remedy;
#[cfg(test)]
mod tests;
mod trial;

use std::sync::Arc;

use vmm_sys::object::{failed_drops, retry_failed_drops};
use vmm_sys::topology::Topology;
use vmm_sys::{DeviceId, Driver, DriverError};

pub use finding::{Finding, Status};
pub use library::{no_driver, opened, simulated};

/// What the examination comes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Devices on which a pool was built, used, and found right.
    pub usable: Vec<DeviceId>,
    /// Why the others are not usable, and what makes the whole machine so.
    pub reasons: Vec<String>,
    /// Bytes that came back wrong: then nothing here can be trusted.
    pub wrong_bytes: bool,
}

impl Verdict {
    /// Whether a pool can work here.
    pub fn is_usable(&self) -> bool {
        !self.usable.is_empty() && !self.wrong_bytes
    }

    fn device_fails(&mut self, device: DeviceId, why: &str) {
        self.reasons.push(format!("{device}: {why}"));
    }
}

/// Where findings go, each as soon as it is known: should a call hang, the last line says where.
pub type Tell<'a> = &'a mut dyn FnMut(&Finding);

/// Examines every device that `driver` shows. The last finding is the verdict.
pub fn examine(driver: &Arc<dyn Driver>, tell: Tell<'_>) -> Verdict {
    let mut verdict = Verdict::default();
    if let Some(devices) = find_devices(driver, &mut verdict, tell) {
        let mut able = Vec::new();
        for &device in &devices {
            if examine_device(driver, device, &mut verdict, tell) {
                able.push(device);
            }
        }
        if devices.len() > 1 {
            examine_pairs(driver, &able, &mut verdict, tell);
        }
    }
    if let Some(finding) = leftovers(driver) {
        tell(&finding);
    }
    tell(&sum_up(&verdict));
    verdict
}

/// What the driver refused to take back, after one more try.
fn leftovers(driver: &Arc<dyn Driver>) -> Option<Finding> {
    let left = (!failed_drops(driver).is_empty()).then(|| retry_failed_drops(driver))?;
    let error = failed_drops(driver).pop()?;
    let text = format!("{left} object(s) could not be given back: {error}");
    Some(Finding::warn("leftovers", "leftovers", text).with("count", left).refused_by(&error))
}

/// The verdict where there is no driver to examine.
pub fn unusable(reason: &str) -> Finding {
    sum_up(&Verdict { reasons: vec![reason.to_owned()], ..Verdict::default() })
}

fn find_devices(
    driver: &Arc<dyn Driver>,
    verdict: &mut Verdict,
    tell: Tell<'_>,
) -> Option<Vec<DeviceId>> {
    tell(&library::version(driver));
    match driver.device_count() {
        Ok(0) => {
            let finding = Finding::fail("devices", "devices", "the driver shows no device")
                .advise(remedy::NO_DEVICE);
            verdict.reasons.push(finding.text().to_owned());
            tell(&finding);
            None
        }
        Ok(count) => {
            let text = format!("{count} device(s) to examine");
            tell(&Finding::ok("devices", "devices", text).with("count", count));
            Some((0..count).map(DeviceId).collect())
        }
        Err(error) => {
            let text = format!("the driver does not say how many there are: {error}");
            verdict.reasons.push(text.clone());
            tell(&Finding::fail("devices", "devices", text).refused_by(&error));
            None
        }
    }
}

/// Whether a pool works on the device.
fn examine_device(
    driver: &Arc<dyn Driver>,
    device: DeviceId,
    verdict: &mut Verdict,
    tell: Tell<'_>,
) -> bool {
    let topology = match Topology::probe(driver, &[device]) {
        Ok(topology) => topology,
        Err(error) => return give_up(device, "identity", "identity", &error, verdict, tell),
    };
    let Some(facts) = topology.device(device) else { return false };
    tell(&identity::identity(facts));
    tell(&identity::attributes(driver, device));
    tell(&identity::granularities(facts));
    tell(&identity::free_memory(device, driver.mem_info(device), facts.integrated));
    let calls = ability::memory_calls(facts);
    tell(&calls);
    if calls.status() == Status::Fail {
        verdict.device_fails(device, calls.text());
        return false;
    }
    tell(&trial::addresses(driver, facts));
    let required = [trial::streams, trial::copies, trial::kernels, trial::pool];
    for step in required {
        let outcome = step(driver, device);
        tell(&outcome.finding);
        verdict.wrong_bytes |= outcome.wrong_bytes;
        if outcome.finding.status() == Status::Fail {
            verdict.device_fails(device, outcome.finding.text());
            return false;
        }
    }
    for finding in ability::optional(facts) {
        tell(&finding);
    }
    verdict.usable.push(device);
    true
}

fn give_up(
    device: DeviceId,
    id: &'static str,
    what: &str,
    error: &DriverError,
    verdict: &mut Verdict,
    tell: Tell<'_>,
) -> bool {
    let text = format!("the device cannot be asked: {error}");
    verdict.device_fails(device, &text);
    tell(&Finding::fail(id, what, text).on(device).refused_by(error));
    false
}

/// Every ordered pair of devices that work alone.
fn examine_pairs(
    driver: &Arc<dyn Driver>,
    devices: &[DeviceId],
    verdict: &mut Verdict,
    tell: Tell<'_>,
) {
    let topology = match Topology::probe(driver, devices) {
        Ok(topology) => topology,
        Err(error) => {
            let text = format!("the pairs cannot be asked: {error}");
            tell(&Finding::warn("peer", "peers", text).refused_by(&error));
            return;
        }
    };
    for link in &topology.links {
        let outcome = pair::peer(driver, link);
        tell(&outcome.finding);
        if outcome.wrong_bytes {
            verdict.wrong_bytes = true;
            verdict.reasons.push(outcome.finding.text().to_owned());
        }
    }
}

fn sum_up(verdict: &Verdict) -> Finding {
    let names: Vec<_> = verdict.usable.iter().map(ToString::to_string).collect();
    let (names, reasons) = (names.join(", "), verdict.reasons.join("; "));
    let ordinals: Vec<_> = verdict.usable.iter().map(|device| device.0).collect();
    let finding = if !verdict.is_usable() {
        Finding::fail("verdict", "verdict", format!("not usable: {reasons}"))
            .advise("see the lines marked `fail` above")
    } else if !verdict.reasons.is_empty() {
        Finding::warn("verdict", "verdict", format!("usable on {names}; not on {reasons}")).advise(
            "name only usable devices to the pool, or hide the others with CUDA_VISIBLE_DEVICES",
        )
    } else {
        Finding::ok("verdict", "verdict", format!("usable on {names}"))
    };
    finding.with("usable_devices", ordinals)
}
