//! An importer against exporters that send anything.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SocketFlags, accept_with};
use vmm_sys::object::Chunk;
use vmm_sys::sim::Sim;
use vmm_sys::{ChunkProps, DeviceId, Driver, HandleTypes, Uuid};

use super::{address, listener, path, send_raw};
use crate::address::Address;
use crate::error::{Refusal, ShareError};
use crate::importer::{Access, ImportState, Importer, ImporterOptions};
use crate::page::NoticeBoard;
use crate::socket::{Received, Waited, message_room, receive, wait};
use crate::wire::{Frame, Home, Message, Ordering, PieceEntry};

const G: u64 = 2 << 20;
/// For answers that come, on a slow machine too.
const LONG: Duration = Duration::from_secs(20);
/// For those that do not.
const SHORT: Duration = Duration::from_millis(150);

type Reply = Option<(Vec<u8>, Vec<OwnedFd>)>;

/// What a faithful exporter of two chunks would answer.
struct Faithful {
    driver: Arc<dyn Driver>,
    chunks: Vec<Chunk>,
    board: NoticeBoard,
}

impl Faithful {
    fn new() -> Faithful {
        let driver: Arc<dyn Driver> = Sim::builder().build();
        let props = ChunkProps {
            handle_types: HandleTypes::POSIX_FD,
            ..ChunkProps::on_device(DeviceId(0))
        };
        let chunks = (0..2).map(|_| Chunk::create(&driver, G, &props).unwrap()).collect();
        Faithful { driver, chunks, board: NoticeBoard::create(5).unwrap() }
    }

    fn uuid(&self) -> Uuid {
        self.driver.device_uuid(DeviceId(0)).unwrap()
    }

    fn pieces(&self) -> Vec<PieceEntry> {
        let home = Home::Gpu(self.uuid());
        (0..2).map(|at| PieceEntry { id: at + 1, offset: at * G, bytes: G, home }).collect()
    }

    fn layout(&self, pieces: Vec<PieceEntry>) -> Message {
        Message::Layout { generation: 5, total: pieces.len() as u32, first: 0, pieces }
    }

    fn answer(&self, question: &Message) -> (Message, Vec<OwnedFd>) {
        match question {
            Message::Hello => (Message::Welcome { exporter: [3; 16] }, Vec::new()),
            Message::Open { write, .. } => {
                let (write, ordering) = (*write, Ordering::Host);
                let opened = Message::Opened { export: 1, write, chunk_bytes: G, ordering };
                (opened, vec![self.board.file().try_clone_to_owned().unwrap()])
            }
            Message::Describe { .. } => (self.layout(self.pieces()), Vec::new()),
            Message::Fetch { pieces, generation, .. } => {
                let files =
                    pieces.iter().map(|id| self.chunks[*id as usize - 1].export_fd().unwrap());
                let (generation, pieces) = (*generation, pieces.clone());
                let files = files.collect();
                (Message::Pieces { generation, pieces }, files)
            }
            other => panic!("an importer asked {other:?}"),
        }
    }
}

/// Serves one connection, each question answered by `reply`; `None` closes it.
fn serve(
    address: &Address,
    mut reply: impl FnMut(&Faithful, &Frame) -> Reply + Send + 'static,
) -> JoinHandle<()> {
    let listener = listener(address);
    thread::spawn(move || {
        let faithful = Faithful::new();
        let soon = || Instant::now() + Duration::from_secs(10);
        assert!(wait(&listener, None, PollFlags::IN, soon()).unwrap() == Waited::Ready);
        let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let mut room = message_room();
        while wait(&socket, None, PollFlags::IN, soon()).unwrap() == Waited::Ready {
            let Received::Frame(frame, _) = receive(&socket, 0, &mut room).unwrap() else { return };
            let Some((bytes, files)) = reply(&faithful, &frame) else { return };
            if !bytes.is_empty() && send_raw(&socket, &bytes, &files).is_err() {
                return;
            }
        }
    })
}

/// The faithful answer.
fn faithful(exporter: &Faithful, frame: &Frame) -> Reply {
    let (message, files) = exporter.answer(&frame.message);
    Some((Frame { request: frame.request, message }.encode(), files))
}

/// What an importer says that opens what this exporter offers. Nothing may be left of it.
fn outcome(
    patience: Duration,
    reply: impl FnMut(&Faithful, &Frame) -> Reply + Send + 'static,
) -> Result<(), ShareError> {
    let address = address();
    let server = serve(&address, reply);
    let sim = Sim::builder().build();
    let driver: Arc<dyn Driver> = sim.clone();
    let options = ImporterOptions::new(driver).timeout(patience);
    let opened = Importer::connect(&address, options).and_then(|importer| {
        let import = importer.open("anything", Access::Read)?;
        assert_eq!((import.check(), import.bytes()), (ImportState::Current, 2 * G));
        Ok(())
    });
    server.join().unwrap();
    sim.check_clean().unwrap();
    std::fs::remove_file(path(&address)).unwrap();
    opened
}

