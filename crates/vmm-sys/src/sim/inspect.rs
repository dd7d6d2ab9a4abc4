//! What tests read: the ledger in numbers, leaks in words, bytes by address.

use std::fmt::Write as _;

use super::Sim;
use super::regions::{Backing, Place};
use super::state::State;
use super::timeline::StreamKind;

/// What one device holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSummary {
    /// Physical bytes taken: chunks, legacy allocations, the context.
    pub used_bytes: u64,
    /// How often a context was made: 0 for a device that nobody named.
    pub contexts_made: u64,
    /// References to the primary context that callers hold.
    pub context_references: u64,
    /// Devices that can use mappings of this device's memory now.
    pub peers: u64,
}

/// What the machine holds. Everything a program made and did not give back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerSummary {
    /// Handle values with references.
    pub handles: u64,
    /// References of all handles (create, retain, import).
    pub handle_references: u64,
    /// Chunks that exist, whatever keeps them.
    pub chunks: u64,
    /// Chunks that only an exported descriptor keeps.
    pub orphans: u64,
    /// Mappings.
    pub mappings: u64,
    /// Bytes mapped, each alias counted.
    pub mapped_bytes: u64,
    /// Reserved ranges.
    pub ranges: u64,
    /// Bytes reserved.
    pub reserved_bytes: u64,
    /// Streams created and not destroyed.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Graphs and graph executables.
    pub graphs: u64,
    /// Captures begun and not ended.
    pub captures: u64,
    /// Allocations of `cuMemAlloc` and `cuMemAllocAsync`.
    pub legacy_allocations: u64,
    /// Allocations of page-locked host memory, and registrations.
    pub pinned_allocations: u64,
    /// Items of work not done.
    pub pending_work: u64,
    /// Holds of a test not released.
    pub holds: u64,
    /// Physical bytes taken on host NUMA nodes.
    pub host_used_bytes: u64,
    /// Each device.
    pub devices: Vec<DeviceSummary>,
}

impl LedgerSummary {
    /// References to primary contexts that callers hold, of all devices.
    pub fn context_references(&self) -> u64 {
        self.devices.iter().map(|device| device.context_references).sum()
    }
}

impl State {
    fn summary(&mut self) -> LedgerSummary {
        self.collect_orphans();
        let mut summary = LedgerSummary {
            handles: self.handles.values().filter(|handle| handle.references > 0).count() as u64,
            handle_references: self.handles.values().map(|it| u64::from(it.references)).sum(),
            chunks: self.physical.iter().filter(|(_, it)| it.counted_bytes > 0).count() as u64,
            orphans: self.orphans.len() as u64,
            ranges: self.space.range_count() as u64,
            reserved_bytes: self.space.reserved_bytes(),
            events: self.timeline.events.len() as u64,
            graphs: (self.captures.graphs.len() + self.captures.execs.len()) as u64,
            captures: self.captures.active_count() as u64,
            pinned_allocations: (self.pinned.len() + self.registered.len()) as u64,
            holds: self.timeline.holds.len() as u64,
            host_used_bytes: self.host_used_bytes.iter().sum(),
            ..LedgerSummary::default()
        };
        for region in self.regions.values() {
            match region.backing {
                Backing::Chunk { .. } => {
                    summary.mappings += 1;
                    summary.mapped_bytes += region.bytes;
                }
                Backing::Legacy { .. } => summary.legacy_allocations += 1,
                Backing::Pinned => {}
            }
        }
        for stream in self.timeline.streams.values() {
            summary.streams += u64::from(matches!(stream.kind, StreamKind::Created { .. }));
            summary.pending_work += stream.queue.len() as u64;
        }
        for (index, device) in self.devices.iter().enumerate() {
            let references = device.context.as_ref().map_or(0, |context| context.references);
            summary.devices.push(DeviceSummary {
                used_bytes: device.used_bytes,
                contexts_made: device.contexts_made,
                context_references: references,
                peers: self.peers_of(crate::types::DeviceId(index as u32)).len() as u64,
            });
        }
        summary
    }

