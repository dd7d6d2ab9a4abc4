//! Sleep and wake: the memory behind addresses is given back and comes again, its contents dropped or
//! kept on the host meanwhile.

use std::sync::Arc;

use vmm_pool_cli::replay::Cause;
use vmm_sys::object::{Chunk, Event, Mapping, Range, Stream};
use vmm_sys::{AccessGrant, ChunkProps};

use super::ground::{map_all, unmap_all};
use super::pooled::PoolSleep;
use super::{Case, Ground, Rows};
use crate::gpu::{self, Area};
use crate::timed::{Parts, Run, in_turns};

/// What sleeps.
const VALUE: u8 = 0x5a;

/// Puts `bytes` to sleep and wakes them. Without chunks of host memory only the form that drops the
/// contents is measured.
///
/// # Errors
/// The driver's; bytes that are wrong after a wake.
pub fn measure(
    ground: &Ground,
    bytes: u64,
    chunk_bytes: u64,
    repetitions: u32,
) -> Result<Rows, Cause> {
    let mut rows = Rows::of_work(ground, "sleep", repetitions);
    let case = Case::in_chunks(bytes, chunk_bytes);
    let scene = Scene::new(ground, &case)?;
    {
        let pool = PoolSleep::new(ground, &case, None)?;
        let dropped: Vec<Run<'_>> =
            vec![Box::new(|| scene.dropped()), Box::new(|| pool.sleep_and_wake())];
        rows.add(&case.clone().but("dropped"), in_turns(repetitions, dropped)?, reference)?;
    }
    if let Some(props) = ground.host_props()? {
        let host = Host::new(ground, &case, &props)?;
        let pool = PoolSleep::new(ground, &case, Some(ground.node()))?;
        let kept: Vec<Run<'_>> =
            vec![Box::new(|| scene.kept(&host)), Box::new(|| pool.sleep_and_wake())];
        rows.add(&case.but("to the host"), in_turns(repetitions, kept)?, reference)?;
    }
    Ok(rows)
}

fn reference(side: &str) -> Option<&'static str> {
    match side {
        "pool: sleep" => Some("bare: sleep"),
        "pool: wake" => Some("bare: wake"),
        _ => None,
    }
}

/// Addresses of the home that fall asleep.
struct Scene<'g> {
    ground: &'g Ground,
    stream: Stream,
    range: Range,
    chunk_bytes: u64,
    props: ChunkProps,
    grants: [AccessGrant; 1],
}

/// Memory of the host, made and mapped ahead: making it takes far longer than copying there.
struct Host {
    range: Range,
    /// Kept until the end.
    _mappings: Vec<Mapping>,
}

impl Host {
    fn new(ground: &Ground, case: &Case, props: &ChunkProps) -> Result<Host, Cause> {
        let range = ground.range(case.bytes, case.chunk_bytes)?;
        let chunks: Vec<Arc<Chunk>> = ground.chunks(props, case.bytes, case.chunk_bytes)?;
        let grants = [AccessGrant::read_write(ground.home())];
        Ok(Host { _mappings: map_all(&range, &chunks, &grants)?, range })
    }
}

impl Scene<'_> {
    fn new<'g>(ground: &'g Ground, case: &Case) -> Result<Scene<'g>, Cause> {
        Ok(Scene {
            ground,
            stream: ground.stream()?,
            range: ground.range(case.bytes, case.chunk_bytes)?,
            chunk_bytes: case.chunk_bytes,
            props: ChunkProps::on_device(ground.home()),
            grants: [AccessGrant::read_write(ground.home())],
        })
    }

    /// New memory behind all addresses.
    fn wake(&self) -> Result<Vec<Mapping>, Cause> {
        let bytes = self.range.bytes();
        let chunks = self.ground.chunks(&self.props, bytes, self.chunk_bytes)?;
        map_all(&self.range, &chunks, &self.grants)
    }

    fn dropped(&self) -> Result<Parts, Cause> {
        let standing = self.wake()?;
        // The driver clears what was written before it gives it out again.
        gpu::fill(&self.stream, Area::of_range(&self.range), VALUE)?;
        self.stream.synchronize()?;
        // The mappings alone keep their chunks, so the memory goes with them.
        let ((), sleep) = self.ground.timed(|| unmap_all(standing))?;
        let (standing, wake) = self.ground.timed(|| self.wake())?;
        unmap_all(standing)?;
        Ok(vec![("bare: sleep", sleep), ("bare: wake", wake)])
    }

    fn kept(&self, host: &Host) -> Result<Parts, Cause> {
        let standing = self.wake()?;
        let copied = self.ground.event()?;
        let (here, there) = (Area::of_range(&self.range), Area::of_range(&host.range));
        gpu::fill(&self.stream, here, VALUE)?;
        self.stream.synchronize()?;
        let (copying_out, sleep) = self.ground.timed(|| {
            let ((), copying) = self.ground.timed(|| self.copy(there, here, &copied))?;
            unmap_all(standing)?;
            Ok(copying)
        })?;
        let ((standing, copying_in), wake) = self.ground.timed(|| {
            let standing = self.wake()?;
            let ((), copying) = self.ground.timed(|| self.copy(here, there, &copied))?;
            Ok((standing, copying))
        })?;
        self.check()?;
        // The next repetition must not find these bytes by chance.
        gpu::fill(&self.stream, there, !VALUE)?;
        self.stream.synchronize()?;
        unmap_all(standing)?;
        Ok(vec![
            ("bare: sleep", sleep),
            ("bare: of it copying out", copying_out),
            ("bare: wake", wake),
            ("bare: of it copying in", copying_in),
        ])
    }

    /// Copies chunk by chunk, as the exchange of each could follow its copy, and waits.
    fn copy(&self, dst: Area<'_>, src: Area<'_>, copied: &Event) -> Result<(), Cause> {
        for index in 0..src.bytes() / self.chunk_bytes {
            let offset = index * self.chunk_bytes;
            let (dst, src) =
                (dst.part(offset, self.chunk_bytes)?, src.part(offset, self.chunk_bytes)?);
            gpu::copy(&self.stream, dst, src)?;
        }
        copied.record(&self.stream)?;
        Ok(copied.wait()?)
    }

    /// The first and the last byte of each chunk.
    fn check(&self) -> Result<(), Cause> {
        for index in 0..self.range.bytes() / self.chunk_bytes {
            let start = index * self.chunk_bytes;
            for offset in [start, start + self.chunk_bytes - 1] {
                let mut byte = [0];
                self.range.read(self.ground.home(), offset, &mut byte)?;
                if byte != [VALUE] {
                    return Err(format!("after a wake, byte {offset} is wrong").into());
                }
            }
        }
        Ok(())
    }
}
