//! D-X7 to D-X12, D-N19: events and memory that other processes and other drivers use.

use std::os::fd::AsFd;

use crate::error::ResultCode;
use crate::types::{
    ChunkProps, DeviceAttribute, DriverKind, HandleTypes, IpcEventHandle, Location, ProbeKernel,
};

use super::super::bench::Bench;
use super::super::check::{Answers, answer, ensure, near, refused, same, skip};
use super::super::gate::{Gate, hold_limit};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::{Scratch, WORD};
use super::super::second::Order;
use super::export::{exportable, free_after_closing};

/// An alignment that is taken for a dma-buf. D-N19 asks for finer ones.
const DMA_BUF_PAGE: u64 = 64 << 10;

/// D-X7: an event of one process orders the streams of another, or the driver shares none.
pub(super) fn d_x7(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let attribute = DeviceAttribute::IpcEventSupported;
        let says = s.driver().device_attribute(s.device(), attribute)?;
        if says == 1 {
            return an_event_is_followed(bench, s);
        }
        if s.driver().kind() == DriverKind::Cuda {
            return skip(format!("{attribute:?} is {says}"));
        }
        let (device, code) = (s.device(), ResultCode::NOT_SUPPORTED);
        refused("make an event for others", s.interprocess_event(device), code)?;
        let event = s.event(device)?;
        refused("name an event", s.event_handle(device, event), code)?;
        refused("open an event", s.open_event(device, &IpcEventHandle([0; 64])), code)?;
        Ok("no events are shared: all three calls are refused".into())
    })
}

fn an_event_is_followed(bench: &Bench, s: &Scratch<'_>) -> Step<String> {
    let (bytes, device, value) = (2 * s.g(), s.device(), 700);
    let words = bytes / WORD;
    let mut other = bench.second_process()?;
    let chunk = exportable(s, bytes)?;
    let address = s.alias(bytes, chunk, &[device])?;
    // Kernels are loaded before a stream is held (row D-N16).
    s.fill_words(device, address, words, 1)?;
    let event = s.interprocess_event(device)?;
    let stream = s.stream(device)?;
    let descriptor = s.export_fd(chunk)?;
    let numbers = [bytes, value.into(), device.0.into()];
    other.order(Order::Follow, numbers, Some(descriptor.as_fd()))?;
    other.send_handle(&s.event_handle(device, event)?)?;
    other.reply()?;
    let mut gate = Gate::close(s, device, stream, hold_limit(s))?;
    s.launch(device, ProbeKernel::FillWords { dst: address, words, value }, stream)?;
    s.record(device, event, stream)?;
    other.go_on()?;
    let ([early, ..], _) = other.reply()?;
    gate.open();
    let ([wrong, late, _], _) = other.reply()?;
    ensure(!gate.timed_out(), || "the other process waited for the held stream".into())?;
    same("whether it has passed, asked while its stream is held", early, 0)?;
    same("wrong words behind the event", wrong, 0)?;
    same("whether it has passed, asked after a wait for it", late, 1)?;
    other.wait_for_exit()?;
    Ok("the other process waited for the event, and saw what lies before it".into())
}

/// Two chunks side by side; returns their address.
fn neighbours(s: &Scratch<'_>, bytes: u64, rdma: bool) -> Step<u64> {
    let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, rdma, ..s.props() };
    let address = s.range(2 * bytes)?;
    for slot in [0, 1] {
        let chunk = s.create(bytes, &props)?;
        s.map_for(address + slot * bytes, bytes, chunk, &[s.device()])?;
    }
    Ok(address)
}

/// Rows about dma-bufs need a driver that makes some.
fn needs_dma_bufs(s: &Scratch<'_>) -> Step<()> {
    let attribute = DeviceAttribute::DmaBufSupported;
    match s.driver().device_attribute(s.device(), attribute)? {
        1 => Ok(()),
        says => skip(format!("{attribute:?} is {says}")),
    }
}

/// D-X8: of which addresses a dma-buf can be had.
pub(super) fn d_x8(bench: &Bench) -> Outcome {
    bench.check(|s| {
        needs_dma_bufs(s)?;
        let (bytes, device) = (s.g(), s.device());
        for rdma in [false, true] {
            let address = neighbours(s, bytes, rdma)?;
            s.driver().dma_buf(device, address, bytes)?;
            s.driver().dma_buf(device, address, 2 * bytes)?;
            s.driver().dma_buf(device, address + DMA_BUF_PAGE, DMA_BUF_PAGE)?;
            let off = s.driver().dma_buf(device, address + 100, DMA_BUF_PAGE);
            refused("100 bytes off", off, ResultCode::INVALID_VALUE)?;
        }
        Ok(String::new())
    })
}

