//! D-X and D-V6: chunks that leave the process as descriptors.

use std::fs::File;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::ResultCode;
use crate::types::{ChunkHandle, ChunkProps, GranularityKind, HandleTypes, Location};

use super::super::bench::Bench;
use super::super::check::{ensure, near, refused, same};
use super::super::outcome::{Outcome, Step, Stop};
use super::super::scratch::{Scratch, WORD};
use super::super::second::Order;

/// A chunk of the device under test that can be exported as a descriptor.
pub(super) fn exportable(s: &Scratch<'_>, bytes: u64) -> Step<ChunkHandle> {
    let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..s.props() };
    Ok(s.create(bytes, &props)?)
}

/// D-X1: what was made without handle types stays at home.
pub(super) fn d_x1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let chunk = s.chunk(s.g(), s.device())?;
        refused("export", s.export_fd(chunk), ResultCode::INVALID_VALUE)?;
        Ok(String::new())
    })
}

/// D-X2: another handle, the same memory.
pub(super) fn d_x2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (2 * s.g(), s.device());
        let words = bytes / WORD;
        let chunk = exportable(s, bytes)?;
        let descriptor = s.export_fd(chunk)?;
        let imported = s.import_fd(descriptor.as_fd())?;
        ensure(imported != chunk, || format!("expected another handle, got {imported:?} again"))?;
        let ours = s.alias(bytes, chunk, &[device])?;
        let theirs = s.alias(bytes, imported, &[device])?;
        s.fill_words(device, ours, words, 300)?;
        s.expect_words("read through the import", device, theirs, words, 300)?;
        s.fill_words(device, theirs, words, 400)?;
        s.expect_words("read through the original", device, ours, words, 400)?;
        Ok(String::new())
    })
}

/// D-X3: descriptors that are no exports.
pub(super) fn d_x3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device_file = OwnedFd::from(File::open("/dev/null")?);
        for (what, descriptor) in [("/dev/null", device_file), ("plain memory", plain_memory()?)] {
            refused(what, s.import_fd(descriptor.as_fd()), ResultCode::UNKNOWN)?;
        }
        Ok(String::new())
    })
}

/// A descriptor of anonymous memory that no driver made.
fn plain_memory() -> Step<OwnedFd> {
    // SAFETY: the name is a C string, and the call takes nothing else by reference.
    let raw = unsafe { libc::memfd_create(c"plain".as_ptr(), libc::MFD_CLOEXEC) };
    if raw < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the descriptor was just opened and belongs to nobody else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(raw) });
    file.set_len(4096)?;
    Ok(file.into())
}

/// D-X4: memory outlives the process that made it.
pub(super) fn d_x4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (2 * s.g(), s.device());
        let words = bytes / WORD;
        let mut exporter = bench.second_process()?;
        exporter.order(Order::Export, [bytes, 500, device.0.into()], None)?;
        let (_, descriptor) = exporter.reply()?;
        let descriptor =
            descriptor.ok_or_else(|| Stop::Failed("the exporter sent no descriptor".into()))?;
        exporter.wait_for_exit()?;
        let imported = s.import_fd(descriptor.as_fd())?;
        let address = s.alias(bytes, imported, &[device])?;
        s.expect_words("bytes of the process that is gone", device, address, words, 500)?;
        s.expect_words_by_kernel("the same by a kernel", device, address, words, 500)?;
        Ok(String::new())
    })
}

/// D-X5: the size of an imported handle is the exporter's.
pub(super) fn d_x5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 2 * s.g();
        let chunk = exportable(s, bytes)?;
        let descriptor = s.export_fd(chunk)?;
        let imported = s.import_fd(descriptor.as_fd())?;
        let address = s.range(2 * bytes)?;
        let answer = s.map(address, 2 * bytes, 0, imported);
        refused("map twice the size", answer, ResultCode::NOT_SUPPORTED)?;
        s.map(address, bytes, 0, imported)?;
        Ok(String::new())
    })
}

/// D-X6: a descriptor holds the memory as a handle does.
pub(super) fn d_x6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 512 * s.g();
        let tolerance = bytes / 32;
        let before = s.free_bytes()?;
        let held = before.saturating_sub(bytes);
        let chunk = exportable(s, bytes)?;
        near("free after create", s.free_bytes()?, held, tolerance)?;
        let descriptor = s.export_fd(chunk)?;
        s.release(chunk)?;
        near("free after release", s.free_bytes()?, held, tolerance)?;
        drop(descriptor);
        free_after_closing(s, before, tolerance)?;
        Ok(String::new())
    })
}

/// The memory that the last descriptor held is free again, but for `tolerance` bytes.
pub(super) fn free_after_closing(s: &Scratch<'_>, before: u64, tolerance: u64) -> Step<()> {
    // The kernel may put the end of a file off a little.
    let deadline = Instant::now() + Duration::from_secs(2);
    while s.free_bytes()?.abs_diff(before) > tolerance && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    near("free after the descriptor was closed", s.free_bytes()?, before, tolerance)
}

/// D-X13: memory of the host leaves the process as that of a device does.
pub(super) fn d_x13(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let device = s.device();
        let location = Location::HostNuma(0);
        let props = ChunkProps { location, handle_types: HandleTypes::POSIX_FD, rdma: false };
        let bytes = s.driver().granularity(&props, GranularityKind::Minimum)?;
        let words = bytes / WORD;
        let chunk = s.create(bytes, &props)?;
        let address = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, address, words, 700)?;
        let descriptor = s.export_fd(chunk)?;
        // The descriptor alone keeps it.
        s.unmap(address, bytes)?;
        s.release(chunk)?;
        let imported = s.import_fd(descriptor.as_fd())?;
        let address = s.alias(bytes, imported, &[device])?;
        s.expect_words("bytes behind the import", device, address, words, 700)?;
        s.expect_words_by_kernel("the same by a kernel", device, address, words, 700)?;
        Ok(String::new())
    })
}

/// D-V6: the importing process grants a device of its own choice.
pub(super) fn d_v6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (4 * s.g(), s.device());
        let words = bytes / WORD;
        let mut importer = bench.second_process()?;
        let chunk = exportable(s, bytes)?;
        let address = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, address, words, 600)?;
        let descriptor = s.export_fd(chunk)?;
        let numbers = [bytes, 600, device.0.into()];
        importer.order(Order::Import, numbers, Some(descriptor.as_fd()))?;
        let ([wrong, control, _], _) = importer.reply()?;
        same("wrong words, seen by the importer's second device", wrong, 0)?;
        same("wrong words of another pattern", control, words)?;
        importer.wait_for_exit()?;
        s.expect_words("the exporter's own view", device, address, words, 600)?;
        Ok(String::new())
    })
}
