//! The thread that makes and ends buffers, one after the other, with no lock held.

use std::collections::HashSet;
use std::sync::Arc;

use vmm_pool::Pool;
use vmm_sys::DeviceId;
use vmm_sys::caught::thrown;

use super::house::{Entry, House, Refused, Task, Wanted};
use crate::error::{Refusal, ShareError};
use crate::exporter::{Exporter, Offered};
use crate::steps::step;
use crate::wire::{Message, OwnerMessage};

pub(super) fn run(house: &House, pool: &Pool, exporter: &Exporter) {
    while let Some(task) = house.next_task() {
        match task {
            Task::Create { client, wanted } => {
                let make = || create_or_find(house, (pool, exporter), client, wanted);
                let made = thrown(make).unwrap_or_else(failed);
                let made = made.map(|(created, write)| OwnerMessage::Created { created, write });
                answer(house, exporter, client, made);
            }
            Task::Release { client, name } => {
                step!("owner-release");
                let release = || house.take(client, &name).map(|entry| end(pool, vec![entry]));
                let released = thrown(release).unwrap_or_else(failed);
                step!("owner-released");
                answer(house, exporter, client, released.map(|()| OwnerMessage::Done));
            }
            Task::End(entries) => {
                if let Err(words) = thrown(|| end(pool, entries)) {
                    vmm_sys::say!(error, words, "the end of a buffer panicked");
                }
            }
        }
    }
    drop(house.take_all());
}

/// What a panic is for the client that asked: the thread goes on for others.
fn failed<T>(words: String) -> Result<T, Refused> {
    vmm_sys::say!(error, words, "the thread of an owner process panicked");
    Err((Refusal::Failed, format!("the owner process panicked: {words}")))
}

/// Gives the memory back to the driver, and keeps none of it ready: whose buffer is next is not known.
fn end(pool: &Pool, entries: Vec<Entry>) {
    let devices: HashSet<DeviceId> = entries.iter().map(|entry| entry.buffer.device()).collect();
    drop(entries);
    for device in devices {
        if let Err(error) = pool.trim(device) {
            vmm_sys::say!(warn, %device, %error, "memory of a buffer that has ended stays with the pool");
        }
    }
}

fn answer(house: &House, exporter: &Exporter, client: u64, answer: Result<OwnerMessage, Refused>) {
    let message = match answer {
        Ok(message) => Message::Owner(message),
        Err((reason, text)) => Message::Refused { reason, text },
    };
    step!("owner-answers");
    house.put_answer(client, message);
    exporter.wake();
}

/// Whether it was created, and whether the client may write.
fn create_or_find(
    house: &House,
    (pool, exporter): (&Pool, &Exporter),
    client: u64,
    wanted: Wanted,
) -> Result<(bool, bool), Refused> {
    if wanted.name.is_empty() || wanted.bytes == 0 {
        return Err((Refusal::Request, "expected a name and at least one byte".to_owned()));
    }
    step!("owner-create");
    if let Some(write) = house.find(client, &wanted)? {
        step!("owner-found");
        return Ok((false, write));
    }
    let Some(uid) = house.uid_of(client) else {
        return Err((Refusal::Failed, "the client has gone".to_owned()));
    };
    let (uuid, device) = house.gpu(wanted.device)?;
    house.check_limits(client, wanted.bytes)?;
    let failed = |error: ShareError| (Refusal::Failed, error.to_string());
    let pool_failed = |error: vmm_pool::Error| (Refusal::Failed, error.to_string());
    let mut builder = pool.elastic(device).capacity_bytes(wanted.bytes).exportable(true);
    if wanted.chunk_bytes > 0 {
        builder = builder.chunk_bytes(wanted.chunk_bytes);
    }
    let buffer = Arc::new(builder.build().map_err(pool_failed)?);
    // Whole chunks: only addresses are taken until now.
    let bytes = wanted.bytes.next_multiple_of(buffer.chunk_bytes());
    house.check_limits(client, bytes)?;
    buffer.grow_to(bytes).map_err(pool_failed)?;
    step!("owner-made");
    let offer = exporter.offer(&wanted.name, &buffer, Offered::ReadWrite).map_err(failed)?;
    step!("owner-offered");
    let entry = Entry::new((offer, buffer), (bytes, uuid), (uid, wanted.others_write));
    house.enter(client, wanted.name, entry);
    step!("owner-entered");
    Ok((true, true))
}
