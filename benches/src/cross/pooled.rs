//! The pool's own moves, sleep and waking, in the form in which programs ask for them.

use std::cell::Cell;
use std::time::Duration;

use vmm_pool::{ChunkSize, Contents, ElasticBuffer, MigrationState, Moved, Place, Pool};
use vmm_pool_cli::replay::Cause;
use vmm_sys::object::Stream;
use vmm_sys::{Access, DeviceId};

use super::{Case, Ground};
use crate::gpu::{self, Area};
use crate::timed::{Parts, Took};

/// Nothing here takes as long.
const LONG: Duration = Duration::from_secs(30);

/// A pool over some devices without a thread of its own, and a buffer of a case.
fn pool_with_buffer(
    ground: &Ground,
    peer: Option<DeviceId>,
    case: &Case,
    kept_on: Option<u32>,
) -> Result<(Pool, ElasticBuffer), Cause> {
    let mut builder = Pool::builder(ground.driver().clone())
        .device(ground.home())
        .background(false)
        .chunk(ChunkSize::Fixed(case.chunk_bytes.min(32 << 20)))
        .stock_marks(0, case.bytes);
    if let Some(peer) = peer {
        let both = [(ground.home(), peer), (peer, ground.home())];
        builder = builder.device(peer);
        for (owner, accessor) in both {
            builder = builder.access(owner, accessor, Access::ReadWrite);
        }
    }
    if let Some(node) = kept_on {
        builder = builder.host_memory(node, case.bytes * 2, 0);
    }
    let pool = builder.build()?;
    let buffer = pool.elastic(ground.home()).capacity_bytes(case.bytes);
    let buffer = buffer.chunk_bytes(case.chunk_bytes).build()?;
    buffer.grow_to(case.bytes)?;
    Ok((pool, buffer))
}

/// The first and the last byte of each chunk.
fn check(buffer: &ElasticBuffer, value: u8, after: &str) -> Result<(), Cause> {
    for piece in buffer.pieces() {
        for offset in [piece.offset, piece.offset + piece.bytes - 1] {
            let mut byte = [0];
            buffer.read(offset, &mut byte)?;
            if byte[0] != value {
                return Err(format!("after {after}, byte {offset} is wrong").into());
            }
        }
    }
    Ok(())
}

fn fill(buffer: &ElasticBuffer, stream: &Stream, value: u8) -> Result<(), Cause> {
    {
        let _using = buffer.use_on(stream)?;
        gpu::fill(stream, Area::of_buffer(buffer), value)?;
    }
    Ok(stream.synchronize()?)
}

/// A buffer that moves to the neighbour and comes back.
pub(super) struct PoolMove<'g> {
    ground: &'g Ground,
    peer: DeviceId,
    buffer: ElasticBuffer,
    stream: Stream,
    value: Cell<u8>,
    _pool: Pool,
}

impl PoolMove<'_> {
    pub(super) fn new<'g>(
        ground: &'g Ground,
        peer: DeviceId,
        case: &Case,
    ) -> Result<PoolMove<'g>, Cause> {
        let (pool, buffer) = pool_with_buffer(ground, Some(peer), case, None)?;
        let (stream, value) = (ground.stream()?, Cell::new(0));
        Ok(PoolMove { ground, peer, buffer, stream, value, _pool: pool })
    }

    /// There, measured; and back. Chunks of both come from the stock, but for the first round.
    pub(super) fn there(&self) -> Result<Parts, Cause> {
        let value = self.value.get().wrapping_add(1);
        self.value.set(value);
        fill(&self.buffer, &self.stream, value)?;
        let ground = self.ground;
        let ((asked, moved), all) = ground.timed(|| {
            let (migration, asked) =
                ground.timed(|| Ok(self.buffer.migrate_async(self.peer)?))?;
            match migration.wait(LONG) {
                MigrationState::Done(moved) => Ok((asked, moved)),
                other => Err(format!("a move did not end well: {other:?}").into()),
            }
        })?;
        check(&self.buffer, value, "a move of the pool")?;
        self.buffer.migrate(ground.home())?;
        check(&self.buffer, value, "a move of the pool and back")?;
        let held = self.held(&moved, &all);
        Ok(vec![
            ("pool: the stream is held", held),
            ("pool: from request to end", uncounted(all)),
            ("pool: of it the caller's thread", uncounted(asked)),
        ])
    }

    /// How long the pool says that streams were held. The simulated device has no such time: there it
    /// is that of all calls.
    fn held(&self, moved: &Moved, all: &Took) -> Took {
        let us = if self.ground.is_gpu() { moved.held_us as f64 } else { all.us };
        Took { us, calls: all.calls.since(&all.calls) }
    }
}

/// Without the calls: how many questions a move asks, and how many chunks it swaps together, goes by
/// how its copies end.
fn uncounted(took: Took) -> Took {
    Took { us: took.us, calls: took.calls.since(&took.calls) }
}

/// A buffer that sleeps and wakes.
pub(super) struct PoolSleep<'g> {
    ground: &'g Ground,
    pool: Pool,
    buffer: ElasticBuffer,
    stream: Stream,
    contents: Contents,
}

impl PoolSleep<'_> {
    /// Kept on a node of the host, whose chunks are made now, or dropped.
    pub(super) fn new<'g>(
        ground: &'g Ground,
        case: &Case,
        kept_on: Option<u32>,
    ) -> Result<PoolSleep<'g>, Cause> {
        let (pool, buffer) = pool_with_buffer(ground, None, case, kept_on)?;
        let contents = match kept_on {
            None => Contents::Dropped,
            Some(node) => {
                pool.prefill(Place::HostNuma(node), case.bytes)?;
                Contents::Kept { node }
            }
        };
        Ok(PoolSleep { ground, pool, buffer, stream: ground.stream()?, contents })
    }

    pub(super) fn sleep_and_wake(&self) -> Result<Parts, Cause> {
        // Nothing that an earlier waking left is of help to the next.
        self.pool.trim(self.ground.home())?;
        fill(&self.buffer, &self.stream, 0x5a)?;
        let (slept, sleep) =
            self.ground.timed(|| Ok(self.buffer.sleep(self.contents, Duration::ZERO)?))?;
        let (woken, wake) = self.ground.timed(|| Ok(self.buffer.wake()?))?;
        if slept != woken || woken != self.buffer.committed_bytes() {
            return Err(format!("{slept} bytes fell asleep, {woken} woke").into());
        }
        if self.contents == Contents::Dropped {
            return Ok(vec![("pool: sleep", sleep), ("pool: wake", wake)]);
        }
        check(&self.buffer, 0x5a, "a sleep")?;
        Ok(vec![("pool: sleep", uncounted(sleep)), ("pool: wake", uncounted(wake))])
    }
}
