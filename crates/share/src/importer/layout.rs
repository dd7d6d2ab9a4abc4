//! The description of a buffer as it came from the other side, checked before anything is done with
//! it.

use std::collections::HashSet;
use std::time::Instant;

use vmm_sys::{ChunkProps, DeviceId, Driver, GranularityKind, HandleTypes, Location, Uuid};

use super::link::Link;
use crate::error::{AtStep, Refusal, ShareError};
use crate::steps::step;
use crate::wire::{Home, Message, PieceEntry};

/// The most addresses that a process can reserve.
const BYTES_MAX: u64 = 1 << 47;
/// The most pieces of a buffer that are taken: 2 TiB of the smallest.
const PIECES_MAX: u32 = 1 << 20;
const STEP: &str = "describing";

/// The pieces of one generation, by offset, disjoint.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) generation: u64,
    pub(super) pieces: Vec<PieceEntry>,
}

impl Layout {
    /// Where the last piece ends.
    pub(super) fn end_bytes(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.offset + piece.bytes)
    }
}

/// The GPUs of this process, by what they are called in every process.
#[derive(Debug)]
pub(super) struct Gpus(Vec<(Uuid, DeviceId)>);

impl Gpus {
    pub(super) fn ask(driver: &dyn Driver) -> Result<Gpus, ShareError> {
        const STEP: &str = "naming the GPUs";
        let devices = (0..driver.device_count().at(STEP)?).map(DeviceId);
        let named = devices.map(|device| Ok((driver.device_uuid(device).at(STEP)?, device)));
        Ok(Gpus(named.collect::<Result<_, ShareError>>()?))
    }

    pub(super) fn location(&self, home: Home) -> Result<Location, ShareError> {
        match home {
            Home::HostNuma(node) => Ok(Location::HostNuma(node)),
            Home::Gpu(uuid) => {
                let found = self.0.iter().find(|(it, _)| *it == uuid);
                let missing = ShareError::NotVisibleHere { step: "finding the GPU", uuid };
                found.map(|(_, device)| Location::Device(*device)).ok_or(missing)
            }
        }
    }

    pub(super) fn props(&self, home: Home) -> Result<ChunkProps, ShareError> {
        let location = self.location(home)?;
        Ok(ChunkProps { location, handle_types: HandleTypes::POSIX_FD, rdma: false })
    }
}

/// Asks for the whole description, until the owner changes nothing meanwhile or the time is over.
pub(super) fn describe(link: &Link, export: u64, deadline: Instant) -> Result<Layout, ShareError> {
    let mut pause = super::Pause::default();
    loop {
        match describe_once(link, export) {
            Err(ShareError::Refused { reason: Refusal::Changed, .. }) => {}
            Ok(None) => {}
            Ok(Some(layout)) => {
                step!("importer-described");
                return Ok(layout);
            }
            Err(error) => return Err(error),
        }
        if !pause.wait(deadline) {
            return Err(ShareError::Changing { step: STEP });
        }
    }
}

/// One description, or `None` if the buffer changed between two parts of it.
fn describe_once(link: &Link, export: u64) -> Result<Option<Layout>, ShareError> {
    let mut layout: Option<Layout> = None;
    loop {
        let first = layout.as_ref().map_or(0, |layout| layout.pieces.len() as u32);
        let (answer, _) = link.ask(STEP, Message::Describe { export, first }, 0)?;
        let Message::Layout { generation, total, first: from, pieces } = answer else {
            return Err(link.unexpected(STEP, "layout", &answer));
        };
        if total > PIECES_MAX {
            let (value, max) = (total.into(), PIECES_MAX.into());
            return Err(ShareError::TooLarge { step: STEP, what: "pieces", value, max });
        }
        let known = layout.get_or_insert(Layout { generation, pieces: Vec::new() });
        if known.generation != generation {
            return Ok(None);
        }
        let have = known.pieces.len() + pieces.len();
        if from != first || have > total as usize || (pieces.is_empty() && have < total as usize) {
            let got = format!("{} pieces from {from} of {total}", pieces.len());
            return Err(link.wrong(STEP, "the pieces that were asked for", got));
        }
        known.pieces.extend(pieces);
        if have == total as usize {
            return Ok(layout);
        }
    }
}

/// Whether the pieces can be what they say they are: whole granules, in order, apart, each once, on
/// GPUs that are here.
pub(super) fn check(
    link: &Link,
    driver: &dyn Driver,
    gpus: &Gpus,
    layout: &Layout,
) -> Result<(), ShareError> {
    let mut granularities: Vec<(Home, u64)> = Vec::new();
    let mut seen = HashSet::with_capacity(layout.pieces.len());
    let mut end = 0u64;
    // All that is not here is found before the driver is asked anything.
    for piece in &layout.pieces {
        if granularities.iter().all(|(home, _)| *home != piece.home) {
            gpus.location(piece.home)?;
            granularities.push((piece.home, 0));
        }
    }
    for (home, granularity) in &mut granularities {
        let asked = driver.granularity(&gpus.props(*home)?, GranularityKind::Minimum);
        *granularity = asked.at("asking for the granularity")?.max(1);
    }
    for piece in &layout.pieces {
        let granularity = granularities.iter().find(|it| it.0 == piece.home).map_or(1, |it| it.1);
        let ends = piece.offset.checked_add(piece.bytes).filter(|end| *end <= BYTES_MAX);
        let whole = piece.bytes % granularity == 0 && piece.offset % granularity == 0;
        let (Some(ends), true) = (ends, whole && piece.bytes > 0 && piece.offset >= end) else {
            let expected = format!("whole multiples of {granularity} bytes behind {end}");
            return Err(link.wrong(STEP, &expected, format!("{piece:?}")));
        };
        if !seen.insert(piece.id) {
            return Err(link.wrong(STEP, "each piece once", format!("{piece:?} twice")));
        }
        end = ends;
    }
    Ok(())
}