/// Which question is answered badly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Hello,
    Open,
    Describe,
    Fetch,
}

fn at(message: &Message) -> At {
    match message {
        Message::Hello => At::Hello,
        Message::Open { .. } => At::Open,
        Message::Describe { .. } => At::Describe,
        _ => At::Fetch,
    }
}

const ALL: [At; 4] = [At::Hello, At::Open, At::Describe, At::Fetch];

/// Answers one kind of question with `bad`, and the others well.
fn spoilt(
    which: At,
    bad: impl Fn(&Faithful, &Frame) -> Reply + Send + 'static,
) -> Result<(), ShareError> {
    spoilt_within(LONG, which, bad)
}

/// The same, of an importer that waits so long for each answer.
fn spoilt_within(
    patience: Duration,
    which: At,
    bad: impl Fn(&Faithful, &Frame) -> Reply + Send + 'static,
) -> Result<(), ShareError> {
    outcome(patience, move |exporter, frame| match at(&frame.message) == which {
        true => bad(exporter, frame),
        false => faithful(exporter, frame),
    })
}

#[test]
fn a_faithful_exporter_is_believed() {
    outcome(LONG, faithful).unwrap();
}

#[test]
fn f_f6_garbage_other_versions_and_answers_cut_short_are_refused_at_each_step() {
    for which in ALL {
        let wrong = spoilt(which, |_, _| Some((b"garbage, and more of it".to_vec(), Vec::new())));
        assert!(matches!(wrong, Err(ShareError::Protocol { .. })), "{which:?}: {wrong:?}");
        let wrong = spoilt(which, |exporter, frame| {
            let (mut bytes, files) = faithful(exporter, frame)?;
            bytes[4] = 9;
            Some((bytes, files))
        });
        assert!(matches!(wrong, Err(ShareError::Version { theirs: 9, .. })), "{wrong:?}");
        let wrong = spoilt(which, |exporter, frame| {
            let (mut bytes, files) = faithful(exporter, frame)?;
            bytes.pop();
            Some((bytes, files))
        });
        assert!(matches!(wrong, Err(ShareError::Protocol { .. })), "{which:?}: {wrong:?}");
        let wrong = spoilt(which, |_, frame| {
            let other = Message::Fetch { export: 1, generation: 1, pieces: vec![1] };
            Some((Frame { request: frame.request, message: other }.encode(), Vec::new()))
        });
        assert!(matches!(wrong, Err(ShareError::Protocol { .. })), "{which:?}: {wrong:?}");
    }
}

#[test]
fn silence_and_a_sudden_end_are_told_at_each_step() {
    for which in ALL {
        let silent = spoilt_within(SHORT, which, |_, _| Some((Vec::new(), Vec::new())));
        assert!(matches!(silent, Err(ShareError::Timeout { .. })), "{which:?}: {silent:?}");
        let ended = spoilt(which, |_, _| None);
        assert!(matches!(ended, Err(ShareError::OwnerGone { .. })), "{which:?}: {ended:?}");
        // The answer to another question is passed over, and then nothing comes.
        let stale = spoilt_within(SHORT, which, |exporter, frame| {
            let stale = Frame { request: frame.request + 1000, message: frame.message.clone() };
            faithful(exporter, &stale)
        });
        assert!(matches!(stale, Err(ShareError::Timeout { .. })), "{which:?}: {stale:?}");
    }
}

