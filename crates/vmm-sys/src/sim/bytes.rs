//! The bytes of physical memory: nothing is stored until something is written, so a chunk of any
//! size costs nothing at first and reads as zeros (row D-C5).

use std::collections::BTreeMap;
use std::io;

use super::share::SharedBytes;

const PAGE: u64 = 4096;

/// One page that differs from zero somewhere.
#[derive(Debug)]
enum Page {
    /// One value throughout: fills cost no page of host memory.
    Uniform(u8),
    Data(Box<[u8; PAGE as usize]>),
}

/// Pages by number. An absent page is all zero.
#[derive(Debug, Default)]
pub(super) struct SparseBytes {
    pages: BTreeMap<u64, Page>,
}

/// Where the bytes of a chunk are.
#[derive(Debug)]
pub(super) enum Store {
    /// In this process alone.
    Sparse(SparseBytes),
    /// In a descriptor that other processes hold too.
    Shared(SharedBytes),
}

/// Splits `offset..offset + length` at page borders: (page, start in page, position, length).
fn split(offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= length {
            return None;
        }
        let at = offset + done;
        let (page, inside) = (at / PAGE, at % PAGE);
        let part = (PAGE - inside).min(length - done);
        let piece = (page, inside as usize, done as usize, part as usize);
        done += part;
        Some(piece)
    })
}

/// The value that all bytes have, if they do.
fn uniform_value(bytes: &[u8]) -> Option<u8> {
    let (&first, rest) = bytes.split_first()?;
    rest.iter().all(|byte| *byte == first).then_some(first)
}

impl SparseBytes {
    /// Reads; what was never written is zero.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) {
        for (page, inside, position, part) in split(offset, into.len() as u64) {
            let into = &mut into[position..position + part];
            match self.pages.get(&page) {
                None => into.fill(0),
                Some(Page::Uniform(value)) => into.fill(*value),
                Some(Page::Data(data)) => into.copy_from_slice(&data[inside..inside + part]),
            }
        }
    }

    /// Writes.
    pub(super) fn write(&mut self, offset: u64, from: &[u8]) {
        for (page, inside, position, part) in split(offset, from.len() as u64) {
            let from = &from[position..position + part];
            // A whole page of one value goes back to being cheap.
            match uniform_value(from).filter(|_| part as u64 == PAGE) {
                Some(value) => self.set_uniform(page, value),
                None => self.data(page)[inside..inside + part].copy_from_slice(from),
            }
        }
    }

    /// Fills with one value.
    pub(super) fn fill(&mut self, offset: u64, length: u64, value: u8) {
        if value == 0 {
            return self.clear(offset, length);
        }
        for (page, inside, _, part) in split(offset, length) {
            if part as u64 == PAGE {
                self.set_uniform(page, value);
            } else {
                self.data(page)[inside..inside + part].fill(value);
            }
        }
    }

    /// Zeros: visits only pages that exist, so that clearing untouched memory is free.
    fn clear(&mut self, offset: u64, length: u64) {
        let end = offset + length;
        let touched: Vec<u64> =
            self.pages.range(offset / PAGE..end.div_ceil(PAGE)).map(|(page, _)| *page).collect();
        for page in touched {
            let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
            if to - from == PAGE {
                self.pages.remove(&page);
            } else {
                let inside = (from % PAGE) as usize;
                self.data(page)[inside..inside + (to - from) as usize].fill(0);
            }
        }
    }

    /// Whether no page of the range was ever written: then it is all zero.
    fn untouched(&self, offset: u64, length: u64) -> bool {
        self.pages.range(offset / PAGE..(offset + length).div_ceil(PAGE)).next().is_none()
    }

    /// Makes a page one value; zero is no page at all.
    fn set_uniform(&mut self, page: u64, value: u8) {
        if value == 0 {
            self.pages.remove(&page);
        } else {
            self.pages.insert(page, Page::Uniform(value));
        }
    }

    /// A page as bytes, made so if need be.
    fn data(&mut self, page: u64) -> &mut [u8; PAGE as usize] {
        let entry = self.pages.entry(page).or_insert(Page::Uniform(0));
        if let Page::Uniform(value) = *entry {
            *entry = Page::Data(Box::new([value; PAGE as usize]));
        }
        match entry {
            Page::Data(data) => data,
            Page::Uniform(_) => unreachable!("the page was made data two lines above"),
        }
    }

    /// Calls `visit` with the offset and content of every page that was written.
    pub(super) fn for_each_page(
        &self,
        mut visit: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = [0; PAGE as usize];
        for (page, content) in &self.pages {
            let bytes = match content {
                Page::Uniform(value) => {
                    buffer.fill(*value);
                    &buffer
                }
                Page::Data(data) => &**data,
            };
            visit(page * PAGE, bytes)?;
        }
        Ok(())
    }
}

impl Store {
    /// All zero.
    pub(super) fn new() -> Store {
        Store::Sparse(SparseBytes::default())
    }

    /// Reads; what was never written is zero.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Store::Sparse(bytes) => {
                bytes.read(offset, into);
                Ok(())
            }
            Store::Shared(bytes) => bytes.read(offset, into),
        }
    }

    /// Writes.
    pub(super) fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        match self {
            Store::Sparse(bytes) => {
                bytes.write(offset, from);
                Ok(())
            }
            Store::Shared(bytes) => bytes.write(offset, from),
        }
    }

    /// Fills with one value.
    pub(super) fn fill(&mut self, offset: u64, length: u64, value: u8) -> io::Result<()> {
        match self {
            Store::Sparse(bytes) => {
                bytes.fill(offset, length, value);
                Ok(())
            }
            Store::Shared(bytes) => {
                let buffer = vec![value; length.min(1 << 20) as usize];
                let mut done = 0;
                while done < length {
                    let part = (length - done).min(buffer.len() as u64);
                    bytes.write(offset + done, &buffer[..part as usize])?;
                    done += part;
                }
                Ok(())
            }
        }
    }

    /// Whether the range is known to be all zero without reading it.
    pub(super) fn untouched(&self, offset: u64, length: u64) -> bool {
        match self {
            Store::Sparse(bytes) => bytes.untouched(offset, length),
            Store::Shared(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_give_back_what_was_written_across_pages() {
        let mut bytes = SparseBytes::default();
        let mut model = vec![0_u8; 5 * PAGE as usize];
        // A fixed walk of overlapping writes and fills against a plain vector.
        let mut x: u64 = 7;
        for round in 0..400_u64 {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let start = (x >> 33) % (4 * PAGE);
            let length = (x >> 20) % PAGE + 1;
            let range = start as usize..(start + length) as usize;
            if round % 3 == 0 {
                let value = (round % 4) as u8;
                bytes.fill(start, length, value);
                model[range].fill(value);
            } else {
                let data: Vec<u8> = (0..length).map(|i| (i * round) as u8).collect();
                bytes.write(start, &data);
                model[range].copy_from_slice(&data);
            }
        }
        let mut read = vec![1; model.len()];
        bytes.read(0, &mut read);
        assert!(read == model);
    }

    #[test]
    fn untouched_cleared_and_uniform_memory_costs_no_page() {
        let mut bytes = SparseBytes::default();
        bytes.fill(0, 1 << 40, 0);
        assert!(bytes.untouched(0, 1 << 40));
        bytes.fill(0, 4 * PAGE, 9);
        assert!(bytes.pages.values().all(|page| matches!(page, Page::Uniform(9))));
        bytes.write(0, &[0; 4 * PAGE as usize]);
        assert!(bytes.pages.is_empty());
    }
}
