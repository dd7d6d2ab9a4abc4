//! What the second process does, order by order. All that is made is given back by the caller,
//! before the process ends.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::error::DriverResult;
use crate::types::{
    Access, AccessGrant, ChunkProps, HandleTypes, IpcEventHandle, Location, ProbeKernel,
};

use super::outcome::{Step, Stop};
use super::scratch::{Scratch, WORD};
use super::second::{DONE, Order, receive, receive_handle, send};

/// What an order comes with.
pub(super) struct Parts<'a> {
    pub(super) bytes: u64,
    pub(super) value: u32,
    pub(super) descriptor: Option<OwnedFd>,
    pub(super) socket: &'a UnixStream,
}

/// Does one order, by its number on the wire.
pub(super) fn obey(scratch: &Scratch<'_>, order: u64, parts: &Parts<'_>) -> Step<()> {
    let Some(order) = Order::from_number(order) else {
        return Err(Stop::Failed(format!("order {order} is not known")));
    };
    match order {
        Order::Export => export(scratch, parts),
        Order::Import => import(scratch, parts),
        Order::Read => read_only(scratch, parts),
        Order::Properties => properties(scratch, parts),
        Order::Follow => follow(scratch, parts),
    }
}

impl Parts<'_> {
    fn descriptor(&self) -> Step<&OwnedFd> {
        self.descriptor.as_ref().ok_or_else(|| Stop::Failed("no descriptor came along".into()))
    }

    fn words(&self) -> u64 {
        self.bytes / WORD
    }

    fn reply(&self, [first, second, third]: [u64; 3]) -> Step<()> {
        Ok(send(self.socket, [DONE, first, second, third], None)?)
    }
}

/// Exports a filled chunk.
fn export(scratch: &Scratch<'_>, parts: &Parts<'_>) -> Step<()> {
    let device = scratch.device();
    let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(device) };
    let chunk = scratch.create(parts.bytes, &props)?;
    let address = scratch.alias(parts.bytes, chunk, &[device])?;
    scratch.fill_words(device, address, parts.words(), parts.value)?;
    let descriptor = scratch.export_fd(chunk)?;
    Ok(send(parts.socket, [DONE, 0, 0, 0], Some(descriptor.as_fd()))?)
}

/// Imports a chunk, lets this process's own second device read it, and replies with the number of
/// wrong words, and with that of a pattern that is not there: a check that cannot fail is none.
fn import(scratch: &Scratch<'_>, parts: &Parts<'_>) -> Step<()> {
    let peer = scratch.peer()?;
    let chunk = scratch.import_fd(parts.descriptor()?.as_fd())?;
    let address = scratch.alias(parts.bytes, chunk, &[peer])?;
    let errors = scratch.buffer(scratch.g(), peer, &[peer])?;
    let (words, value) = (parts.words(), parts.value);
    let wrong = scratch.wrong_words(peer, address, words, value, errors)?;
    let control = scratch.wrong_words(peer, address, words, value.wrapping_add(1), errors)?;
    parts.reply([wrong.into(), control.into(), 0])
}

/// Imports a chunk for reading, reads it, and tries to write it by a copy and by a kernel. Replies
/// with the codes of both, and with that of a call in the context afterwards.
fn read_only(scratch: &Scratch<'_>, parts: &Parts<'_>) -> Step<()> {
    let device = scratch.device();
    let chunk = scratch.import_fd(parts.descriptor()?.as_fd())?;
    let address = scratch.range(parts.bytes)?;
    scratch.map(address, parts.bytes, 0, chunk)?;
    let grant = AccessGrant { location: Location::Device(device), access: Access::Read };
    scratch.set_access(address, parts.bytes, &[grant])?;
    scratch.expect_words("the importer reads", device, address, parts.words(), parts.value)?;
    let copied = scratch.write(device, address, &[1; WORD as usize]);
    let written = scratch.run_kernel(
        device,
        ProbeKernel::FillWords { dst: address, words: parts.words(), value: 0 },
    );
    let afterwards = scratch.driver().mem_info(device);
    parts.reply([code(&copied), code(&written), code(&afterwards)])
}

fn code<T>(result: &DriverResult<T>) -> u64 {
    result.as_ref().err().map_or(0, |error| error.code().0.into())
}

/// Imports a chunk, and replies with the handle types and the RDMA flag that its properties name, and
/// whether they name this device.
fn properties(scratch: &Scratch<'_>, parts: &Parts<'_>) -> Step<()> {
    let chunk = scratch.import_fd(parts.descriptor()?.as_fd())?;
    let props = scratch.properties(chunk)?;
    let is_here = props.location == Location::Device(scratch.device());
    parts.reply([props.handle_types.bits().into(), props.rdma.into(), is_here.into()])
}

/// Opens an event of the first process, and lets a kernel read a chunk behind it. Replies when it is
/// ready; when it is told to go on, with whether the event has passed already; then with the number of
/// wrong words, and whether it has passed by then.
fn follow(scratch: &Scratch<'_>, parts: &Parts<'_>) -> Step<()> {
    let device = scratch.device();
    let handle: IpcEventHandle = receive_handle(parts.socket)?;
    let chunk = scratch.import_fd(parts.descriptor()?.as_fd())?;
    let address = scratch.alias(parts.bytes, chunk, &[device])?;
    let errors = scratch.buffer(scratch.g(), device, &[device])?;
    scratch.fill(device, errors, 0, WORD)?;
    let stream = scratch.stream(device)?;
    let event = scratch.open_event(device, &handle)?;
    parts.reply([0; 3])?;
    receive(parts.socket)?;
    let passed = scratch.has_passed(device, event)?;
    scratch.follow(device, stream, event)?;
    let (src, words, value) = (address, parts.words(), parts.value);
    scratch.launch(device, ProbeKernel::CheckWords { src, words, value, errors }, stream)?;
    parts.reply([passed.into(), 0, 0])?;
    scratch.wait_event(device, event)?;
    scratch.synchronize(device, stream)?;
    let wrong = scratch.word(device, errors)?;
    parts.reply([wrong.into(), scratch.has_passed(device, event)?.into(), 0])
}
