//! Elastic memory in other hands: descriptors imported in this process, and buffers shared with a child.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use vmm_share::{Address, Exporter, Offer, Offered};
use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::{AccessGrant, ChunkProps, DeviceId, HandleTypes, Location};

use super::board::Words;
use super::elastic::item;
use super::item::{Item, Slot};
use super::trouble::{NOTHING, Step, Trouble};
use super::worker::Worker;
use super::world::{World, lock};
use crate::machine::DriverChoice;

/// Buffers that the child has at once.
const OFFERS: usize = 3;

// ---- in this process ----

/// Exports a piece, imports it again, and reads it at an address of its own.
pub(super) fn import_here(worker: &mut Worker<'_>) -> Step {
    let Some(item) = item(worker) else { return NOTHING };
    if !item.buffer.is_exportable() {
        return NOTHING;
    }
    let slots = item.read();
    let Some(slot) = slots.pick(worker, |slot| matches!(slot, Slot::Filled { .. })) else {
        return NOTHING;
    };
    let Slot::Filled { value, .. } = slots.of[slot] else { return NOTHING };
    let exported = item.buffer.export_pieces_in(item.bytes_of(slot..slot + 1))?;
    let Some((piece, descriptor)) = exported.into_iter().next() else {
        return Err(Trouble::Refused("asleep")); // it has no memory now
    };
    let device = piece.place.device().unwrap_or(item.buffer.device());
    let Some(track) = worker.track_of(device) else { return NOTHING };
    let location = match piece.place.device() {
        Some(device) => Location::Device(device),
        None => Location::HostNuma(0),
    };
    let props = ChunkProps { location, handle_types: HandleTypes::POSIX_FD, rdma: false };
    let driver = worker.world.driver();
    let chunk = Chunk::import_fd(driver, descriptor.as_fd(), piece.bytes, &props)?;
    drop(descriptor);
    let range = Range::reserve(driver, piece.bytes, 0, 0)?;
    let mapping = Mapping::map(&range, 0, Arc::new(chunk))?;
    mapping.set_access(&[AccessGrant::read_write(device)])?;
    slots.after_written(&track.stream)?;
    for words in Words::over(mapping.address(), piece.bytes, value).areas(false) {
        worker.enqueue_check(&track.stream, words)?;
    }
    // The mapping goes.
    worker.settle()
}

// ---- with a child ----

/// What is shared, and the child that has it.
pub(super) struct Sharing {
    exporter: Exporter,
    offers: Vec<(u64, Offer, Arc<Item>)>,
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Sharing {
    fn start(world: &World) -> Result<Sharing, Trouble> {
        let name = format!("vmm-pool-soak-{}-{}", std::process::id(), world.next_number());
        let address = Address::Abstract(name);
        let exporter = Exporter::builder().bind(address.clone())?;
        let options = &world.options;
        let program = options.program.as_ref().ok_or(Trouble::Refused("no child"))?;
        let driver = match options.choice {
            DriverChoice::Sim => "sim",
            DriverChoice::Cuda => "cuda",
        };
        let devices = options.devices.to_string();
        let mut child = Command::new(program)
            .args(["--child", &address.to_string(), "--driver", driver, "--devices", &devices])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let streams = child.stdin.take().zip(child.stdout.take());
        let (orders, answers) = streams.ok_or_else(|| Trouble::wrong("a child without streams"))?;
        let answers = BufReader::new(answers);
        let mut sharing = Sharing { exporter, offers: Vec::new(), child, orders, answers };
        sharing.answer()?;
        Ok(sharing)
    }

    /// Sends a line and waits for the answer: `ok`, `again` or what is wrong.
    fn ask(&mut self, order: &str) -> Step {
        writeln!(self.orders, "{order}")?;
        self.orders.flush()?;
        self.answer()
    }

    fn answer(&mut self) -> Step {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        match line.trim() {
            "ok" => Ok(()),
            "again" => Err(Trouble::Refused("shared memory is changing")),
            "" => Err(Trouble::Wrong(format!("the child has ended: {:?}", self.child.wait()))),
            wrong => Err(Trouble::Wrong(format!("the child says: {wrong}"))),
        }
    }

    /// Offers a further buffer, and has the child open it.
    fn offer(&mut self, world: &World, item: Arc<Item>) -> Step {
        let number = world.next_number();
        let name = number.to_string();
        let offer = self.exporter.offer(&name, &item.buffer, Offered::Read)?;
        self.ask(&format!("open {name} {}", item.buffer.capacity_bytes()))?;
        self.offers.push((number, offer, item));
        Ok(())
    }

    /// Ends the child, which must end well.
    pub(super) fn end(mut self) -> Step {
        self.offers.clear();
        self.ask("end")?;
        let status = self.child.wait()?;
        drop(self.exporter);
        if status.success() { Ok(()) } else { Err(Trouble::wrong(status)) }
    }
}

/// Shows the child what a buffer holds now.
pub(super) fn with_child(worker: &mut Worker<'_>) -> Step {
    let world = worker.world;
    let Ok(mut held) = world.sharing.try_lock() else {
        return Err(Trouble::Refused("shared by another thread"));
    };
    let sharing = match &mut *held {
        Some(sharing) => sharing,
        none => none.insert(Sharing::start(world)?),
    };
    if sharing.offers.len() < OFFERS
        && let Some(item) = item(worker)
        && item.buffer.is_exportable()
        && !sharing.offers.iter().any(|(_, _, other)| Arc::ptr_eq(other, &item))
    {
        sharing.offer(world, item)?;
    }
    if sharing.offers.is_empty() {
        return NOTHING;
    }
    let index = worker.rng.below(sharing.offers.len() as u64) as usize;
    if worker.rng.chance(100) {
        let (number, offer, item) = sharing.offers.swap_remove(index);
        drop((offer, item));
        return sharing.ask(&format!("close {number}"));
    }
    let (number, offer, item) = &sharing.offers[index];
    let (item, number) = (item.clone(), *number);
    let slots = item.read();
    let filled = slots.filled();
    let Some(track) = worker.track_of(item.buffer.device()) else { return NOTHING };
    if filled.is_empty() {
        return NOTHING;
    }
    slots.after_written(&track.stream)?;
    let sequence = offer.publish(&track.stream)?;
    let mut order = format!("check {number} {sequence}");
    for (slot, value) in filled.into_iter().take(4) {
        let bytes = item.bytes_of(slot..slot + 1);
        order += &format!(" {}:{}:{value}", bytes.start, bytes.end - bytes.start);
    }
    worker.say(&order);
    sharing.ask(&order)
}

/// Ends what is shared: at a quiet point.
pub(super) fn end(world: &World) -> Step {
    let sharing = lock(&world.sharing).take();
    sharing.map_or(Ok(()), Sharing::end)
}

/// The device whose memory the child counts errors in.
pub(super) const CHILD_DEVICE: DeviceId = DeviceId(0);
