//! Exported chunks: bytes in a memfd, so that a descriptor is a real one that another process can
//! import, and a lock on it that says whether anybody still holds one.
//!
//! # The descriptor
//!
//! A sealed memfd of the chunk's bytes and one page more. That last page says what the chunk is
//! (magic, version, size, device by its UUID, properties), so an importer trusts nothing but the
//! descriptor, and a descriptor that is no export is noticed (row D-X3).
//!
//! # Who still holds one
//!
//! Each export opens the memfd anew and puts a shared record lock on it that belongs to that open
//! file (`F_OFD_SETLK`): it lives until the last duplicate of the descriptor is closed, in
//! whichever process. Each simulator that refers to the chunk holds such a lock too. To ask whether
//! memory is still held elsewhere is to ask for a conflicting lock (`F_OFD_GETLK`), which takes
//! none and costs one system call. That is how memory stays taken while an exported descriptor is
//! open (row D-X6), and comes free when an importer dies.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use super::bytes::SparseBytes;
use crate::types::{HandleTypes, Uuid};

const TRAILER_BYTES: u64 = 4096;
const MAGIC: &[u8; 16] = b"vmm-sim-export-1";
const SEALS: libc::c_int = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;

/// What the descriptor says of the chunk behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportedProps {
    pub(super) bytes: u64,
    pub(super) home: ExportedHome,
    pub(super) handle_types: HandleTypes,
    pub(super) rdma: bool,
}

/// Where the memory lies, in words that mean the same in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExportedHome {
    Gpu(Uuid),
    HostNuma(u32),
}

/// The identity of an export: two descriptors of one chunk have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportIdentity {
    device: u64,
    inode: u64,
}

/// The bytes of a chunk that was exported or imported, and this simulator's hold on them.
#[derive(Debug)]
pub(super) struct SharedBytes {
    /// An open file of this simulator alone; locked while it refers to the memory.
    file: File,
    pub(super) identity: ExportIdentity,
}

impl SharedBytes {
    fn open(file: File) -> io::Result<SharedBytes> {
        let metadata = file.metadata()?;
        let identity = ExportIdentity { device: metadata.dev(), inode: metadata.ino() };
        let shared = SharedBytes { file, identity };
        shared.hold()?;
        Ok(shared)
    }

    /// Reads; holes are zero.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    /// Writes: visible to every process at once.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, offset)
    }

    /// A descriptor to give out: it holds the memory until its last duplicate is closed.
    pub(super) fn export(&self) -> io::Result<OwnedFd> {
        reopen_held(&self.file)
    }

    /// Says that this simulator refers to the memory.
    pub(super) fn hold(&self) -> io::Result<()> {
        set_lock(&self.file, libc::F_RDLCK)
    }

    /// Says that it does no more.
    pub(super) fn let_go(&self) {
        // A failed unlock is undone by closing the file, which follows.
        let _ = set_lock(&self.file, libc::F_UNLCK);
    }

    /// Whether an open descriptor, here or in another process, still refers to the memory.
    pub(super) fn in_use_elsewhere(&self) -> bool {
        is_held(&self.file)
    }

    /// The bytes, back in this process alone. For memory that nobody else holds any more.
    pub(super) fn take_back(&self, bytes: u64) -> io::Result<SparseBytes> {
        let mut content = SparseBytes::default();
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while let Some((start, end)) = self.next_data(at, bytes)? {
            let mut from = start;
            while from < end {
                let part = (end - from).min(buffer.len() as u64) as usize;
                self.read(from, &mut buffer[..part])?;
                content.write(from, &buffer[..part]);
                from += part as u64;
            }
            at = end;
        }
        Ok(content)
    }

    /// The next stretch that was ever written, at or after `at`.
    fn next_data(&self, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
        let seek = |offset: u64, whence: libc::c_int| {
            // SAFETY: a seek of numbers on an open descriptor whose position nothing relies on.
            unsafe { libc::lseek(self.file.as_raw_fd(), offset as libc::off_t, whence) }
        };
        // The trailer is data, so a seek below it finds something.
        let start = seek(at, libc::SEEK_DATA);
        if start < 0 {
            return Err(io::Error::last_os_error());
        }
        let end = seek(start as u64, libc::SEEK_HOLE);
        if end < 0 {
            return Err(io::Error::last_os_error());
        }
        let (start, end) = (start as u64, (end as u64).min(bytes));
        Ok((start < bytes).then_some((start, end)))
    }
}

