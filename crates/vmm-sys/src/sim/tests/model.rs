//! The address ledger against a model that keeps one entry a granule: random programs, the same
//! answers and the same bytes.

use std::collections::BTreeMap;

use super::*;
use crate::error::ResultCode as Code;

const SLOTS: u64 = 24;
const SEEDS: u64 = 60;
const STEPS: usize = 300;

/// A small sequence of numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// What is at a granule of the reservation.
#[derive(Clone, Copy, Debug)]
struct Slot {
    chunk: usize,
    /// Which granule of the chunk.
    part: u64,
    access: Access,
}

#[derive(Debug)]
struct ModelChunk {
    handle: ChunkHandle,
    granules: u64,
    references: u64,
    /// First byte of each granule.
    bytes: Vec<u8>,
}

struct Model {
    base: u64,
    slots: BTreeMap<u64, Slot>,
    chunks: Vec<ModelChunk>,
}

impl Model {
    fn mapped(&self, chunk: usize) -> bool {
        self.slots.values().any(|slot| slot.chunk == chunk)
    }

    fn alive(&self, chunk: usize) -> bool {
        self.chunks[chunk].references > 0 || self.mapped(chunk)
    }

    fn span(&self, first: u64, count: u64) -> impl Iterator<Item = Option<Slot>> + '_ {
        (first..first + count).map(|index| self.slots.get(&index).copied())
    }

    /// Whether a mapping sticks out of the span.
    fn cuts(&self, first: u64, count: u64) -> bool {
        let inside = |index: u64| (first..first + count).contains(&index);
        self.span(first, count).enumerate().any(|(at, slot)| {
            slot.is_some_and(|slot| {
                let start = first + at as u64 - slot.part;
                !inside(start) || !inside(start + self.chunks[slot.chunk].granules - 1)
            })
        })
    }

    fn used_bytes(&self) -> u64 {
        (0..self.chunks.len())
            .filter(|chunk| self.alive(*chunk))
            .map(|chunk| self.chunks[chunk].granules * G)
            .sum()
    }

    fn map(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let chunk = numbers.below(self.chunks.len() as u64) as usize;
        let first = numbers.below(SLOTS + 2);
        let (granules, handle) = (self.chunks[chunk].granules, self.chunks[chunk].handle);
        let asked = if numbers.below(8) == 0 { granules + 1 } else { granules };
        let expected = if !self.alive(chunk) {
            Code::INVALID_VALUE
        } else if asked != granules {
            Code::NOT_SUPPORTED
        } else if first + granules > SLOTS || self.span(first, granules).any(|it| it.is_some()) {
            Code::INVALID_VALUE
        } else {
            for part in 0..granules {
                self.slots.insert(first + part, Slot { chunk, part, access: Access::None });
            }
            Code::SUCCESS
        };
        (code(sim.t_map(self.base + first * G, asked * G, handle)), expected)
    }

    fn unmap(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let (first, count) = (numbers.below(SLOTS), numbers.below(5) + 1);
        let expected = if first + count > SLOTS || self.cuts(first, count) {
            Code::INVALID_VALUE
        } else {
            self.slots.retain(|index, _| !(first..first + count).contains(index));
            Code::SUCCESS
        };
        (code(sim.unmap(self.base + first * G, count * G)), expected)
    }

    fn set_access(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let (first, count) = (numbers.below(SLOTS), numbers.below(4) + 1);
        let kinds = [Access::None, Access::Read, Access::ReadWrite, Access::ReadWrite];
        let access = kinds[numbers.below(4) as usize];
        // A hole between mappings ends what is granted, and is no error (row D-A9).
        let ends = [first, first + count - 1];
        let hole_at_end = ends.iter().any(|slot| !self.slots.contains_key(slot));
        let expected = if first + count > SLOTS || hole_at_end || self.cuts(first, count) {
            Code::INVALID_VALUE
        } else {
            for index in first..first + count {
                let Some(slot) = self.slots.get_mut(&index) else { break };
                slot.access = access;
            }
            Code::SUCCESS
        };
        let grant = [AccessGrant { location: Location::Device(D0), access }];
        (code(sim.set_access(self.base + first * G, count * G, &grant)), expected)
    }

    fn release(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let chunk = numbers.below(self.chunks.len() as u64) as usize;
        let expected = if self.chunks[chunk].references == 0 {
            Code::INVALID_VALUE
        } else {
            self.chunks[chunk].references -= 1;
            Code::SUCCESS
        };
        (code(sim.t_release(self.chunks[chunk].handle)), expected)
    }

    fn retain(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let first = numbers.below(SLOTS);
        let answer = sim.retain(self.base + first * G + numbers.below(G));
        let Some(slot) = self.slots.get(&first) else {
            return (code(answer), Code::INVALID_VALUE);
        };
        let chunk = &mut self.chunks[slot.chunk];
        chunk.references += 1;
        assert_eq!(answer.as_ref().ok(), Some(&chunk.handle));
        (code(answer), Code::SUCCESS)
    }

    /// Writes the first byte of a granule, or reads it and compares.
    fn touch(&mut self, sim: &Sim, numbers: &mut Numbers) -> (Code, Code) {
        let (first, value) = (numbers.below(SLOTS), numbers.below(256) as u8);
        let write = numbers.below(2) == 0;
        let address = self.base + first * G;
        let slot = self.slots.get(&first).copied();
        let allowed = slot.is_some_and(|slot| match slot.access {
            Access::None => false,
            Access::Read => !write,
            Access::ReadWrite => true,
        });
        let expected = if allowed { Code::SUCCESS } else { Code::INVALID_VALUE };
        if write {
            if let Some(slot) = slot.filter(|_| allowed) {
                self.chunks[slot.chunk].bytes[slot.part as usize] = value;
            }
            return (code(sim.t_upload(D0, address, &[value])), expected);
        }
        let answer = sim.t_download(D0, address, 1);
        if let (Some(slot), Ok(read)) = (slot, &answer) {
            assert_eq!(read[0], self.chunks[slot.chunk].bytes[slot.part as usize]);
        }
        (code(answer), expected)
    }

    fn create(&mut self, sim: &Sim, numbers: &mut Numbers, capacity: u64) -> (Code, Code) {
        let granules = numbers.below(4) + 1;
        let answer = sim.create(granules * G, &ChunkProps::on_device(D0));
        if self.used_bytes() + granules * G > capacity {
            return (code(answer), Code::OUT_OF_MEMORY);
        }
        if let Ok(handle) = answer {
            let bytes = vec![0; granules as usize];
            self.chunks.push(ModelChunk { handle, granules, references: 1, bytes });
        }
        (code(answer), Code::SUCCESS)
    }
}

