//! [`Marks`]: blocks of a lane's heap that a free by address must not take as they are.
//!
//! A free by address knows nothing but the address, and to the heap a block that waits in limbo is
//! a block as any other. Most lanes have no marks most of the time: asking costs one comparison.

use std::collections::BTreeMap;

use vmm_sys::object::Stream;

/// What a free by address must know of a block.
#[derive(Debug)]
pub(super) enum Mark {
    /// Nobody holds it: it waits in limbo, or a thread brings memory to it.
    Withheld,
    /// Streams other than the lane's own use it.
    Crossed(Vec<Stream>),
}

/// Marks by offset.
#[derive(Debug, Default)]
pub(super) struct Marks(BTreeMap<u64, Mark>);

impl Marks {
    /// The marks of a lane whose frees have to look at the calling thread: they are never empty.
    pub(super) fn of_one_thread() -> Marks {
        // No block starts there.
        Marks(BTreeMap::from([(u64::MAX, Mark::Withheld)]))
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn at(&self, offset: u64) -> Option<&Mark> {
        self.0.get(&offset)
    }

    /// A free of the block shall take the long way, though nothing uses it but its lane's stream.
    pub(super) fn watch(&mut self, offset: u64) {
        self.0.insert(offset, Mark::Crossed(Vec::new()));
    }

    /// Withholds a block. Returns the streams that used it.
    pub(super) fn withhold(&mut self, offset: u64) -> Vec<Stream> {
        match self.0.insert(offset, Mark::Withheld) {
            Some(Mark::Crossed(streams)) => streams,
            Some(Mark::Withheld) | None => Vec::new(),
        }
    }

    /// The block is as any other again, or gone.
    pub(super) fn clear(&mut self, offset: u64) {
        self.0.remove(&offset);
    }

    /// Notes that `stream` uses a block; once, however often it is said.
    pub(super) fn cross(&mut self, offset: u64, stream: &Stream) {
        let mark = self.0.entry(offset).or_insert_with(|| Mark::Crossed(Vec::new()));
        if let Mark::Crossed(streams) = mark
            && !streams.iter().any(|s| s.id() == stream.id() && s.device() == stream.device())
        {
            streams.push(stream.clone());
        }
    }
}