/// A lock on every byte.
fn whole_file_lock(kind: libc::c_int) -> libc::flock {
    // SAFETY: flock is plain numbers, for which all zeros is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Opens the file behind a descriptor once more: an open file of its own, with its own locks.
fn reopen(file: &File) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// An open file to give out, which holds what is behind it until its last duplicate is closed.
pub(super) fn reopen_held(file: &File) -> io::Result<OwnedFd> {
    let file = reopen(file)?;
    set_lock(&file, libc::F_RDLCK)?;
    Ok(file.into())
}

/// Whether another open file, here or in another process, holds what is behind this one. The lock
/// of this very open file does not count: it conflicts with nothing of its own.
pub(super) fn is_held(file: &File) -> bool {
    let mut lock = whole_file_lock(libc::F_WRLCK);
    // SAFETY: `lock` is a valid flock that the call may write to; the descriptor is open.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    // A failed question keeps the memory: to free it on doubt would be the worse lie.
    asked != 0 || lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Sets or clears the record lock of an open file.
fn set_lock(file: &File, kind: libc::c_int) -> io::Result<()> {
    let lock = whole_file_lock(kind);
    // SAFETY: `lock` is a valid flock for the length of the call; the descriptor is open.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The last page of an export: what `parse` reads.
fn trailer(props: &ExportedProps) -> [u8; 64] {
    let mut page = [0; 64];
    page[..16].copy_from_slice(MAGIC);
    page[16..24].copy_from_slice(&props.bytes.to_le_bytes());
    match props.home {
        ExportedHome::Gpu(uuid) => page[32..48].copy_from_slice(&uuid.0),
        ExportedHome::HostNuma(node) => {
            page[24] = 1;
            page[32..36].copy_from_slice(&node.to_le_bytes());
        }
    }
    page[25] = u8::from(props.rdma);
    page[28..32].copy_from_slice(&props.handle_types.bits().to_le_bytes());
    page
}

/// Trusts nothing: a field that makes no sense is no export.
fn parse(page: &[u8; 64], file_bytes: u64) -> Option<ExportedProps> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?))
    };
    let bytes = u64::from_le_bytes(page[16..24].try_into().ok()?);
    if &page[..16] != MAGIC || bytes.checked_add(TRAILER_BYTES) != Some(file_bytes) {
        return None;
    }
    let home = match page[24] {
        0 => ExportedHome::Gpu(Uuid(page[32..48].try_into().ok()?)),
        1 => ExportedHome::HostNuma(word(32)?),
        _ => return None,
    };
    Some(ExportedProps {
        bytes,
        home,
        handle_types: HandleTypes::from_bits(word(28)?),
        rdma: page[25] == 1,
    })
}

/// Moves a chunk's bytes into a memfd. Done at the first export, so that chunks which could be
/// exported but are not need no descriptor.
pub(super) fn make_shared(props: &ExportedProps, content: &SparseBytes) -> io::Result<SharedBytes> {
    let file = sealed_file(c"vmm-sim-chunk", props.bytes + TRAILER_BYTES, |file| {
        file.write_all_at(&trailer(props), props.bytes)?;
        content.for_each_page(|offset, bytes| file.write_all_at(bytes, offset))
    })?;
    SharedBytes::open(file)
}

/// A memfd of a length that nobody can change, filled before it is sealed.
pub(super) fn sealed_file(
    name: &CStr,
    bytes: u64,
    fill: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string, and the flags are the ones of the call.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(bytes)?;
    fill(&file)?;
    // SAFETY: a fcntl of numbers on an open descriptor.
    if unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// What a descriptor is an export of, or `None` if it is none.
pub(super) fn inspect(descriptor: BorrowedFd<'_>) -> Option<(ExportedProps, ExportIdentity)> {
    let file = File::from(descriptor.try_clone_to_owned().ok()?);
    // SAFETY: a fcntl without arguments on an open descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & SEALS != SEALS {
        return None;
    }
    let metadata = file.metadata().ok()?;
    let file_bytes = metadata.len();
    let mut page = [0; 64];
    file.read_exact_at(&mut page, file_bytes.checked_sub(TRAILER_BYTES)?).ok()?;
    let identity = ExportIdentity { device: metadata.dev(), inode: metadata.ino() };
    Some((parse(&page, file_bytes)?, identity))
}

/// Takes hold of another simulator's chunk.
pub(super) fn adopt(descriptor: BorrowedFd<'_>) -> io::Result<SharedBytes> {
    let file = File::from(descriptor.try_clone_to_owned()?);
    SharedBytes::open(reopen(&file)?)
}
