//! Numbers out of bytes. Where they end, everything is 0.

pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn u64(&mut self) -> u64 {
        (0..8).fold(0, |number, at| number | u64::from(self.byte()) << (8 * at))
    }

    /// Small numbers, powers of two and their neighbours, and any others.
    pub(crate) fn number(&mut self) -> u64 {
        let kind = self.byte();
        match kind % 4 {
            0 => u64::from(self.byte()),
            1 => 1 << (self.byte() % 64),
            2 => (1_u64 << (self.byte() % 64)).wrapping_sub(1 + u64::from(kind / 4)),
            _ => self.u64(),
        }
    }

    /// So many bytes, or what is left.
    pub(crate) fn take(&mut self, most: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
