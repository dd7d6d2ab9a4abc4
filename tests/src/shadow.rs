//! [`Shadow`]: who owns which addresses, as a map of intervals. Slow, obvious, and independent of
//! everything that the heap knows.

use std::collections::BTreeMap;

/// What an interval of addresses is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A live buffer, by its number.
    Live(u32),
    /// Freed, but work that was told to the pool is still held; by the buffer's number.
    Limbo(u32),
}

/// Intervals of device addresses that nothing else may be given.
#[derive(Debug, Default)]
pub struct Shadow {
    /// First address: (bytes, owner). Never overlapping, never empty.
    intervals: BTreeMap<u64, (u64, Owner)>,
}

impl Shadow {
    /// The first interval that shares a byte with `[address, address + bytes)`.
    pub fn overlap(&self, address: u64, bytes: u64) -> Option<(u64, u64, Owner)> {
        let end = address.saturating_add(bytes);
        let (start, (length, owner)) = self.intervals.range(..end).next_back()?;
        (start + length > address).then_some((*start, *length, *owner))
    }

    /// Gives an interval to `owner`.
    ///
    /// # Errors
    /// In words, if it is empty, wraps, or shares a byte with another.
    pub fn insert(&mut self, address: u64, bytes: u64, owner: Owner) -> Result<(), String> {
        if bytes == 0 || address.checked_add(bytes).is_none() {
            return Err(format!("{bytes} bytes at {address:#x} are no interval"));
        }
        if let Some((start, length, other)) = self.overlap(address, bytes) {
            return Err(format!(
                "{owner:?} got {bytes} bytes at {address:#x}, but {length} bytes at {start:#x} \
                 are {other:?}"
            ));
        }
        self.intervals.insert(address, (bytes, owner));
        Ok(())
    }

    /// Takes the interval that starts at `address` out.
    ///
    /// # Errors
    /// In words, if none starts there.
    pub fn remove(&mut self, address: u64) -> Result<(u64, Owner), String> {
        self.intervals.remove(&address).ok_or_else(|| format!("nothing starts at {address:#x}"))
    }

    /// Number of intervals.
    pub fn len(&self) -> usize {
        self.intervals.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_taken_and_every_kind_of_overlap_is_refused() {
        let mut shadow = Shadow::default();
        shadow.insert(100, 50, Owner::Live(1)).unwrap();
        shadow.insert(150, 50, Owner::Limbo(2)).unwrap();
        shadow.insert(50, 50, Owner::Live(3)).unwrap();
        for (address, bytes) in [(100, 50), (99, 2), (149, 1), (120, 5), (0, 51), (0, 900)] {
            assert!(shadow.insert(address, bytes, Owner::Live(9)).is_err(), "{address} {bytes}");
        }
        assert!(shadow.insert(300, 0, Owner::Live(9)).is_err());
        assert!(shadow.insert(u64::MAX, 2, Owner::Live(9)).is_err());
        assert_eq!(shadow.overlap(199, 1), Some((150, 50, Owner::Limbo(2))));
        assert_eq!(shadow.overlap(200, 1), None);
        assert_eq!(shadow.remove(100), Ok((50, Owner::Live(1))));
        assert!(shadow.remove(100).is_err());
        shadow.insert(100, 50, Owner::Live(4)).unwrap();
        assert_eq!(shadow.len(), 3);
    }
}
