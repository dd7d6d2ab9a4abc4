//! Exported chunks: rows X, between processes too.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use super::*;
use crate::error::ResultCode as Code;

const ROLE: &str = "VMM_SIM_TEST_ROLE";

fn exportable(device: DeviceId) -> ChunkProps {
    ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(device) }
}

fn export(sim: &Sim, chunk: ChunkHandle) -> OwnedFd {
    // SAFETY: the simulator checks handles itself.
    unsafe { sim.export_fd(chunk) }.unwrap()
}

fn map_it(sim: &Sim, chunk: ChunkHandle, bytes: u64, device: DeviceId) -> u64 {
    let va = sim.address_reserve(bytes, 0, 0).unwrap();
    sim.t_map(va, bytes, chunk).unwrap();
    sim.set_access(va, bytes, &[AccessGrant::read_write(device)]).unwrap();
    va
}

/// Runs one of the roles below in a process of its own, with a descriptor as its standard input.
fn other_process(role: &str, descriptor: OwnedFd) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "sim::tests::sharing::role_in_another_process", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::from(descriptor))
        .stdout(Stdio::piped());
    command
}

/// Not a test by itself: what the other process does.
#[test]
fn role_in_another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let descriptor = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let sim = if role == "swapped" {
        Sim::builder().visible(&[1, 0]).build()
    } else if role == "elsewhere" {
        Sim::builder().visible(&[5]).build()
    } else {
        sim()
    };
    let imported = sim.import_fd(descriptor.as_fd());
    match role.as_str() {
        "write" => {
            let va = map_it(&sim, imported.unwrap(), G, D0);
            assert_eq!(sim.t_download(D0, va + 100, 5).unwrap(), b"hello");
            sim.t_upload(D0, va + 100, b"there").unwrap();
        }
        "swapped" => {
            let va = map_it(&sim, imported.unwrap(), G, D1);
            assert_eq!(sim.pointer_info(va).unwrap().device, D1);
        }
        "elsewhere" => assert_eq!(code(imported), Code::INVALID_DEVICE),
        "hold" => {
            // Holds the memory without the descriptor until it is killed.
            imported.unwrap();
            println!("holding");
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn only_what_was_made_for_it_is_exported() {
    let sim = sim();
    let plain = sim.create(G, &ChunkProps::on_device(D0)).unwrap();
    // SAFETY: the simulator checks handles itself.
    assert_eq!(code(unsafe { sim.export_fd(plain) }), Code::INVALID_VALUE);
}

#[test]
fn an_import_in_the_same_process_is_another_handle_of_the_same_chunk() {
    let sim = sim();
    let chunk = sim.create(G, &exportable(D0)).unwrap();
    let va = map_it(&sim, chunk, G, D0);
    sim.t_upload(D0, va, b"before the export").unwrap();
    let fd = export(&sim, chunk);
    let imported = sim.import_fd(fd.as_fd()).unwrap();
    assert_ne!(imported, chunk);
    assert_eq!(sim.ledger_summary().chunks, 1);
    let alias = map_it(&sim, imported, G, D0);
    assert_eq!(sim.t_download(D0, alias, 17).unwrap(), b"before the export");
    sim.t_upload(D0, alias, b"shared").unwrap();
    assert_eq!(sim.t_download(D0, va, 6).unwrap(), b"shared");
    let wide = sim.address_reserve(2 * G, 0, 0).unwrap();
    assert_eq!(code(sim.t_map(wide, 2 * G, imported)), Code::NOT_SUPPORTED);
    // SAFETY: the simulator checks handles itself.
    assert_eq!(unsafe { sim.properties(imported) }.unwrap(), ChunkProps::on_device(D0));
}

#[test]
fn what_is_no_export_is_refused() {
    let sim = sim();
    let file = File::open("/dev/null").unwrap();
    assert_eq!(code(sim.import_fd(file.as_fd())), Code::UNKNOWN);
    let (pipe, _other_end) = std::io::pipe().unwrap();
    assert_eq!(code(sim.import_fd(pipe.as_fd())), Code::UNKNOWN);
    // SAFETY: a call of a C string and a flag; the descriptor is ours.
    let memfd = unsafe {
        let raw = libc::memfd_create(c"not-an-export".as_ptr(), libc::MFD_CLOEXEC);
        <File as std::os::fd::FromRawFd>::from_raw_fd(raw)
    };
    memfd.set_len(G + 4096).unwrap();
    assert_eq!(code(sim.import_fd(memfd.as_fd())), Code::UNKNOWN);
}

#[test]
fn an_open_descriptor_keeps_the_memory() {
    let sim = sim();
    let before = sim.mem_info(D0).unwrap().free_bytes;
    let chunk = sim.create(4 * G, &exportable(D0)).unwrap();
    let fd = export(&sim, chunk);
    let duplicate = fd.try_clone().unwrap();
    sim.t_release(chunk).unwrap();
    let taken = || before - sim.mem_info(D0).unwrap().free_bytes;
    assert_eq!(taken(), 4 * G);
    drop(fd);
    assert_eq!((taken(), sim.ledger_summary().orphans), (4 * G, 1));
    // It can come to life again.
    let again = sim.import_fd(duplicate.as_fd()).unwrap();
    drop(duplicate);
    assert_eq!((taken(), sim.ledger_summary().orphans), (4 * G, 0));
    sim.t_release(again).unwrap();
    assert_eq!(taken(), 0);
    assert_eq!(sim.check_clean(), Ok(()));
}

#[test]
fn memory_comes_free_for_a_create_once_the_descriptor_is_closed() {
    let sim = Sim::builder().device_bytes(G).build();
    let chunk = sim.create(G, &exportable(D0)).unwrap();
    let fd = export(&sim, chunk);
    sim.t_release(chunk).unwrap();
    assert!(sim.create(G, &exportable(D0)).unwrap_err().is_out_of_memory());
    drop(fd);
    assert!(sim.create(G, &exportable(D0)).is_ok());
}

#[test]
fn bytes_cross_to_another_process_and_back() {
    let sim = sim();
    let chunk = sim.create(G, &exportable(D0)).unwrap();
    let va = map_it(&sim, chunk, G, D0);
    sim.t_upload(D0, va + 100, b"hello").unwrap();
    let output = other_process("write", export(&sim, chunk)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(sim.t_download(D0, va + 100, 5).unwrap(), b"there");
}

#[test]
fn the_importer_finds_the_device_by_its_identity() {
    let sim = sim();
    let chunk = sim.create(G, &exportable(D0)).unwrap();
    for role in ["swapped", "elsewhere"] {
        let output = other_process(role, export(&sim, chunk)).output().unwrap();
        assert!(output.status.success(), "{role}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn a_killed_importer_gives_the_memory_back() {
    use std::io::Read;
    let sim = sim();
    let before = sim.mem_info(D0).unwrap().free_bytes;
    let chunk = sim.create(G, &exportable(D0)).unwrap();
    let mut child = other_process("hold", export(&sim, chunk)).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut seen = String::new();
    while !seen.contains("holding") {
        let mut byte = [0; 1];
        assert_eq!(out.read(&mut byte).unwrap(), 1, "ended early: {seen}");
        seen.push(byte[0] as char);
    }
    sim.t_release(chunk).unwrap();
    assert_eq!(before - sim.mem_info(D0).unwrap().free_bytes, G);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(sim.mem_info(D0).unwrap().free_bytes, before);
}

#[test]
fn two_machines_in_one_process_share_a_chunk_and_each_counts_it_once() {
    let (a, b) = (sim(), sim());
    let free = |sim: &Sim| sim.mem_info(D0).unwrap().free_bytes;
    let before = free(&b);
    let chunk = a.create(G, &exportable(D0)).unwrap();
    let fd = export(&a, chunk);
    let imported = b.import_fd(fd.as_fd()).unwrap();
    let again = b.import_fd(fd.as_fd()).unwrap();
    drop(fd);
    assert_ne!(imported, again);
    assert_eq!(before - free(&b), G);
    b.t_release(imported).unwrap();
    b.t_release(again).unwrap();
    assert_eq!(before - free(&b), G, "its maker still holds it");
    a.t_release(chunk).unwrap();
    assert_eq!((free(&a), free(&b)), (before, before));
}

#[test]
fn descriptors_depend_on_live_exports_only() {
    let own_memfds = || {
        let link = |entry: std::io::Result<std::fs::DirEntry>| {
            let target = std::fs::read_link(entry.ok()?.path()).ok()?;
            Some(target.to_string_lossy().contains("vmm-sim-chunk"))
        };
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(link).filter(|it| *it).count()
    };
    let sim = Sim::builder().build();
    let chunks: Vec<_> = (0..600).map(|_| sim.create(G, &exportable(D0)).unwrap()).collect();
    let va = map_it(&sim, chunks[0], G, D0);
    sim.t_upload(D0, va + G - 3, b"end").unwrap();
    sim.t_upload(D0, va, b"start").unwrap();
    for chunk in &chunks {
        let fd = export(&sim, *chunk);
        let import = sim.import_fd(fd.as_fd()).unwrap();
        sim.t_release(import).unwrap();
    }
    // Other tests of this process have some of their own.
    assert!(own_memfds() < 200, "{} descriptors", own_memfds());
    // The first chunk was taken back long ago, with its bytes.
    assert_eq!(sim.t_download(D0, va + G - 3, 3).unwrap(), b"end");
    assert_eq!(sim.t_download(D0, va, 8).unwrap(), b"start\0\0\0");
}

fn mapped_side_by_side(sim: &Sim, count: u64) -> (u64, Vec<ChunkHandle>) {
    let va = sim.address_reserve(count * G, 0, 0).unwrap();
    let chunks: Vec<_> = (0..count).map(|_| sim.create(G, &exportable(D0)).unwrap()).collect();
    for (slot, chunk) in (0..).zip(&chunks) {
        sim.t_map(va + slot * G, G, *chunk).unwrap();
    }
    (va, chunks)
}

#[test]
fn a_dma_buf_keeps_every_chunk_behind_it_until_its_last_duplicate_is_closed() {
    let sim = sim();
    let before = sim.mem_info(D0).unwrap().free_bytes;
    let (va, chunks) = mapped_side_by_side(&sim, 3);
    // From the middle of the first to the middle of the second.
    let part = sim.dma_buf(D0, va + G / 2, G).unwrap();
    assert_eq!(File::from(part.try_clone().unwrap()).metadata().unwrap().len(), G);
    assert_eq!(code(sim.import_fd(part.as_fd())), Code::UNKNOWN, "it is no exported chunk");
    let duplicate = part.try_clone().unwrap();
    sim.unmap(va, 3 * G).unwrap();
    for chunk in chunks {
        sim.t_release(chunk).unwrap();
    }
    sim.address_free(va, 3 * G).unwrap();
    let taken = || before - sim.mem_info(D0).unwrap().free_bytes;
    assert_eq!((taken(), sim.ledger_summary().orphans), (2 * G, 2));
    drop(part);
    assert_eq!(taken(), 2 * G);
    drop(duplicate);
    assert_eq!(taken(), 0);
    assert_eq!(sim.check_clean(), Ok(()));
}

#[test]
fn a_dma_buf_is_of_whole_pages_of_mapped_chunks() {
    let sim = sim();
    let (va, _) = mapped_side_by_side(&sim, 2);
    let host = ChunkProps { location: Location::HostNuma(0), ..exportable(D0) };
    let _hole = sim.address_reserve(G, 0, 0).unwrap();
    let host_va = sim.address_reserve(G, 0, 0).unwrap();
    sim.t_map(host_va, G, sim.create(G, &host).unwrap()).unwrap();
    let own = sim.mem_alloc(D0, G).unwrap();
    for (address, bytes, expected) in [
        (va + 100, 64 << 10, Code::INVALID_VALUE),
        (va, 100, Code::INVALID_VALUE),
        (va, 0, Code::INVALID_VALUE),
        (va + G, 2 * G, Code::INVALID_VALUE),
        (host_va, G, Code::INVALID_VALUE),
        (own, G, Code::NOT_SUPPORTED),
    ] {
        assert_eq!(code(sim.dma_buf(D0, address, bytes)), expected, "{bytes} at {address:#x}");
    }
    let old = Sim::builder().driver_version(11_060).build();
    assert_eq!(code(old.dma_buf(D0, va, G)), Code::NOT_SUPPORTED);
}

/// Descriptors of the simulator's own go with those that it gave out.
#[test]
fn dma_bufs_that_were_closed_are_forgotten() {
    let sim = sim();
    let (va, chunks) = mapped_side_by_side(&sim, 1);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..600 {
        drop(sim.dma_buf(D0, va, G).unwrap());
    }
    // Other tests of this process open some meanwhile.
    assert!(open() < before + 300, "{} open, {before} before", open());
    drop(chunks);
}
