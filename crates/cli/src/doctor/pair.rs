//! One device at the memory of another: granted, then read by a copy and by a kernel.

use std::sync::Arc;

use vmm_sys::Driver;
use vmm_sys::object::Stream;
use vmm_sys::topology::LinkFacts;

use super::ability::meaning;
use super::bytes::{Outcome, Scratch, Trouble, kernel_check};
use super::finding::Finding;
use super::remedy;
use super::trial::is_about_the_kernel;

const ID: &str = "peer";

/// The owner's bytes, as this pair's number in the pattern, so that no two pairs share one.
fn value(link: &LinkFacts) -> u32 {
    0x7EE4_0000 | link.owner.0 << 8 | link.accessor.0
}

pub(super) fn peer(driver: &Arc<dyn Driver>, link: &LinkFacts) -> Outcome {
    let outcome = match link.access.error() {
        Some(error) => {
            let advice = if error.is_out_of_memory() {
                remedy::of(error)
            } else {
                "each device works alone; for more choose devices with a link (nvidia-smi topo -m)"
            };
            Finding::warn(ID, what(link), format!("not granted: {}", meaning(error)))
                .advise(advice)
                .refused_by(error)
                .into()
        }
        None => granted(driver, link),
    };
    let finding = outcome
        .finding
        .with("owner", link.owner.0)
        .with("rank", link.rank)
        .with("native_atomics", link.native_atomics)
        .with("advertised", link.access.advertised);
    Outcome { finding: finding.about(link.accessor), wrong_bytes: outcome.wrong_bytes }
}

fn what(link: &LinkFacts) -> String {
    format!("{} reads {}", link.accessor, link.owner)
}

fn granted(driver: &Arc<dyn Driver>, link: &LinkFacts) -> Outcome {
    match read(driver, link) {
        Ok(seen) => {
            let rank = link.rank.map_or("unknown".to_owned(), |rank| rank.to_string());
            let text = format!("granted; {seen} (link rank {rank}, 0 is the fastest)");
            Finding::ok(ID, what(link), text).into()
        }
        Err(Trouble::Refused(error)) => {
            let text = format!("granted, then refused: {}", meaning(&error));
            Finding::warn(ID, what(link), text).refused_by(&error).into()
        }
        Err(Trouble::Wrong(text)) => {
            let advice = "do not use these two together: switch ACS off in the PCIe bridges and \
                          the IOMMU off or to pass-through";
            let finding = Finding::fail(ID, what(link), format!("granted, but {text}"));
            Outcome { finding: finding.advise(advice), wrong_bytes: true }
        }
    }
}

/// What was seen to arrive right.
fn read(driver: &Arc<dyn Driver>, link: &LinkFacts) -> Result<&'static str, Trouble> {
    let (owner, accessor) = (link.owner, link.accessor);
    let value = value(link);
    let source = Scratch::map(driver, owner, &[owner, accessor])?;
    let own = Scratch::map(driver, accessor, &[accessor])?;
    source.write(owner, value)?;
    source.check(accessor, value)?;
    let stream = Stream::create(driver, accessor)?;
    let seen = match kernel_check(accessor, &stream, &source, &own, value) {
        Ok(()) => "bytes read right by a copy and by a kernel",
        Err(Trouble::Refused(error)) if is_about_the_kernel(&error) => {
            "bytes read right by a copy; test kernels do not run here"
        }
        Err(trouble) => return Err(trouble),
    };
    source.end()?;
    own.end()?;
    Ok(seen)
}