#[test]
fn random_programs_are_answered_as_the_model_says() {
    let capacity = 20 * G;
    for seed in 0..SEEDS {
        let sim = Sim::builder().device_bytes(capacity).build();
        let mut numbers = Numbers(seed);
        let base = sim.address_reserve(SLOTS * G, 0, 0).unwrap();
        let mut model = Model { base, slots: BTreeMap::new(), chunks: Vec::new() };
        for step in 0..STEPS {
            let choice = if model.chunks.is_empty() { 0 } else { numbers.below(20) };
            let (answer, expected) = match choice {
                0..=2 => model.create(&sim, &mut numbers, capacity),
                3..=6 => model.map(&sim, &mut numbers),
                7..=8 => model.unmap(&sim, &mut numbers),
                9..=12 => model.set_access(&sim, &mut numbers),
                13..=14 => model.release(&sim, &mut numbers),
                15 => model.retain(&sim, &mut numbers),
                _ => model.touch(&sim, &mut numbers),
            };
            assert_eq!(answer, expected, "seed {seed}, step {step}, choice {choice}");
            let used = sim.ledger_summary().devices[0].used_bytes;
            assert_eq!(used, model.used_bytes(), "seed {seed}, step {step}, choice {choice}");
        }
        // Everything comes back.
        sim.unmap(base, SLOTS * G).unwrap();
        for chunk in &model.chunks {
            for _ in 0..chunk.references {
                sim.t_release(chunk.handle).unwrap();
            }
        }
        sim.address_free(base, SLOTS * G).unwrap();
        assert_eq!(sim.check_clean(), Ok(()), "seed {seed}");
    }
}