/// D-X9: a dma-buf holds the memory as a mapping does.
pub(super) fn d_x9(bench: &Bench) -> Outcome {
    bench.check(|s| {
        needs_dma_bufs(s)?;
        let bytes = 512 * s.g();
        let tolerance = bytes / 32;
        let before = s.free_bytes()?;
        let held = before.saturating_sub(bytes);
        let chunk = exportable(s, bytes)?;
        let address = s.alias(bytes, chunk, &[s.device()])?;
        let descriptor = s.driver().dma_buf(s.device(), address, bytes)?;
        s.unmap(address, bytes)?;
        s.release(chunk)?;
        near("free after unmap and release", s.free_bytes()?, held, tolerance)?;
        drop(descriptor);
        free_after_closing(s, before, tolerance)?;
        Ok(String::new())
    })
}

/// D-X10: who maps an import for reading and writes all the same harms nobody but itself.
pub(super) fn d_x10(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (2 * s.g(), s.device());
        let words = bytes / WORD;
        let mut importer = bench.second_process()?;
        let chunk = exportable(s, bytes)?;
        let address = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, address, words, 800)?;
        let descriptor = s.export_fd(chunk)?;
        importer.order(Order::Read, [bytes, 800, device.0.into()], Some(descriptor.as_fd()))?;
        let ([copied, written, afterwards], _) = importer.reply()?;
        let fault = u64::from(ResultCode::ILLEGAL_ADDRESS.0);
        same("code of the importer's copy in", copied, ResultCode::INVALID_VALUE.0.into())?;
        same("code of the importer's kernel that writes", written, fault)?;
        same("code of the importer's next question", afterwards, fault)?;
        importer.wait_for_exit()?;
        s.expect_words("the owner's bytes", device, address, words, 800)?;
        s.fill_words(device, address, words, 900)?;
        s.expect_words_by_kernel("the owner goes on", device, address, words, 900)?;
        Ok(String::new())
    })
}

/// D-X11: one chunk, exported as often as one likes; each descriptor is good on its own.
pub(super) fn d_x11(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let chunk = exportable(s, bytes)?;
        let ours = s.alias(bytes, chunk, &[device])?;
        s.fill_words(device, ours, words, 1000)?;
        let (first, second) = (s.export_fd(chunk)?, s.export_fd(chunk)?);
        drop(first);
        let imported = s.import_fd(second.as_fd())?;
        let theirs = s.alias(bytes, imported, &[device])?;
        s.expect_words("through the second export", device, theirs, words, 1000)?;
        Ok(String::new())
    })
}

/// D-X12: an import knows where its memory lies, and is not itself made to be exported.
pub(super) fn d_x12(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let attribute = DeviceAttribute::GpuDirectRdmaWithVmmSupported;
        let rdma = s.driver().device_attribute(device, attribute)? == 1;
        let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, rdma, ..s.props() };
        let chunk = s.create(bytes, &props)?;
        same("properties of the owner's handle", s.properties(chunk)?, props)?;
        let descriptor = s.export_fd(chunk)?;
        let mut importer = bench.second_process()?;
        importer.order(Order::Properties, [bytes, 0, device.0.into()], Some(descriptor.as_fd()))?;
        let ([handle_types, rdma_there, is_here], _) = importer.reply()?;
        same("handle types of the import", handle_types, 0)?;
        same("RDMA flag of the import", rdma_there, 0)?;
        same("whether the import lies on the device", is_here, 1)?;
        importer.wait_for_exit()?;
        Ok(String::new())
    })
}

/// D-N19: what else a dma-buf can be had of.
pub(super) fn d_n19(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        needs_dma_bufs(s)?;
        let (g, device) = (s.g(), s.device());
        let ask = |address, bytes| answer(&s.driver().dma_buf(device, address, bytes));
        let mut answers = Answers::default();
        let address = neighbours(s, g, false)?;
        answers.note("from 4 KiB on", ask(address + 4096, DMA_BUF_PAGE));
        answers.note("4 KiB", ask(address, 4096));
        answers.note("100 bytes", ask(address, 100));
        let plain = s.buffer(g, device, &[device])?;
        answers.note("memory without handle types", ask(plain, g));
        let hidden = s.range(g)?;
        s.map(hidden, g, 0, s.chunk(g, device)?)?;
        answers.note("memory without access", ask(hidden, g));
        let holed = s.range(3 * g)?;
        for slot in [0, 2] {
            s.map_for(holed + slot * g, g, s.chunk(g, device)?, &[device])?;
        }
        answers.note("over a hole", ask(holed, 3 * g));
        answers.note("memory of cuMemAlloc", ask(s.mem_alloc(device, g)?, g));
        let host = ChunkProps { location: Location::HostNuma(0), ..s.props() };
        match s.create(g, &host) {
            Ok(chunk) => answers.note("host memory", ask(s.alias(g, chunk, &[device])?, g)),
            Err(error) => answers.note("host memory", format_args!("none to be had: {error}")),
        }
        let descriptor = s.driver().dma_buf(device, address, g)?;
        answers.note("imported as an export", answer(&s.import_fd(descriptor.as_fd())));
        answers.told()
    })
}
