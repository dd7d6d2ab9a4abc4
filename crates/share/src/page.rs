//! The notice page: what an importer has to know of a buffer without asking.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;

use crate::error::{AtStep, ShareError};
use crate::os::{PAGE_BYTES, SharedPage};

/// `VMNOTICE`.
const MAGIC: u64 = 0x4543_4954_4f4e_4d56;
const MAGIC_WORD: usize = 0;
/// Generation, changes under way and the end, in one word, so that one load says all.
const STATE_WORD: usize = 1;
/// The last sequence whose work is done.
const DONE_WORD: usize = 2;
/// The last sequence for which the event was recorded.
const RECORDED_WORD: usize = 3;

const WITHDRAWN: u64 = 1;
const CHANGING: u64 = 1 << 1;
const CHANGING_MASK: u64 = 0xfffe;
const GENERATION_SHIFT: u32 = 16;

/// Neither end can make it shorter: a page that is not there would be a signal for the other.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// What the page says of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) generation: u64,
    pub(crate) changing: bool,
    pub(crate) withdrawn: bool,
}

impl Notice {
    fn of(word: u64) -> Notice {
        Notice {
            generation: word >> GENERATION_SHIFT,
            changing: word & CHANGING_MASK != 0,
            withdrawn: word & WITHDRAWN != 0,
        }
    }
}

/// The exporter's side.
#[derive(Debug)]
pub(crate) struct NoticeBoard {
    file: OwnedFd,
    page: SharedPage,
}

impl NoticeBoard {
    /// A new page. After this nobody, the exporter included, can map it for writing once more.
    pub(crate) fn create(generation: u64) -> Result<NoticeBoard, ShareError> {
        const STEP: &str = "making the notice page";
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let make = |flags| memfd_create("vmm-share-notice", flags);
        // Some systems want the first form; older ones do not know it.
        let file = match make(flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => make(flags).at(STEP)?,
            file => file.at(STEP)?,
        };
        ftruncate(&file, PAGE_BYTES as u64).at(STEP)?;
        let page = SharedPage::map(&file, true).at(STEP)?;
        page.words()[STATE_WORD].store(generation << GENERATION_SHIFT, Relaxed);
        page.words()[MAGIC_WORD].store(MAGIC, Release);
        fcntl_add_seals(&file, SEALS | SealFlags::FUTURE_WRITE).at(STEP)?;
        Ok(NoticeBoard { file, page })
    }

    /// For importers.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn notice(&self) -> Notice {
        Notice::of(self.page.words()[STATE_WORD].load(Acquire))
    }

    /// A change begins.
    pub(crate) fn begin_change(&self) {
        self.update(|word| match word & CHANGING_MASK {
            CHANGING_MASK => word,
            _ => word + CHANGING,
        });
    }

    /// A change is over, and this is the generation now.
    pub(crate) fn end_change(&self, generation: u64) {
        self.update(|word| {
            // A hook may have been registered in the middle of a change.
            let changing = (word & CHANGING_MASK).saturating_sub(CHANGING);
            let generation = generation.max(word >> GENERATION_SHIFT);
            generation << GENERATION_SHIFT | changing | word & WITHDRAWN
        });
    }

    /// Nothing is offered any more.
    pub(crate) fn withdraw(&self) {
        self.update(|word| word | WITHDRAWN);
    }

    fn update(&self, change: impl Fn(u64) -> u64) {
        let state = &self.page.words()[STATE_WORD];
        // Cannot fail: the closure always answers.
        let _ = state.fetch_update(AcqRel, Relaxed, |word| Some(change(word)));
    }

    /// The work of all sequences up to this one is done.
    pub(crate) fn done(&self, sequence: u64) {
        self.page.words()[DONE_WORD].fetch_max(sequence, AcqRel);
    }

    /// The event stands behind the work of all sequences up to this one.
    pub(crate) fn recorded(&self, sequence: u64) {
        self.page.words()[RECORDED_WORD].fetch_max(sequence, AcqRel);
    }
}

/// The importer's side.
#[derive(Debug)]
pub(crate) struct NoticeReader {
    page: SharedPage,
}

impl NoticeReader {
    /// Maps a page that came from an exporter, if it is one and stays one.
    pub(crate) fn open(file: OwnedFd) -> Result<NoticeReader, ShareError> {
        const STEP: &str = "mapping the notice page";
        let wrong = |expected: &str, got: String| ShareError::Protocol {
            step: STEP,
            expected: expected.to_owned(),
            got,
        };
        let seals = fcntl_get_seals(&file)
            .map_err(|error| wrong("a sealed file", format!("a file without seals ({error})")))?;
        if !seals.contains(SEALS) {
            return Err(wrong("a file sealed against other lengths", format!("{seals:?}")));
        }
        let bytes = fstat(&file).at(STEP)?.st_size;
        if bytes != PAGE_BYTES as i64 {
            return Err(wrong("4096 bytes", format!("{bytes} bytes")));
        }
        let page = SharedPage::map(&file, false).at(STEP)?;
        let magic = page.words()[MAGIC_WORD].load(Acquire);
        if magic != MAGIC {
            return Err(wrong("the mark of a notice page", format!("{magic:#x}")));
        }
        Ok(NoticeReader { page })
    }

    pub(crate) fn notice(&self) -> Notice {
        Notice::of(self.page.words()[STATE_WORD].load(Acquire))
    }

    pub(crate) fn done(&self) -> u64 {
        self.page.words()[DONE_WORD].load(Acquire)
    }

    pub(crate) fn recorded(&self) -> u64 {
        self.page.words()[RECORDED_WORD].load(Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate};

    fn reader(board: &NoticeBoard) -> NoticeReader {
        NoticeReader::open(board.file().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn what_is_put_up_is_read() {
        let board = NoticeBoard::create(7).unwrap();
        let page = reader(&board);
        assert_eq!(page.notice(), Notice { generation: 7, changing: false, withdrawn: false });
        board.begin_change();
        assert!(page.notice().changing);
        board.end_change(9);
        board.end_change(9);
        assert_eq!(page.notice(), Notice { generation: 9, changing: false, withdrawn: false });
        board.done(3);
        board.done(2);
        board.recorded(5);
        assert_eq!((page.done(), page.recorded()), (3, 5));
        board.withdraw();
        assert!(page.notice().withdrawn);
    }

    #[test]
    fn nobody_can_write_or_cut_the_page() {
        let board = NoticeBoard::create(1).unwrap();
        assert!(ftruncate(board.file(), 0).is_err());
        assert!(SharedPage::map(board.file(), true).is_err());
        assert!(rustix::io::write(board.file(), b"x").is_err());
    }

    #[test]
    fn a_file_that_could_be_cut_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("plain", flags).unwrap();
        ftruncate(&file, 4096).unwrap();
        let refused = NoticeReader::open(file).unwrap_err();
        assert!(matches!(refused, ShareError::Protocol { .. }), "{refused}");
        let file = memfd_create("empty", flags).unwrap();
        fcntl_add_seals(&file, SEALS).unwrap();
        let refused = NoticeReader::open(file).unwrap_err();
        assert!(refused.to_string().contains("0 bytes"), "{refused}");
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(NoticeReader::open(null.into()).is_err());
    }
}
