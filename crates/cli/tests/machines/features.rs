//! What is tried on each machine. Each leaves nothing behind, whether it works or not.

use std::sync::Arc;
use std::time::Duration;

use vmm_kv::{Dtype, KvShape, PagedCache};
use vmm_pool::{Contents, ElasticBuffer, Place, Pool};
use vmm_sys::object::Stream;
use vmm_sys::sim::Sim;
use vmm_sys::{Access, CaptureMode, DeviceId, Driver};

const HOME: DeviceId = DeviceId(0);
const OTHER: DeviceId = DeviceId(1);
const MIB: u64 = 1 << 20;

/// What became of a feature.
pub(crate) enum Outcome {
    Works,
    /// The machine has too few devices for it.
    NotHere,
    /// An error, as the caller sees it.
    Says(String),
}

/// An error of a feature, or that it needs more devices.
pub(crate) enum Failure {
    NotHere,
    Text(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Text(error.to_string())
    }
}

type Tried = Result<(), Failure>;

impl Outcome {
    pub(crate) fn of(tried: Tried) -> Outcome {
        match tried {
            Ok(()) => Outcome::Works,
            Err(Failure::NotHere) => Outcome::NotHere,
            // The addresses of a simulated machine are the same each time.
            Err(Failure::Text(text)) => Outcome::Says(text),
        }
    }
}

type Feature = (&'static str, fn(&Pool, &Arc<Sim>) -> Tried);

pub(crate) const FEATURES: &[Feature] = &[
    ("blocks", blocks),
    ("elastic buffers", elastic),
    ("captures", captures),
    ("KV cache", kv_cache),
    ("peers", peers),
    ("moves", moves),
    ("host memory", host),
    ("sleep", sleep),
    ("export", export),
];

fn stream(sim: &Arc<Sim>, device: DeviceId) -> Result<Stream, Failure> {
    let driver: Arc<dyn Driver> = sim.clone();
    Ok(Stream::create(&driver, device)?)
}

/// Bytes that differ from place to place.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 % 251) as u8).collect()
}

/// Sizes small and large, twice: the second time they are warm.
fn blocks(pool: &Pool, sim: &Arc<Sim>) -> Tried {
    let lane = pool.lane(&stream(sim, HOME)?)?;
    for _ in 0..2 {
        let mut kept = Vec::new();
        for bytes in [1, 1000, 100 << 10, 3 * MIB] {
            let buffer = lane.alloc(bytes)?;
            let written = pattern(bytes.min(64) as usize);
            buffer.write(0, &written)?;
            kept.push((buffer, written));
        }
        for (buffer, written) in &kept {
            let mut read = vec![0; written.len()];
            buffer.read(0, &mut read)?;
            assert_eq!(&read, written);
        }
    }
    pool.close_lane(lane.stream());
    drop(lane);
    pool.trim(HOME)?;
    Ok(())
}

/// A buffer with four chunks of the pool's choice, the first written.
fn written(pool: &Pool, exportable: bool, tag: &str) -> Result<ElasticBuffer, Failure> {
    let builder = pool.elastic(HOME).capacity_bytes(64 * MIB).exportable(exportable).tag(tag);
    let buffer = builder.build()?;
    buffer.grow_to((4 * buffer.chunk_bytes()).min(buffer.capacity_bytes()))?;
    buffer.write(0, &pattern(64))?;
    Ok(buffer)
}

fn check(buffer: &ElasticBuffer) -> Tried {
    let mut read = vec![0; 64];
    buffer.read(0, &mut read)?;
    assert_eq!(read, pattern(64), "contents");
    Ok(())
}

fn elastic(pool: &Pool, _: &Arc<Sim>) -> Tried {
    let buffer = written(pool, false, "elastic")?;
    buffer.shrink_to(buffer.chunk_bytes())?;
    check(&buffer)
}

fn captures(pool: &Pool, sim: &Arc<Sim>) -> Tried {
    let lane = pool.lane(&stream(sim, HOME)?)?;
    let scope = lane.capture()?;
    // SAFETY: a live stream.
    unsafe { sim.capture_begin(HOME, lane.stream().handle(), CaptureMode::ThreadLocal) }?;
    let buffer = lane.alloc(1000);
    // SAFETY: the stream is being captured; the graph is not used afterwards.
    unsafe {
        let graph = sim.capture_end(HOME, lane.stream().handle())?;
        sim.graph_destroy(HOME, graph)?;
    }
    let memory = scope.finish();
    let buffer = buffer?;
    drop((buffer, memory));
    pool.close_lane(lane.stream());
    Ok(())
}

fn kv_cache(pool: &Pool, sim: &Arc<Sim>) -> Tried {
    let shape = KvShape::new(2, 2, 64, Dtype::F16)?;
    let stream = stream(sim, HOME)?;
    let builder = PagedCache::builder(pool, &stream, shape);
    let cache = builder.block_tokens(16).max_blocks(64).build()?;
    let mut sequence = cache.open(10)?;
    sequence.append(100)?;
    drop(sequence.fork()?);
    Ok(())
}

fn two(pool: &Pool) -> Tried {
    if pool.devices().count() < 2 { Err(Failure::NotHere) } else { Ok(()) }
}

/// The other device reads what lies at home.
fn peers(pool: &Pool, _: &Arc<Sim>) -> Tried {
    two(pool)?;
    let buffer = written(pool, false, "peers")?;
    buffer.grant(OTHER, Access::Read)?;
    let mut read = vec![0; 64];
    buffer.read_by(OTHER, 0, &mut read)?;
    assert_eq!(read, pattern(64), "as the peer reads it");
    Ok(())
}

fn moves(pool: &Pool, _: &Arc<Sim>) -> Tried {
    two(pool)?;
    let buffer = written(pool, false, "moves")?;
    let moved = buffer.migrate(OTHER);
    // Moved or not, it has its contents.
    check(&buffer)?;
    moved?;
    Ok(())
}

fn host(pool: &Pool, _: &Arc<Sim>) -> Tried {
    let buffer = written(pool, false, "host")?;
    let moved = buffer.migrate(Place::HostNuma(0));
    check(&buffer)?;
    moved?;
    Ok(())
}

/// Contents are kept where they can be, and the buffer wakes as it was.
fn sleep(pool: &Pool, _: &Arc<Sim>) -> Tried {
    let buffer = written(pool, false, "sleep")?;
    let slept = pool.sleep("sleep", Contents::Kept { node: 0 }, Duration::ZERO);
    if slept.is_ok() {
        pool.wake("sleep")?;
    }
    check(&buffer)?;
    slept?;
    Ok(())
}

fn export(pool: &Pool, _: &Arc<Sim>) -> Tried {
    let buffer = written(pool, true, "export")?;
    let pieces = buffer.export_pieces()?;
    if pieces.is_empty() {
        return Err(Failure::Text("nothing was exported".into()));
    }
    drop(pieces);
    check(&buffer)
}