#[test]
fn descriptors_too_many_or_too_few_are_refused_at_each_step() {
    for (which, most) in [(At::Hello, 0), (At::Open, 1), (At::Describe, 0), (At::Fetch, 2)] {
        for files_sent in [most + 1, 253] {
            let (mut reader, writer) = std::io::pipe().unwrap();
            let more = spoilt(which, move |exporter, frame| {
                let (bytes, mut files) = faithful(exporter, frame)?;
                files.resize_with(files_sent, || writer.try_clone().unwrap().into());
                Some((bytes, files))
            });
            assert!(matches!(more, Err(ShareError::Protocol { .. })), "{which:?}: {more:?}");
            // The last of them is closed when there is an end.
            assert!(
                wait(&reader, None, PollFlags::IN, Instant::now() + LONG).unwrap() == Waited::Ready
            );
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
        if most > 0 {
            let fewer = spoilt(which, |exporter, frame| {
                let (bytes, mut files) = faithful(exporter, frame)?;
                files.pop();
                Some((bytes, files))
            });
            assert!(matches!(fewer, Err(ShareError::Protocol { .. })), "{which:?}: {fewer:?}");
        }
    }
}

#[test]
fn f_f6_files_that_are_no_notice_page_or_no_chunk_are_refused() {
    let plain = |bytes: u64| {
        let file = memfd_create("plain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    };
    let no_page = spoilt(At::Open, move |exporter, frame| {
        Some((faithful(exporter, frame)?.0, vec![plain(4096)]))
    });
    assert!(matches!(no_page, Err(ShareError::Protocol { .. })), "{no_page:?}");
    let no_chunk = spoilt(At::Fetch, move |exporter, frame| {
        let (bytes, mut files) = faithful(exporter, frame)?;
        files[1] = plain(G);
        Some((bytes, files))
    });
    // The first one, which was good, is given back.
    assert!(matches!(no_chunk, Err(ShareError::Driver { .. })), "{no_chunk:?}");
}

#[test]
fn f_f6_descriptions_that_make_no_sense_are_refused() {
    type Spoil = fn(&mut Vec<PieceEntry>);
    let spoils: [Spoil; 8] = [
        |it| it[1].offset = G / 2,
        |it| it[1].offset = 0,
        |it| it[1].bytes = G - 1,
        |it| it[1].bytes = 0,
        |it| it[1].id = it[0].id,
        |it| it[1].offset = u64::MAX - G + 1,
        |it| it[1].offset = 1 << 47,
        |it| it.swap(0, 1),
    ];
    for spoil in spoils {
        let wrong = spoilt(At::Describe, move |exporter, frame| {
            let mut pieces = exporter.pieces();
            spoil(&mut pieces);
            let message = exporter.layout(pieces);
            Some((Frame { request: frame.request, message }.encode(), Vec::new()))
        });
        assert!(matches!(wrong, Err(ShareError::Protocol { .. })), "{wrong:?}");
    }
    // Longer than the chunk is: the driver notices.
    let longer = spoilt(At::Describe, |exporter, frame| {
        let mut pieces = exporter.pieces();
        pieces[1].bytes = 2 * G;
        let message = exporter.layout(pieces);
        Some((Frame { request: frame.request, message }.encode(), Vec::new()))
    });
    assert!(matches!(longer, Err(ShareError::Driver { .. })), "{longer:?}");
    let elsewhere = spoilt(At::Describe, |exporter, frame| {
        let mut pieces = exporter.pieces();
        pieces[1].home = Home::Gpu(Uuid([7; 16]));
        let message = exporter.layout(pieces);
        Some((Frame { request: frame.request, message }.encode(), Vec::new()))
    });
    assert!(matches!(elsewhere, Err(ShareError::NotVisibleHere { .. })), "{elsewhere:?}");
}

#[test]
fn counts_that_promise_too_much_are_refused() {
    for (total, first) in [(u32::MAX, 0), (1, 0), (2, 1), (3, 0)] {
        let wrong = spoilt(At::Describe, move |exporter, frame| {
            let pieces = match frame.message {
                Message::Describe { first: 0, .. } => exporter.pieces(),
                _ => Vec::new(),
            };
            let message = Message::Layout { generation: 5, total, first, pieces };
            Some((Frame { request: frame.request, message }.encode(), Vec::new()))
        });
        let expected =
            matches!(wrong, Err(ShareError::Protocol { .. } | ShareError::TooLarge { .. }));
        assert!(expected, "{total} from {first}: {wrong:?}");
    }
    let other = spoilt(At::Fetch, |exporter, frame| {
        let (_, files) = faithful(exporter, frame)?;
        let message = Message::Pieces { generation: 5, pieces: vec![2, 1] };
        Some((Frame { request: frame.request, message }.encode(), files))
    });
    assert!(matches!(other, Err(ShareError::Protocol { .. })), "{other:?}");
    let sizes = spoilt(At::Open, |exporter, frame| {
        let (_, files) = faithful(exporter, frame)?;
        let opened =
            Message::Opened { export: 1, write: false, chunk_bytes: 0, ordering: Ordering::Host };
        Some((Frame { request: frame.request, message: opened }.encode(), files))
    });
    assert!(matches!(sizes, Err(ShareError::Protocol { .. })), "{sizes:?}");
}

#[test]
fn an_exporter_that_changes_for_ever_is_given_up() {
    for which in [At::Describe, At::Fetch] {
        let changing = spoilt_within(SHORT, which, |_, frame| {
            let (reason, text) = (Refusal::Changed, "again".to_owned());
            let message = Message::Refused { reason, text };
            Some((Frame { request: frame.request, message }.encode(), Vec::new()))
        });
        assert!(matches!(changing, Err(ShareError::Changing { .. })), "{which:?}: {changing:?}");
    }
}