    /// Each thing left, in words.
    fn leaks(&mut self) -> String {
        let summary = self.summary();
        let mut text = String::new();
        let mut count = |what: &str, number: u64| {
            if number > 0 {
                let _ = writeln!(text, "{number} {what}");
            }
        };
        count("chunk handles not released", summary.handles);
        count("references of those handles", summary.handle_references);
        count("chunks kept by an open exported descriptor", summary.orphans);
        count("mappings", summary.mappings);
        count("reserved ranges", summary.ranges);
        count("streams", summary.streams);
        count("events", summary.events);
        count("graphs", summary.graphs);
        count("captures", summary.captures);
        count("legacy allocations", summary.legacy_allocations);
        count("allocations of page-locked memory", summary.pinned_allocations);
        count("items of work not done", summary.pending_work);
        count("references to primary contexts", summary.context_references());
        for (start, bytes) in self.space.ranges().take(8) {
            let _ = writeln!(text, "  range {start:#x}, {bytes} bytes");
        }
        let mappings = self.regions.iter().filter_map(|(start, region)| match region.backing {
            Backing::Chunk { handle, physical } => Some((start, region.bytes, handle, physical)),
            Backing::Legacy { .. } | Backing::Pinned => None,
        });
        for (start, bytes, handle, physical) in mappings.take(8) {
            let home = self.physical[physical].props.location;
            let handle = handle.0;
            let _ = writeln!(
                text,
                "  mapping {start:#x}, {bytes} bytes of {home}, through handle {handle:#x}"
            );
        }
        text
    }
}

impl Sim {
    /// What the machine holds now, in numbers. Makes no driver call.
    pub fn ledger_summary(&self) -> LedgerSummary {
        let mut state = self.state.lock();
        self.pump(&mut state);
        state.summary()
    }

    /// Whether everything was given back.
    ///
    /// # Errors
    /// A text that lists what is left.
    pub fn check_clean(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        self.pump(&mut state);
        let leaks = state.leaks();
        #[cfg(all(debug_assertions, not(shuttle)))]
        match &*crate::sync::watched::faults() {
            [] => {}
            faults => return Err(format!("locks of this process: {}", faults.join("; "))),
        }
        if leaks.is_empty() { Ok(()) } else { Err(format!("not given back:\n{leaks}")) }
    }

    /// Reads bytes at a device address, whoever may touch it; `None` if not all of it is mapped.
    pub fn peek(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let state = self.state.lock();
        let mut out = vec![0; bytes];
        for (place, range) in state.places(address, bytes)? {
            state.read_place(place, 0, &mut out[range]).ok()?;
        }
        Some(out)
    }

    /// Writes bytes at a device address, whoever may touch it; `None` if not all of it is mapped.
    pub fn poke(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let mut state = self.state.lock();
        for (place, range) in state.places(address, bytes.len())? {
            state.write_place(place, 0, &bytes[range]).ok()?;
        }
        Some(())
    }
}

impl State {
    /// The places of a stretch of addresses, access or not.
    fn places(&self, address: u64, bytes: usize) -> Option<Vec<(Place, std::ops::Range<usize>)>> {
        let mut places = Vec::new();
        let mut done = 0;
        while done < bytes {
            let at = address.checked_add(done as u64)?;
            let (start, region) = self.region_at(at)?;
            let offset = at - start;
            let part = (bytes - done).min((region.bytes - offset) as usize);
            let place = match region.backing {
                Backing::Chunk { physical: index, .. }
                | Backing::Legacy { physical: index, .. } => Place::Physical { index, offset },
                Backing::Pinned => Place::Host { address: at },
            };
            places.push((place, done..done + part));
            done += part;
        }
        Some(places)
    }
}
