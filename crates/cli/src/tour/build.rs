//! The pool over the devices, with memory made ahead, and the buffer that everything happens to.

use std::sync::Arc;

use vmm_pool::{ChunkSize, ElasticError, Error, Place, Pool};
use vmm_sys::object::{Event, Stream};
use vmm_sys::{ChunkProps, DeviceId, Driver, DriverResult, GranularityKind, ProbeKernel};

use super::bytes::launch;
use super::others::OTHERS;
use super::stage::{Actor, Stage, TAG};
use super::telling::{Trouble, mib};
use super::{BYTES_MAX, Plan};

/// The node of the host that may give memory.
const NODE: u32 = 0;
/// Chunks that are longer are no quicker to map.
const CHUNK_MAX: u64 = 32 << 20;
/// Growth happens in two halves, and a neighbour gives a part more.
const CHUNKS_MIN: u64 = 4;
/// Addresses cost nothing: 1 TiB.
pub(super) const CAPACITY: u64 = 2 * BYTES_MAX;

pub(super) fn stage(plan: &Plan) -> Result<(Stage, String), Trouble> {
    let driver = &plan.driver;
    let Some(&home) = plan.devices.first() else {
        return Err(Trouble::wrong("expected a device, found none"));
    };
    let devices: Vec<DeviceId> = plan.devices.iter().copied().take(2).collect();
    let mut free_bytes = Vec::new();
    for device in &devices {
        warm_up(driver, *device)?;
    }
    for device in &devices {
        free_bytes.push(driver.mem_info(*device)?.free_bytes);
    }
    let (chunk_bytes, bytes) = lengths(driver, home, plan.bytes)?;
    let (pool, host) = pool(driver, &devices, chunk_bytes, bytes)?;
    let made = pool.prefill(home, bytes / 2)?;
    let buffer = pool.elastic(home).capacity_bytes(CAPACITY).chunk_bytes(chunk_bytes).tag(TAG);
    let buffer = buffer.build()?;
    let mut actors = Vec::new();
    for (device, free_bytes) in devices.iter().zip(free_bytes) {
        let stream = Stream::create(driver, *device)?;
        let counter = pool.lane(&stream)?.alloc(4)?;
        actors.push(Actor { device: *device, stream, counter, free_bytes });
    }
    let mut actors = actors.into_iter();
    let first = actors.next().ok_or_else(|| Trouble::wrong("expected a device, found none"))?;
    let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
    let text = format!(
        "a pool over {}, {} made ahead on {home}; a buffer with 1 TiB of addresses at {:#x}",
        names.join(" and "),
        mib(made),
        buffer.address()
    );
    let stage = Stage {
        graph: None,
        address: buffer.address(),
        buffer,
        first,
        second: actors.next().ok_or_else(|| "there is one device".to_owned()),
        host,
        bytes,
        value: 1,
        pool,
        driver: driver.clone(),
        sim: plan.sim.clone(),
        program: plan.program.clone(),
    };
    stage.check_sound()?;
    Ok((stage, text))
}

/// The length of the chunks and of the buffer: some chunks in any case, and an even number of them.
fn lengths(driver: &Arc<dyn Driver>, home: DeviceId, bytes: u64) -> Result<(u64, u64), Trouble> {
    if bytes == 0 || bytes > BYTES_MAX {
        return Err(Trouble::Wrong(format!("expected 1 to {BYTES_MAX} bytes, found {bytes}")));
    }
    let props = ChunkProps::on_device(home);
    let granularity = driver.granularity(&props, GranularityKind::Minimum)?;
    let wanted = (bytes / (2 * CHUNKS_MIN)).min(CHUNK_MAX);
    let chunk_bytes = wanted.next_multiple_of(granularity).max(granularity);
    Ok((chunk_bytes, bytes.next_multiple_of(CHUNKS_MIN * chunk_bytes)))
}

/// With memory of the host, if the machine has any for its devices.
fn pool(
    driver: &Arc<dyn Driver>,
    devices: &[DeviceId],
    chunk_bytes: u64,
    bytes: u64,
) -> Result<(Pool, Result<Place, String>), Trouble> {
    let mut builder = Pool::builder(driver.clone()).chunk(ChunkSize::Fixed(chunk_bytes));
    for device in devices {
        builder = builder.device(*device);
    }
    match builder.clone().host_memory(NODE, 2 * bytes, 0).build() {
        Ok(pool) => Ok((pool, Ok(Place::HostNuma(NODE)))),
        Err(Error::Elastic(error @ ElasticError::NoHostMemory { .. })) => {
            Ok((builder.build()?, Err(error.to_string())))
        }
        Err(error) => Err(error.into()),
    }
}

/// Has the driver make what it keeps for itself, as contexts, kernels and streams, before free memory
/// is asked for.
fn warm_up(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<()> {
    let streams = (0..OTHERS + 4).map(|_| Stream::create(driver, device));
    let streams: Vec<Stream> = streams.collect::<DriverResult<_>>()?;
    for stream in &streams {
        launch(stream, &ProbeKernel::Spin { busy_us: 1, done: 0 })?;
        Event::create(driver, device)?.record(stream)?;
        stream.synchronize()?;
    }
    Ok(())
}
